"""What one execution of a kernel did, warp by warp: basic blocks and synchronisation in program order, without any time.

    recorder = Recorder()
    gpu.observer = recorder          # a fa4.vgpu.Gpu, or what attach() gives
    ...                              # launches
    trace = recorder.traces[-1]

Control flow of the kernels that this is made for depends on data, and hardly on time, so one execution serves every machine model. What
does depend on time is taken out: a wait that was tried several times, or a loop that looks at global memory until it finds what it
wants, is one event.
"""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fa4.errors import ModelError
from fa4.vgpu.decode import Decoder
from fa4.vgpu.observe import Values
from fa4.vgpu.program import Kernel, Program

FORMAT = 1
_REMEDY = "record it again with fa4.perfmodel.Recorder"


class Event(NamedTuple):
    """What an instruction asks of the machine; ``op`` is its number in ``Kernel.ops``. ``fa4.vgpu.decode`` lists kinds and data."""

    kind: str
    op: int
    data: tuple[int, ...]


@dataclass(frozen=True)
class WarpTrace:
    """Blocks entered and events, both in program order."""

    path: tuple[int, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True)
class CtaTrace:
    """One CTA: ``index`` in the grid, ``cluster`` (its number) and ``rank`` in that, and its warps."""

    index: int
    cluster: int
    rank: int
    warps: tuple[WarpTrace, ...]


@dataclass(frozen=True)
class Trace:
    """One launch. Sizes in CTAs and threads; ``shared_bytes`` are all that a CTA has; ``cubin`` is the machine code, where it is known."""

    arch: str
    kernel: str
    ptx: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    ctas: tuple[CtaTrace, ...]
    cubin: bytes = b""

    @property
    def code(self) -> Kernel:
        """The kernel's instructions."""
        return _parsed(self.ptx).kernel(self.kernel)

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]

    def clusters(self) -> dict[int, tuple[CtaTrace, ...]]:
        """The recorded clusters by number, in order, each with its CTAs by rank."""
        found: dict[int, list[CtaTrace]] = {}
        for cta in sorted(self.ctas, key=lambda c: (c.cluster, c.rank)):
            found.setdefault(cta.cluster, []).append(cta)
        return {number: tuple(ctas) for number, ctas in found.items()}

    def data(self) -> dict[str, Any]:
        """Everything as JSON-able data."""
        ctas = [
            {"index": c.index, "cluster": c.cluster, "rank": c.rank, "warps": [{"path": w.path, "events": w.events} for w in c.warps]}
            for c in self.ctas
        ]
        head = {name: getattr(self, name) for name in _HEAD}
        return {"format": FORMAT, **head, "cubin": base64.b64encode(self.cubin).decode(), "ctas": ctas}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Trace:
        """The inverse of ``data``.

        Raises:
            ModelError: it is no trace, or one of another format.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ModelError("trace", found, f"must have format {FORMAT}", _REMEDY)
        try:
            head: dict[str, Any] = {name: tuple(value) if isinstance(value := data[name], list) else value for name in _HEAD}
            cubin = base64.b64decode(data["cubin"])
            ctas = tuple(
                CtaTrace(c["index"], c["cluster"], c["rank"], tuple(_warp(w["path"], w["events"]) for w in c["warps"]))
                for c in data["ctas"]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError("trace", type(error).__name__, f"is damaged: {error}", _REMEDY) from error
        return cls(**head, ctas=ctas, cubin=cubin)

    def save(self, path: str | Path) -> None:
        """Write a file (JSON, compressed by gzip)."""
        Path(path).write_bytes(gzip.compress(json.dumps(self.data()).encode(), mtime=0))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file.

        Raises:
            ModelError: it is no trace.
        """
        try:
            data = json.loads(gzip.decompress(Path(path).read_bytes()))
        except (OSError, EOFError, ValueError) as error:
            raise ModelError("trace", str(path), f"cannot be read: {error}", _REMEDY) from error
        return cls.from_data(data)


@lru_cache(maxsize=16)
def _parsed(ptx: str) -> Program:
    return Program.parse(ptx)


_HEAD = ("arch", "kernel", "ptx", "grid", "block", "cluster", "shared_bytes")


