"""What a kernel spends its instructions, waits, wavefronts, bytes and products on, by role and by source line.

    gpu.observer = profile = Profile(["softmax"] * 4 + ["mma"])  # or Profile(): a role for every four warps
    ...                                                          # launches
    print(profile.reports[-1])

Instruction time is the number of instructions that a CTA has issued, where warps that execute a block together count once. It tells
who waits for whom in one schedule of the virtual GPU, not durations on a GPU: copies and products, which run beside the warps, take none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from os.path import commonpath
from typing import TYPE_CHECKING, Any, TypeVar

from fa4.vgpu.decode import Decoder
from fa4.vgpu.engine import WAITING
from fa4.vgpu.errors import LaunchError
from fa4.vgpu.observe import Values
from fa4.vgpu.program import Op, Program
from fa4.vgpu.report import launch_report

if TYPE_CHECKING:
    from fa4.vgpu.machine import Launch
    from fa4.vgpu.state import Cta, Warp

_Work = TypeVar("_Work", "WaitWork", "SharedWork", "BulkWork")

_WARPS = 4
"""Warps of a role that has no name."""
_WAITS = frozenset(("wait", "test", "cluster_wait", "bulk_wait", "cp_wait", "wg_wait", "twait"))
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")


@dataclass
class RoleWork:
    """Warps of a CTA, and over all CTAs: warp instructions, by class (the first word of an opcode), and instruction time waited."""

    role: str
    warps: tuple[int, ...]
    instructions: int = 0
    by_class: dict[str, int] = field(default_factory=dict)
    waited: int = 0
    share: float = 0.0
    """Of the instruction time of the role's warps, what they were waiting: 0 to 1."""


@dataclass
class WaitWork:
    """A waiting instruction: how often warps executed it and were stopped by it, and how long, in instruction time over all warps.

    ``on`` is "barrier 1", or "mbarrier 0x408" by its offset in shared memory; empty for what waits for the warp's own operations.
    """

    role: str
    opcode: str
    on: str
    source: str
    executed: int = 0
    stopped: int = 0
    time: int = 0


@dataclass
class SharedWork:
    """An instruction that accesses shared memory: bytes asked for, its wavefronts, and as few as its different words need.

    A wavefront serves a word of each of the 32 banks, to however many lanes want it. The cost is the most different words of one bank.
    """

    opcode: str
    source: str
    executed: int = 0
    bytes: int = 0
    wavefronts: int = 0
    ideal: int = 0


@dataclass
class BulkWork:
    """Bulk copies of one kind: "load", "store", "reduce" (between global and shared memory) or "copy" (to another CTA of the cluster).

    ``copies`` are counted by the CTA that gets them; of a tensor map ``bytes`` are whole boxes, with what lies out of bounds.
    """

    kind: str
    role: str
    source: str
    copies: int = 0
    bytes: int = 0


@dataclass
class ProductWork:
    """Matrix products of one instruction and shape: ``executed`` by so many warps, together ``flop`` (2 M N K each).

    A ``wgmma`` is executed by four warps, each of which counts for its 16 of the 64 rows.
    """

    role: str
    opcode: str
    shape: str
    executed: int = 0
    flop: int = 0


