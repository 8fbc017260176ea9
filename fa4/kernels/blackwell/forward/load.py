"""The load warp."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fa4.kernels.blackwell.forward.context import Context, Work, ask_for_tile, each_tile
from fa4.kernels.blackwell.forward.ring import next_key_slot, value_slot
from fa4.kernels.common.barrier import Slot, following
from fa4.kernels.common.tma import Source

EMPTY = 1
"""The parity that waits begin with, that of the phase before the first: slots are empty."""


class State(NamedTuple):
    """The slot of the next K; query tiles with keys so far, and all of them."""

    slot: Slot
    used: Int32
    turn: Int32


def run(c: Context, Q: Source, K: Source, V: Source) -> None:
    """Fill shared memory.

    Warps: one.
    Owns: sQ, sK, sV.
    Waits: q_empty, kv_empty, work_empty, before shared memory is used again; work_full.
    Signals: q_full, kv_full by the bytes that arrive (elements beyond a tensor arrive as 0); work_full, work_empty.
    Order: Q0, K, Q1, V of the last key tile; then K, V of each one before it. In the dynamic order it asks for the next tile before it
        loads the last V: late, since of the tiles that are left the longest goes to whoever asks first, and early enough, since that V has
        to wait for a slot. The MMA warp wants the answer before it multiplies by that V.

    Of a pair both CTAs have one: each copies its query tiles, its half of the keys of K and of the columns of V. At the end it waits until
    all is empty again, so that no commit of the leader is on its way to this CTA any more.
    """
    state = each_tile(c, visit, State(Slot(Int32(0), Int32(EMPTY)), Int32(0), Int32(0)), Q, K, V)
    if c.config.cta_pair:
        drain(c, state)


@cute.jit
def visit(c: Context, work: Work, state: State, Q: Source, K: Source, V: Source) -> State:
    """The query tiles and key tiles of one step of the launch."""
    slot, used, config = state.slot, state.used, c.config
    at_Q, at = (work.head, work.batch), (c.key_head(work), work.batch)
    if work.count > 0:
        for stage in cutlass.range_constexpr(config.q_tiles):
            c.barriers.q_empty.wait(stage, used & 1 ^ EMPTY)
            Q.start(c, (c.query_tile(work, stage), 0), at_Q, Int32(stage), c.barriers.q_full.at(stage))
            if const_expr(stage == 0):
                fill(c, K, part_of_k(c, work.tiles.end - 1), at, slot)
    key_tile = work.tiles.end - 1
    for _ in cutlass.range(work.count - 1, unroll=1):
        place = value_slot(config, slot, EMPTY)
        if const_expr(not config.v_apart):
            fill(c, V, (key_tile, c.rank), at, place)
        slot = next_key_slot(config, slot, place)
        fill(c, K, part_of_k(c, key_tile - 1), at, slot)
        if const_expr(config.v_apart):
            fill(c, V, (key_tile, c.rank), at, place)
        key_tile = key_tile - 1
    if const_expr(config.order == "dynamic"):
        ask_for_tile(c, state.turn)
    if work.count > 0:
        place = value_slot(config, slot, EMPTY)
        fill(c, V, (key_tile, c.rank), at, place)
        slot = next_key_slot(config, slot, place)
    return State(slot, used + Int32(work.count > 0), state.turn + 1)


@cute.jit
def drain(c: Context, state: State) -> None:
    """Wait until all slots and the places of Q are empty."""
    slot = state.slot
    for _ in cutlass.range_constexpr(c.config.stages):
        c.barriers.kv_empty.wait(slot.index, slot.phase)
        slot = following(slot, c.config.stages)
    for stage in cutlass.range_constexpr(c.config.q_tiles):
        c.barriers.q_empty.wait(stage, state.used & 1 ^ EMPTY)


@cute.jit
def part_of_k(c: Context, key_tile: Int32) -> tuple[Int32, Int32]:
    """This CTA's part of a tile of K."""
    return key_tile * c.config.cluster + c.rank, Int32(0)


@cute.jit
def fill(c: Context, X: Source, tile: tuple[Int32, Int32], at: tuple[Int32, Int32], slot: Slot) -> None:
    """Start a tile into a slot as soon as it is empty."""
    c.barriers.kv_empty.wait(slot.index, slot.phase)
    X.start(c, tile, at, slot.index, c.barriers.kv_full.at(slot.index))