def _warp(path: list[int], events: list[Any]) -> WarpTrace:
    return WarpTrace(tuple(path), tuple(Event(kind, op, tuple(data)) for kind, op, data in events))


@dataclass
class _Warp:
    """A warp while it is recorded; ``mark`` is how long the path was at the last event that may be tried again."""

    path: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    mark: int = -1


_TRIED_AGAIN = ("wait", "poll")


def _again(last: Event, event: Event) -> bool:
    """Whether a warp tries the same once more: of a look at memory what was found may differ."""
    same = last.data[:1] == event.data[:1] if event.kind == "poll" else last.data == event.data
    return last.kind == event.kind and last.op == event.op and same


class Recorder:
    """An observer of a virtual GPU that makes a ``Trace`` of every launch.

    Args:
        clusters: how many clusters (or CTAs, without clusters) of a launch are recorded; None: all.
        arch: compile target of what is recorded; that of the PTX where it is not given.
    """

    def __init__(self, clusters: int | None = None, arch: str | None = None) -> None:
        self._limit, self._arch = clusters, arch
        self._done: list[Trace] = []
        self._launch: Any = None

    @property
    def traces(self) -> list[Trace]:
        """Of every launch so far, in order."""
        self._finish()
        return self._done

    # What the virtual GPU calls

    def launch(self, launch: Any, program: Program) -> None:
        """A kernel begins."""
        self._finish()
        self._launch, self._program = launch, program
        self._warps: dict[tuple[int, int], _Warp] = {}
        self._decoder = Decoder(launch)
        self._places: dict[int, tuple[int, int]] = {}

    def block(self, cta: int, warp: int, block: int, lanes: int) -> None:
        """A warp begins a block."""
        found = self._warps.get((cta, warp))
        if found is None:
            if self._limit is not None and self._place(cta)[0] >= self._limit:
                return
            found = self._warps[cta, warp] = _Warp()
        found.path.append(block)

    def event(self, cta: int, warp: int, op: int, lanes: int, values: Values) -> None:
        """A warp synchronises or moves memory."""
        found = self._warps.get((cta, warp))
        if found is None:
            return
        decoded = self._decoder.decode(op, self._place(cta)[1], lanes, values)
        if decoded is None:
            return
        event = Event(decoded[0], op, decoded[1])
        if event.kind in _TRIED_AGAIN:
            if found.events and found.mark > 0 and _again(found.events[-1], event):
                del found.path[found.mark :]  # the loop that tried again was not worth a trip
                found.events.pop()
            found.mark = len(found.path)
        found.events.append(event)

    def _place(self, cta: int) -> tuple[int, int]:
        """(number of the cluster, rank in it)."""
        place = self._places.get(cta)
        if place is None:
            grid, size = self._launch.grid, self._launch.cluster
            at = cta % grid[0], cta // grid[0] % grid[1], cta // (grid[0] * grid[1])
            outer = tuple(a // s for a, s in zip(at, size, strict=True))
            inner = tuple(a % s for a, s in zip(at, size, strict=True))
            counts = tuple(g // s for g, s in zip(grid, size, strict=True))
            number = outer[0] + counts[0] * (outer[1] + counts[1] * outer[2])
            place = self._places[cta] = number, inner[0] + size[0] * (inner[1] + size[1] * inner[2])
        return place

    def _finish(self) -> None:
        if self._launch is None:
            return
        launch, self._launch = self._launch, None
        ctas: dict[int, dict[int, WarpTrace]] = {}
        for (cta, warp), found in self._warps.items():
            ctas.setdefault(cta, {})[warp] = WarpTrace(tuple(found.path), tuple(found.events))
        recorded = tuple(
            CtaTrace(index, *self._places[index], tuple(warps[w] for w in sorted(warps))) for index, warps in sorted(ctas.items())
        )
        self._done.append(
            Trace(
                arch=self._arch or self._program.target,
                kernel=launch.kernel.name,
                ptx=self._program.text,
                grid=launch.grid,
                block=launch.block,
                cluster=launch.cluster,
                shared_bytes=launch.shared_bytes,
                ctas=recorded,
                cubin=self._program.cubin,
            )
        )