@dataclass
class ProfileReport:
    """What one launch did; ``str(report)`` is a text, ``data()`` fit for JSON.

    ``source`` is always "file:line", innermost where functions are inlined, or "PTX line N" without a line table. ``time`` is instruction
    time, summed over CTAs. ``by_source`` has warp instructions of each source line by role; ``bytes`` is what lanes asked for, by space,
    and what bulk copies moved, as in ``Report``.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    time: int
    roles: list[RoleWork]
    by_source: dict[str, dict[str, int]]
    waits: list[WaitWork]
    shared: list[SharedWork]
    bytes: dict[str, int]
    bulk: list[BulkWork]
    products: list[ProductWork]

    def data(self) -> dict[str, Any]:
        """Everything as dictionaries, lists, strings and numbers."""
        return asdict(self)

    def text(self, lines: int = 10) -> str:
        """For people: of each part the ``lines`` largest rows."""
        return "\n".join(self._lines(lines))

    def __str__(self) -> str:
        return self.text()

    def _lines(self, limit: int) -> Iterator[str]:
        yield f"{self.kernel}: grid {self.grid} block {self.block} cluster {self.cluster}, instruction time {self.time:,}"
        yield "\nroles"
        rows = []
        for r in self.roles:
            most = sorted(r.by_class.items(), key=lambda item: (-item[1], item[0]))[:4]
            classes = ", ".join(f"{name} {count:,}" for name, count in most)
            rows.append((r.role, len(r.warps), r.instructions, r.waited, f"{100 * r.share:.0f}%", classes))
        yield from _table(("role", "warps", "instructions", "waited", "share", "most of them"), rows, limit=len(rows), left=(0, 5))
        yield "\ninstructions by source line"
        folder = _folder(self.by_source)
        lines = sorted(self.by_source.items(), key=lambda item: (-sum(item[1].values()), item[0]))
        columns = [r.role for r in self.roles if r.instructions]
        yield from _table(
            ("source", *columns, "all"),
            [(s.removeprefix(folder), *(by.get(c, 0) for c in columns), sum(by.values())) for s, by in lines],
            limit,
            (0,),
        )
        parts: tuple[tuple[str, Sequence[Any], Callable[[Any], Any], tuple[int, ...]], ...] = (
            ("waits", self.waits, lambda w: (-w.time, -w.executed), (0, 1, 2, 3)),
            ("shared memory", self.shared, lambda s: (s.ideal - s.wavefronts, -s.wavefronts), (0, 1)),
            ("bulk copies", self.bulk, lambda b: -b.bytes, (0, 1, 2)),
            ("matrix products", self.products, lambda p: -p.flop, (0, 1, 2)),
        )
        for title, found, order, left in parts:
            if found:
                yield f"\n{title}{self._total(title)}"
                names = tuple(f.name for f in fields(found[0]))
                shown = [
                    [str(v).removeprefix(folder) if n == "source" else v for n, v in vars(row).items()] for row in sorted(found, key=order)
                ]
                yield from _table(names, shown, limit, left)
        yield "\nbytes: " + ", ".join(f"{space} {size:,}" for space, size in sorted(self.bytes.items()))

    def _total(self, title: str) -> str:
        if title == "shared memory":
            actual, ideal = sum(s.wavefronts for s in self.shared), sum(s.ideal for s in self.shared)
            return f": {actual:,} wavefronts, {ideal:,} without conflicts"
        if title == "bulk copies":
            return f": {sum(b.bytes for b in self.bulk):,} bytes"
        if title == "matrix products":
            return f": {sum(p.flop for p in self.products):,} FLOP"
        return ""


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]], limit: int, left: Sequence[int]) -> Iterator[str]:
    """Aligned columns, those in ``left`` to the left; rows beyond ``limit`` are counted only."""
    cells = [list(header), *([f"{c:,}" if isinstance(c, int) else str(c) for c in row] for row in rows[:limit])]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        yield "  " + "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
    if len(rows) > limit:
        yield f"  and {len(rows) - limit} more"


def _folder(sources: Iterable[str]) -> str:
    """The folder that all source files lie in, with a slash; texts leave it out."""
    folders = [source.rpartition("/")[0] for source in sources if ":" in source]
    common = commonpath(folders) if folders and all(folders) else ""
    return f"{common}/" if common else ""


def source_of(op: Op) -> str:
    """Where an instruction comes from: the innermost source line, or its line of PTX."""
    return op.source.split(" inlined at ")[0] or f"PTX line {op.line}"


class Profile:
    """An observer of a ``Gpu`` that makes a ``ProfileReport`` of every launch.

    Args:
        roles: the name of each warp of a CTA; warps of equal names are one role. None: four warps are one, "warps 0-3" and so on.

    Raises:
        LaunchError: at a launch, of more or fewer warps than have names.
    """

    def __init__(self, roles: Sequence[str] | None = None) -> None:
        self._roles = None if roles is None else tuple(roles)
        self._launches: list[_Counts] = []

    @property
    def reports(self) -> list[ProfileReport]:
        """Of every launch so far, in order; of one that failed, up to there."""
        return [counts.report() for counts in self._launches]

    # What the virtual GPU calls

    def launch(self, launch: Launch, program: Program) -> None:
        """A kernel begins."""
        warps = -(-launch.threads // 32)
        if self._roles is not None and len(self._roles) != warps:
            raise LaunchError(f"Profile(roles=...): {len(self._roles)} names, but {launch.kernel.name} has {warps} warps: name each")
        self._launches.append(_Counts(launch, self._roles or _numbered(warps)))
        launch.on_park = self._launches[-1].park

    def block(self, cta: int, warp: int, block: int, lanes: int) -> None:
        """A warp begins a block."""
        self._launches[-1].enter(cta, block)

    def event(self, cta: int, warp: int, op: int, lanes: int, values: Values) -> None:
        """A warp synchronises or moves memory."""
        self._launches[-1].count((cta, warp), op, lanes, values)


def _numbered(warps: int) -> tuple[str, ...]:
    names = []
    for first in range(0, warps, _WARPS):
        last = min(first + _WARPS, warps) - 1
        names += [f"warps {first}-{last}" if last > first else f"warp {first}"] * (last - first + 1)
    return tuple(names)


def _merged(works: Iterable[_Work], names: Sequence[str]) -> list[_Work]:
    """Rows that agree in these fields as one, with the sums of the others."""
    found: dict[tuple[Any, ...], _Work] = {}
    for work in works:
        key = tuple(getattr(work, name) for name in names)
        if key not in found:
            found[key] = replace(work)
            continue
        for f in fields(work):
            if f.name not in names:
                setattr(found[key], f.name, getattr(found[key], f.name) + getattr(work, f.name))
    return list(found.values())


def _multiply(
    products: dict[tuple[str, str, str], ProductWork], role: str, opcode: str, shape: tuple[int, int, int], times: int, flop: int
) -> None:
    """Add products of one shape, with so many operations together."""
    name = "m{}n{}k{}".format(*shape)
    work = products.setdefault((role, opcode, name), ProductWork(role, opcode, name))
    work.executed += times
    work.flop += flop


class _Counts:
    """What one launch did so far."""

    def __init__(self, launch: Launch, roles: tuple[str, ...]) -> None:
        self.launched, self.roles = launch, roles
        self.kernel = launch.kernel
        self.decoder = Decoder(launch)
        self.sizes = [len(block.all) for block in self.kernel.blocks]
        self.sources = [source_of(op) for op in self.kernel.ops]
        self.tick = -1
        self.now: dict[int, int] = {}
        self.parked: list[tuple[Warp, int, WaitWork, int]] = []  # with the CTA, and the time since when
        self.waits: dict[tuple[str, int, str], WaitWork] = {}
        self.last: dict[tuple[int, int], tuple[int, str]] = {}  # of a warp: the last waiting instruction, and what for
        self.shared: dict[int, SharedWork] = {}
        self.bulk: dict[tuple[str, str, int], BulkWork] = {}
        self.products: dict[tuple[str, str, str], ProductWork] = {}

    def enter(self, cta: int, block: int) -> None:
        """A block begins: the time of its CTA goes on, once for all warps that execute it together."""
        if self.launched.ticks == self.tick:
            return
        self.tick = self.launched.ticks
        self.wake()
        self.now[cta] = self.now.get(cta, 0) + self.sizes[block]

    def park(self, cta: Cta, warp: Warp, block: int) -> None:
        """The end of a block leaves a warp waiting."""
        op = self.kernel.starts[block] + self.sizes[block] - 1
        last, on = self.last.get((cta.index, warp.index), (-1, ""))
        work = self.wait(warp.index, op, on if last == op else "")
        work.stopped += 1
        self.parked.append((warp, cta.index, work, self.now[cta.index]))

    def wake(self) -> None:
        """Account for the warps that do not wait any more."""
        if any(warp.state != WAITING for warp, *_ in self.parked):
            for warp, cta, work, since in self.parked:
                if warp.state != WAITING:
                    work.time += self.now[cta] - since
            self.parked = [entry for entry in self.parked if entry[0].state == WAITING]

    def wait(self, warp: int, op: int, on: str) -> WaitWork:
        """Of a warp's role at an instruction."""
        key = self.roles[warp], op, on
        if key not in self.waits:
            self.waits[key] = WaitWork(self.roles[warp], self.kernel.ops[op].opcode, on, self.sources[op])
        return self.waits[key]

    def count(self, place: tuple[int, int], op: int, lanes: int, values: Values) -> None:
        """The warp at ``place`` (CTA, warp) executes an instruction that synchronises or moves memory."""
        warp = place[1]
        decoded = self.decoder.decode(op, 0, lanes, values)
        if decoded is None:
            return
        kind, data = decoded
        if kind in _WAITS or (kind == "bar" and not data[2]):
            on = f"barrier {data[0]}" if kind == "bar" else f"mbarrier {data[1]:#x}" if kind in ("wait", "test") else ""
            self.last[place] = op, on
            self.wait(warp, op, on).executed += 1
        elif kind in ("lds", "sts"):
            wavefronts, size, ideal = data
            self.access(op, size, wavefronts, ideal)
        elif kind == "cp":
            size, wavefronts, _, ideal = data
            self.access(op, size, wavefronts, ideal)
        elif kind == "load":
            self.copy(("load", self.roles[warp], op), len(data) // 4, sum(data[::4]))
        elif kind == "store":
            self.copy(("reduce" if data[1] else "store", self.roles[warp], op), 1, data[0])
        elif kind == "copy":
            self.copy(("copy", self.roles[warp], op), 1, data[0])
        elif kind == "mma":
            _, m, n, k, *_ = data
            _multiply(self.products, self.roles[warp], self.kernel.ops[op].opcode, (m, n, k), 1, 2 * m * n * k)
        elif kind == "wgmma":
            n, k, *_ = data
            _multiply(self.products, self.roles[warp], ".".join(self.kernel.ops[op].opcode.split(".")[:2]), (64, n, k), 1, 2 * 16 * n * k)

    def access(self, op: int, size: int, wavefronts: int, ideal: int) -> None:
        """To shared memory."""
        if op not in self.shared:
            self.shared[op] = SharedWork(self.kernel.ops[op].opcode, self.sources[op])
        work = self.shared[op]
        work.executed += 1
        work.bytes += size
        work.wavefronts += wavefronts
        work.ideal += ideal

    def copy(self, key: tuple[str, str, int], copies: int, size: int) -> None:
        """Bulk copies."""
        if key not in self.bulk:
            self.bulk[key] = BulkWork(*key[:2], self.sources[key[2]])
        self.bulk[key].copies += copies
        self.bulk[key].bytes += size

    def report(self) -> ProfileReport:
        """Of all that was counted."""
        self.wake()
        products = {key: replace(work) for key, work in self.products.items()}
        works = {name: RoleWork(name, tuple(w for w, r in enumerate(self.roles) if r == name)) for name in dict.fromkeys(self.roles)}
        by_source: dict[str, dict[str, int]] = {}
        for (index, _), counts in self.launched.counts.items():
            for role, work in works.items():
                times = int(counts[list(work.warps)].sum())
                for op, source in self._ops(index) if times else ():
                    work.instructions += times
                    name = op.name
                    work.by_class[name] = work.by_class.get(name, 0) + times
                    here = by_source.setdefault(source, {})
                    here[role] = here.get(role, 0) + times
                    if name == "mma" and (shape := _SHAPE.search(op.opcode)):
                        m, n, k = map(int, shape.groups())
                        _multiply(products, role, "mma", (m, n, k), times, 2 * m * n * k * times)
        time = sum(self.now.values())
        for wait in self.waits.values():
            works[wait.role].waited += wait.time
        for work in works.values():
            work.share = work.waited / (len(work.warps) * time) if time else 0.0
        return ProfileReport(
            kernel=self.kernel.name,
            grid=self.launched.grid,
            block=self.launched.block,
            cluster=self.launched.cluster,
            time=time,
            roles=list(works.values()),
            by_source=by_source,
            waits=_merged(self.waits.values(), ("role", "opcode", "on", "source")),
            shared=_merged(self.shared.values(), ("opcode", "source")),
            bytes=launch_report(self.launched, 0.0).bytes,
            bulk=_merged(self.bulk.values(), ("kind", "role", "source")),
            products=list(products.values()),
        )

    def _ops(self, block: int) -> Iterator[tuple[Op, str]]:
        first = self.kernel.starts[block]
        for number, op in enumerate(self.kernel.blocks[block].all):
            yield op, self.sources[first + number]
