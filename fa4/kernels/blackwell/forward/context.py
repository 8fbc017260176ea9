"""What the kernel hands to its roles: the tiles that this CTA computes, and positions in the ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fa4.config import TMEM_LANES, BlackwellForwardConfig
from fa4.kernels.blackwell.forward.pipelines import Barriers
from fa4.kernels.blackwell.forward.storage import Shared
from fa4.kernels.common.host import Limits
from fa4.kernels.common.mask import Band, KeyTiles
from fa4.kernels.common.score import ScoreScalars
from fa4.schedule.device import TileOrder, tile_at


class Slot(NamedTuple):
    """A place in the ring, and the parity of the phase in which it is used."""

    index: Int32
    phase: Int32


@cute.jit
def following(slot: Slot, stages: cutlass.Constexpr[int], after_K: cutlass.Constexpr[bool] = False) -> Slot:
    """The next slot; the parity flips where the ring starts again.

    K and V take turns, K first: where the number of stages is even, the ring never starts again ``after_K``.
    """
    if const_expr(after_K and stages % 2 == 0):
        return Slot(slot.index + 1, slot.phase)
    wraps = slot.index + 1 == stages
    return Slot(Int32(0) if wraps else slot.index + 1, slot.phase ^ Int32(wraps))


@dataclass(frozen=True)
class Work:
    """Number ``index``: query tiles of one (head, batch), from ``first_row`` on, and the key tiles that they visit, last one first."""

    index: Int32
    first_row: Int32
    head: Int32
    batch: Int32
    band: Band
    tiles: KeyTiles

    @property
    def count(self) -> Int32:
        """Key tiles."""
        return self.tiles.end - self.tiles.begin


class Tiles(NamedTuple):
    """All tiles of the launch: their order, and what tells which keys they visit."""

    order: TileOrder
    group: cute.FastDivmodDivisorV2
    limits: Limits


@dataclass(frozen=True)
class Context:
    """Everything a role needs. ``tmem`` is the address of the first column."""

    config: BlackwellForwardConfig
    head_dims: tuple[int, int]
    dtype: Any
    shared: Shared
    tmem: Int32
    tiles: Tiles
    seqlens: tuple[Int32, Int32]
    scalars: ScoreScalars

    @property
    def barriers(self) -> Barriers:
        """The barriers."""
        return self.shared.barriers

    @cute.jit
    def work(self, index: Int32) -> Work:
        """The tile of a number; where the right side is bounded the longest tiles come first."""
        rows = self.config.q_tiles * TMEM_LANES
        falling = self.config.order == "lpt" and self.tiles.limits.right is not None
        query_tile, head, batch = tile_at(index, self.tiles.order, falling)
        band = Band(*self.seqlens, self.tiles.limits.left, self.tiles.limits.right)
        first_row = query_tile * rows
        return Work(index, first_row, head, batch, band, band.key_tiles(first_row, rows, self.config.tile_n))


@cute.jit
def each_tile(c: Context, visit: cutlass.Constexpr[Callable[..., Any]], state: Any, *more: Any) -> None:
    """``state = visit(c, work, state, *more)`` for the tiles of this CTA: one, or every so many-th in the persistent order."""
    if const_expr(c.config.order == "persistent"):
        for index in cutlass.range(cute.arch.block_idx()[0], c.tiles.order.tiles, cute.arch.grid_dim()[0], unroll=1):
            state = visit(c, c.work(index), state, *more)
    else:
        visit(c, c.work(cute.arch.block_idx()[0]), state, *more)
