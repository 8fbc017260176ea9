"""The load warp."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fa4.kernels.blackwell.forward.context import Context, Work, each_tile
from fa4.kernels.common.barrier import Slot, following
from fa4.kernels.common.tma import Source


class State(NamedTuple):
    """The next slot, and query tiles with keys so far."""

    slot: Slot
    used: Int32


def run(c: Context, Q: Source, K: Source, V: Source) -> None:
    """Fill shared memory.

    Warps: one.
    Owns: sQ, sK, sV.
    Waits: q_empty, kv_empty, before shared memory is used again.
    Signals: q_full, kv_full by the bytes that arrive (elements beyond a tensor arrive as 0).
    Order: Q0, K, Q1, V of the last key tile; then K, V of each one before it.

    Of a pair both CTAs have one: each copies its query tiles, its half of the keys of K and of the columns of V. At the end it waits until
    all is empty again, so that no commit of the leader is on its way to this CTA any more.
    """
    # The phase before the first: slots begin empty.
    state = each_tile(c, visit, State(Slot(Int32(0), Int32(1)), Int32(0)), Q, K, V)
    if c.config.cta_pair:
        drain(c, state)


@cute.jit
def visit(c: Context, work: Work, state: State, Q: Source, K: Source, V: Source) -> State:
    """The query tiles and key tiles of one step of the launch."""
    slot, at_Q, at = state.slot, (work.head, work.batch), (c.key_head(work), work.batch)
    if work.count > 0:
        for stage in cutlass.range_constexpr(c.config.q_tiles):
            c.barriers.q_empty.wait(stage, state.used & 1 ^ 1)
            Q.start(c, (c.query_tile(work, stage), 0), at_Q, Int32(stage), c.barriers.q_full.at(stage))
            if const_expr(stage == 0):
                fill(c, K, part_of_k(c, work.tiles.end - 1), at, slot)
                slot = following(slot, c.config.stages, after_K=True)
        fill(c, V, (work.tiles.end - 1, c.rank), at, slot)
        slot = following(slot, c.config.stages)
    key_tile = work.tiles.end
    for _ in cutlass.range(work.count - 1, unroll=1):
        key_tile = key_tile - 1
        fill(c, K, part_of_k(c, key_tile - 1), at, slot)
        slot = following(slot, c.config.stages, after_K=True)
        fill(c, V, (key_tile - 1, c.rank), at, slot)
        slot = following(slot, c.config.stages)
    return State(slot, state.used + Int32(work.count > 0))


@cute.jit
def drain(c: Context, state: State) -> None:
    """Wait until all slots and the places of Q are empty."""
    slot = state.slot
    for _ in cutlass.range_constexpr(c.config.stages):
        c.barriers.kv_empty.wait(slot.index, slot.phase)
        slot = following(slot, c.config.stages)
    for stage in cutlass.range_constexpr(c.config.q_tiles):
        c.barriers.q_empty.wait(stage, state.used & 1 ^ 1)


@cute.jit
def part_of_k(c: Context, key_tile: Int32) -> tuple[Int32, Int32]:
    """This CTA's part of a tile of K."""
    return key_tile * c.config.cluster + c.rank, Int32(0)


@cute.jit
def fill(c: Context, X: Source, tile: tuple[Int32, Int32], at: tuple[Int32, Int32], slot: Slot) -> None:
    """Start a tile into a slot as soon as it is empty."""
    c.barriers.kv_empty.wait(slot.index, slot.phase)
    X.start(c, tile, at, slot.index, c.barriers.kv_full.at(slot.index))
