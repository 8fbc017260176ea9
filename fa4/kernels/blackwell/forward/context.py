"""What the kernel hands to its roles: the tiles that this CTA computes, and positions in the ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from fa4.config import BlackwellForwardConfig
from fa4.kernels.blackwell.forward.pipelines import ANSWERS, Barriers
from fa4.kernels.blackwell.forward.storage import Shared
from fa4.kernels.common.barrier import LEADER, Slot
from fa4.kernels.common.host import Limits
from fa4.kernels.common.launch_control import ANSWER_BYTES, ask, read_answer
from fa4.kernels.common.mask import Band, KeyTiles
from fa4.kernels.common.modifier import Modifiers
from fa4.kernels.common.score import ScoreScalars
from fa4.schedule.device import TileOrder, tile_at


@dataclass(frozen=True)
class Work:
    """Number ``index``: query tiles of one (head, batch), from position ``first`` on, and the key tiles that they visit, last one first.

    Where heads are packed, ``head`` is the key head that they share.
    The CTAs of a pair have query tiles of their own and visit the same key tiles.
    """

    index: Int32
    first: Int32
    head: Int32
    batch: Int32
    band: Band
    tiles: KeyTiles

    @property
    def count(self) -> Int32:
        """Key tiles."""
        return self.tiles.end - self.tiles.begin


class Query(NamedTuple):
    """What a row of a tile stands for, if for anything."""

    position: Int32
    head: Int32
    exists: Boolean


class Tiles(NamedTuple):
    """All tiles of the launch: their order, and what tells which keys they visit."""

    order: TileOrder
    group: cute.FastDivmodDivisorV2
    limits: Limits


@dataclass(frozen=True)
class Context:
    """Everything a role needs. ``rank`` is that of the CTA in its cluster."""

    config: BlackwellForwardConfig
    head_dims: tuple[int, int]
    dtype: Any
    shared: Shared
    rank: Int32
    tiles: Tiles
    seqlens: tuple[Int32, Int32]
    scalars: ScoreScalars
    modifiers: Modifiers

    @property
    def barriers(self) -> Barriers:
        """The barriers."""
        return self.shared.barriers

    @cute.jit
    def work(self, index: Int32) -> Work:
        """The tile of a number; where the right side is bounded the longest tiles come first."""
        rows = self.config.q_tiles * self.config.positions
        falling = self.config.order in ("lpt", "dynamic") and self.tiles.limits.right is not None
        query_tile, head, batch = tile_at(index, self.tiles.order, falling)
        band = Band(*self.seqlens, self.tiles.limits.left, self.tiles.limits.right)
        together = self.config.cluster * rows
        first = query_tile * together + self.rank * rows
        tiles = band.key_tiles(query_tile * together, together, self.config.tile_n)
        if const_expr(self.config.cta_pair):
            tiles = band.full_for(tiles, first, rows, self.config.tile_n)
        return Work(index, first, head, batch, band, tiles)

    @cute.jit
    def query(self, work: Work, row: Int32) -> Query:
        """The query of a row of this CTA."""
        position, head, exists = work.first + row, work.head, Boolean(True)
        if const_expr(self.config.pack_heads > 1):
            group, member = self.tiles.group.divisor, row % self.config.pack_heads
            position, head = work.first + row // self.config.pack_heads, work.head * group + member
            exists = Boolean(member < group)
        return Query(position, head, exists & Boolean(position < self.seqlens[0]))

    @cute.jit
    def key_head(self, work: Work) -> Int32:
        """The key head that the query tiles use."""
        return work.head if const_expr(self.config.pack_heads > 1) else work.head // self.tiles.group

    @cute.jit
    def query_tile(self, work: Work, stage: cutlass.Constexpr[int]) -> Any:
        """Coordinate of a tile of Q or O among the tiles of rows."""
        tile = work.first // self.config.positions + stage
        return (0, tile) if const_expr(self.config.pack_heads > 1) else tile


@cute.jit
def ask_for_tile(c: Context, turn: Int32) -> None:
    """By the load warp, once in each tile: let the answer that follows tile ``turn`` of this cluster come, to both CTAs of a pair.

    Each CTA announces its bytes; the leader asks, when all have read the answer whose place it takes.
    """
    place = answer_of(turn)
    if c.rank == LEADER:
        c.barriers.work_empty.wait(place.index, place.phase ^ 1)
        cute.arch.fence_proxy("async")  # between what was read there and the answer, which the asynchronous proxy writes
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(c.barriers.work_full.at(place.index), ANSWER_BYTES)
        if c.rank == LEADER:
            answer = c.shared.answers + place.index * (ANSWER_BYTES // 4)
            ask(answer, c.barriers.work_full.at(place.index), c.config.cluster)


@cute.jit
def next_tile(c: Context, turn: Int32) -> Int32:
    """What follows tile ``turn`` of this cluster: the number of a tile, or -1."""
    place = answer_of(turn)
    c.barriers.work_full.wait(place.index, place.phase)
    found = read_answer(c.shared.answers.toint() + place.index * ANSWER_BYTES)
    c.barriers.work_empty.arrive(place.index)
    return found >> (c.config.cluster - 1)  # of a pair both CTAs have numbers; -1 stays


@cute.jit
def answer_of(turn: Int32) -> Slot:
    """Where the answer that follows tile ``turn`` is, and the parity of its phase; without divisions, which signs make long."""
    return Slot(turn & ANSWERS - 1, turn >> ANSWERS.bit_length() - 1 & 1)


@cute.jit
def each_tile(c: Context, visit: cutlass.Constexpr[Callable[..., Any]], state: Any, *more: Any) -> Any:
    """``state = visit(c, work, state, *more)`` for the tiles of this cluster: one, or every so many-th in the persistent order.

    In the dynamic order its own, and then those of clusters whose launch it cancelled, as load asks for them: then every role waits for
    work_full, and signals work_empty, between tiles.
    """
    first, step = cute.arch.block_idx()[0] // c.config.cluster, cute.arch.grid_dim()[0] // c.config.cluster
    if const_expr(c.config.order == "persistent"):
        for index in cutlass.range(first, c.tiles.order.tiles, step, unroll=1):
            state = visit(c, c.work(index), state, *more)
    elif const_expr(c.config.order == "dynamic"):
        index, turn = first, Int32(0)
        while index >= 0:
            state = visit(c, c.work(index), state, *more)
            index = next_tile(c, turn)
            turn = turn + 1
    else:
        state = visit(c, c.work(first), state, *more)
    return state
