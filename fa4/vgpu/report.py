"""What launches did, as plain data and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4.vgpu.errors import VgpuError

if TYPE_CHECKING:
    from fa4.vgpu.machine import Launch


@dataclass(frozen=True, repr=False)
class Report:
    """Counts of one launch, or of all launches of a machine, which are then in ``launches``.

    ``instructions`` are warp instructions. ``by_opcode`` has full opcodes, ``by_class`` their first words, ``by_warp`` the warps of a CTA
    summed over CTAs, ``by_source`` source lines ("file:line", "" without a line table). ``bytes`` are what lanes asked for, by space,
    and what bulk copies moved.
    ``steps`` are basic blocks executed, ``seconds`` is the time of the host. ``kernel``, ``grid`` and ``block`` say what was launched.

    ``str(report)`` is a text of several lines; ``data()`` is fit for JSON.
    """

    instructions: int
    by_opcode: dict[str, int]
    by_class: dict[str, int]
    by_warp: tuple[int, ...]
    by_source: dict[str, int]
    bytes: dict[str, int]
    ctas: int
    steps: int
    seconds: float
    kernel: str = ""
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    launches: tuple[Report, ...] = ()

    def data(self) -> dict[str, Any]:
        """Everything as dictionaries, lists, strings and numbers."""
        return asdict(self)

    def text(self, lines: int = 10) -> str:
        """For people: totals, the ``lines`` busiest source lines, and a line for each launch."""
        return "\n".join(self._lines(lines))

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Report: {self._summary()}>"

    def _summary(self) -> str:
        what = f"{self.kernel} " if self.kernel else f"{len(self.launches)} launch{'' if len(self.launches) == 1 else 'es'}, "
        if self.grid is not None:
            what += f"grid {self.grid} block {self.block}: "
        moved = "".join(f", {size:,} B {space}" for space, size in _ranked(self.bytes))
        return f"{what}{self.ctas:,} CTAs, {self.instructions:,} warp instructions{moved}, {self.seconds:.3g} s"

    def _lines(self, limit: int) -> Iterator[str]:
        yield self._summary()
        yield "by class: " + ", ".join(f"{name} {count:,}" for name, count in _ranked(self.by_class))
        yield "by warp: " + ", ".join(f"{warp}: {count:,}" for warp, count in enumerate(self.by_warp))
        sources = [(count, source) for source, count in _ranked(self.by_source) if source]
        if sources:
            yield "by source line:"
            yield from (f"  {count:>12,}  {source}" for count, source in sources[:limit])
            if len(sources) > limit:
                yield f"  {sum(count for count, _ in sources[limit:]):>12,}  on {len(sources) - limit} other lines"
        for number, launch in enumerate(self.launches, start=1):
            yield f"launch {number}: {launch._summary()}"


def _ranked(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


class StepLimit:
    """An observer that ends a run which does not end by itself; ``done`` counts blocks, by warp."""

    blocks_only = True

    def __init__(self, blocks: int) -> None:
        self.blocks, self.done = blocks, 0

    def launch(self, *_: Any) -> None:
        """Nothing to do."""

    def block(self, *_: Any) -> None:
        """One more.

        Raises:
            VgpuError: too many.
        """
        self.done += 1
        if self.done > self.blocks:
            raise VgpuError("the kernel does not end")

    def event(self, *_: Any) -> None:
        """Nothing to count."""


def launch_report(launch: Launch, seconds: float) -> Report:
    """What one launch did."""
    by_opcode: dict[str, int] = {}
    by_source: dict[str, int] = {}
    warps = np.zeros(-(-launch.threads // 32), np.int64)
    totals = dict(launch.bytes)
    for (index, full), counts in launch.counts.items():
        block = launch.kernel.blocks[index]
        ops = block.all
        times = int(counts.sum())
        warps += counts * len(ops)
        for op in ops:
            by_opcode[op.opcode] = by_opcode.get(op.opcode, 0) + times
            by_source[op.source] = by_source.get(op.source, 0) + times
        for space, size in launch.code.blocks[index, full].bytes_per_warp.items():
            totals[space] = totals.get(space, 0) + size * times
    ctas = launch.grid[0] * launch.grid[1] * launch.grid[2]
    return _report(by_opcode, by_source, warps.tolist(), totals, (ctas, launch.ticks, seconds))


def _report(
    by_opcode: dict[str, int], by_source: dict[str, int], warps: list[int], totals: dict[str, int], rest: tuple[int, int, float]
) -> Report:
    by_class: dict[str, int] = {}
    for opcode, count in by_opcode.items():
        name = opcode.split(".")[0]
        by_class[name] = by_class.get(name, 0) + count
    return Report(sum(by_opcode.values()), by_opcode, by_class, tuple(warps), by_source, totals, *rest)


def total_report(reports: Sequence[Report]) -> Report:
    """Several launches together."""
    by_opcode: dict[str, int] = {}
    by_source: dict[str, int] = {}
    totals: dict[str, int] = {}
    warps = [0] * max((len(r.by_warp) for r in reports), default=0)
    for r in reports:
        for mine, theirs in ((by_opcode, r.by_opcode), (by_source, r.by_source), (totals, r.bytes)):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count
        for i, count in enumerate(r.by_warp):
            warps[i] += count
    rest = sum(r.ctas for r in reports), sum(r.steps for r in reports), sum(r.seconds for r in reports)
    return _report(by_opcode, by_source, warps, totals, rest)
