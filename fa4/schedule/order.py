"""The orders: a number of a tile to the tile, and back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from fa4.arch import Arch
from fa4.errors import ArgumentError, UnsupportedError
from fa4.schedule.tiles import Tile, TileProblem

Order = Literal["row", "single", "persistent", "lpt", "dynamic", "spt"]

ORDERS: dict[Order, str] = {
    "row": "tile by tile, head by head, sequence by sequence; nothing else is considered",
    "single": "one tile per block; heads that fit L2 take turns",
    "persistent": "as single, but one block per SM, which takes every so many-th tile",
    "lpt": "longest tiles first, among heads that fit L2",
    "dynamic": "as lpt, but blocks stay, and take the next tile in place of one that has not started (cluster launch control)",
    "spt": "shortest tiles first, among heads that fit L2: tiles that wait for others start after them",
}

L2_SHARE = 0.5
"""Share of the L2 that operands may fill: from A100 on it is in two halves, and what SMs of both sides read lies in both."""

MAX_GRID = (1 << 31) - 1
"""Blocks of a launch, in x (CUDA Programming Guide, Compute Capabilities)."""


def default_order(problem: TileProblem, deterministic: bool = False) -> Order:
    """Which order serves a problem: by whether tiles differ in length, and whether they wait for each other."""
    if deterministic and problem.backward:
        return "spt"
    if problem.packed or any(bound is not None for bound in problem.window):
        return "lpt"
    return "single" if problem.backward else "persistent"  # K and V of a backward tile stay where dK and dV leave from


def longest_first(costs: Sequence[int]) -> list[int]:
    """Positions by falling cost, equal ones as they come: the LPT rule (Graham 1969)."""
    return sorted(range(len(costs)), key=lambda i: -costs[i])


@dataclass(frozen=True)
class Schedule:
    """Tiles in an order; ``tile`` and ``index`` are inverse to each other, for numbers of any size.

    Heads of sequences (``heads * batch`` of them, sequences outermost) are cut into sections, whose operands fit in L2 together; a
    section's heads take turns at each block. In a packed batch sections do not cross sequences, and sequences come by falling length.

    Attributes:
        problem: what is cut into tiles.
        order: see ``ORDERS``.
        section: heads of a section; a multiple of the problem's ``group``. Ignored in row order.

    Raises:
        ArgumentError: an unknown order, or a section that splits a group.
        UnsupportedError: one tile per block, and more of them than a grid can have.
    """

    problem: TileProblem
    order: Order
    section: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.order not in ORDERS:
            raise ArgumentError("order", self.order, "is unknown", f"use one of {', '.join(ORDERS)}")
        if self.section < 1 or self.section % self.problem.group:
            rule = f"must be a positive multiple of {self.problem.group}, the query heads that share an operand"
            raise ArgumentError("section", self.section, rule, "use Schedule.of, which computes it")
        if self.order != "persistent" and self.problem.tiles > MAX_GRID:
            rule = f"{self.problem.tiles} tiles are more than the {MAX_GRID} blocks of a grid"
            raise UnsupportedError("order", self.order, rule, "use 'persistent'")

    @classmethod
    def of(cls, problem: TileProblem, order: Order, arch: Arch) -> Schedule:
        """The schedule of a problem on an architecture, by the size of its L2."""
        return cls(problem, order, section_size(problem, int(arch.l2)))

    def tile(self, index: int) -> Tile:
        """The tile of a number, 0 to ``problem.tiles`` - 1."""
        problem = self.problem
        if problem.packed:
            place = bisect_right(self._starts, index) - 1
            batch, index, heads = self._sequences[place], index - self._starts[place], problem.heads
        else:
            batch, heads = 0, problem.heads * problem.batch
        blocks = problem.blocks(batch)
        if self.order == "row":
            row, position = divmod(index, blocks)
        else:
            section, rest = divmod(index, self.section * blocks)
            position, member = divmod(rest, min(self.section, heads - section * self.section))
            row = section * self.section + member
        more, head = divmod(row, problem.heads)
        return Tile(blocks - 1 - position if self.falling else position, head, batch + more)

    def index(self, tile: Tile) -> int:
        """The number of a tile: the inverse of ``tile``."""
        problem = self.problem
        blocks = problem.blocks(tile.batch)
        position = blocks - 1 - tile.block if self.falling else tile.block
        row, heads, start = tile.head, problem.heads, 0
        if problem.packed:
            start = self._starts[self._sequences.index(tile.batch)]
        else:
            row, heads = tile.batch * problem.heads + tile.head, problem.heads * problem.batch
        if self.order == "row":
            return start + row * blocks + position
        section, member = divmod(row, self.section)
        size = min(self.section, heads - section * self.section)
        return start + section * self.section * blocks + position * size + member

    @property
    def falling(self) -> bool:
        """Whether blocks are numbered from the last one: where that is the longest (lpt) or the shortest (spt).

        Queries see more keys the later they are where the right side is bounded; keys are seen by fewer queries the later they are.
        With a left bound alone it is the other way round. With both, the last query block is a longest one, or close to it.
        """
        left, right = self.problem.window
        if self.order not in ("lpt", "dynamic", "spt") or (left is None and right is None):
            return False
        last_is_longest = (right is not None) != self.problem.backward
        return last_is_longest == (self.order != "spt")

    @property
    def wide(self) -> bool:
        """Whether a kernel must number tiles with 64 bits: a number plus a grid, the step of the persistent order, passes 31 bits."""
        return self.order == "persistent" and self.problem.tiles > MAX_GRID // 2

    @cached_property
    def _sequences(self) -> list[int]:
        """Sequences of a packed batch in the order in which they are served."""
        problem = self.problem
        sign = {"lpt": -1, "dynamic": -1, "spt": 1}.get(self.order, 0)
        return sorted(range(problem.batch), key=lambda batch: sign * sum(problem.length(batch)))

    @cached_property
    def _starts(self) -> list[int]:
        """Number of the first tile of each of ``_sequences``, and the number of all tiles."""
        counts = (self.problem.blocks(batch) * self.problem.heads for batch in self._sequences)
        return list(accumulate(counts, initial=0))


def l2_budget(l2_bytes: int) -> int:
    """Bytes that operands may fill."""
    return int(l2_bytes * L2_SHARE)


def section_size(problem: TileProblem, l2_bytes: int) -> int:
    """Heads whose operands fit ``L2_SHARE`` of the L2 together, evened out over the sections: whole groups, at least one.

    For a packed batch the longest sequence counts.
    """
    largest = max(map(problem.operand_bytes, range(len(problem.lengths))))
    groups = problem.heads // problem.group * (1 if problem.packed else problem.batch)
    fitting = max(1, l2_budget(l2_bytes) // max(largest, 1))
    sections = max(1, -(-groups // fitting))
    return max(1, -(-groups // sections)) * problem.group
