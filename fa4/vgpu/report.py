"""What a launch did, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from fa4.vgpu.machine import Launch


@dataclass(frozen=True)
class Report:
    """Counts of one launch, or of all launches of a machine.

    ``instructions`` are warp instructions. ``by_opcode`` has full opcodes, ``by_class`` their first words, ``by_warp`` the warps of a CTA
    summed over CTAs, ``by_source`` source lines ("" without a line table). ``bytes`` are what lanes asked for, by memory space.
    ``seconds`` is the time of the host.
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


class Observer(Protocol):
    """Told what happens, in program order for each warp."""

    def block(self, cta: int, warp: int, block: int, lanes: int) -> None:
        """A warp begins a basic block with so many lanes."""

    def event(self, cta: int, warp: int, kind: str, fields: dict[str, Any]) -> None:
        """A warp executes an instruction that synchronises."""


def launch_report(launch: Launch, steps: int, seconds: float) -> Report:
    """What one launch did."""
    by_opcode: dict[str, int] = {}
    by_source: dict[str, int] = {}
    warps = np.zeros(-(-launch.threads // 32), np.int64)
    totals = dict(launch.bytes)
    for (index, full), counts in launch.counts.items():
        block = launch.kernel.blocks[index]
        ops = block.ops if block.end is None else (*block.ops, block.end)
        times = int(counts.sum())
        warps += counts * len(ops)
        for op in ops:
            by_opcode[op.opcode] = by_opcode.get(op.opcode, 0) + times
            by_source[op.source] = by_source.get(op.source, 0) + times
        for space, size in launch.code.blocks[index, full].bytes_per_warp.items():
            totals[space] = totals.get(space, 0) + size * times
    ctas = launch.grid[0] * launch.grid[1] * launch.grid[2]
    return _summary(by_opcode, by_source, warps.tolist(), totals, (ctas, steps, seconds))


def _summary(
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
    return _summary(by_opcode, by_source, warps, totals, rest)
