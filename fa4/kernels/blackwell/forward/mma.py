"""The MMA warp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fa4.config import ELEMENT_BYTES, TMEM_LANES, blackwell_columns, padded_head_dim
from fa4.kernels.blackwell.forward.context import Context, Work, each_tile
from fa4.kernels.blackwell.forward.ring import next_key_slot, value_slot
from fa4.kernels.blackwell.forward.storage import query_tile_elements, slot_elements, tile_shapes
from fa4.kernels.common.barrier import Slot, commit, tell
from fa4.kernels.common.tcgen05 import K_STEP, NEGATE_A, descriptor, instruction, k_offset, multiply_ss, multiply_ts
from fa4.kernels.common.tensor_memory import first_column

FULL = 0
"""The parity that waits for slots begin with, that of the first phase."""
NONE = -1
"""The index of no slot."""


@dataclass(frozen=True)
class Products:
    """Descriptors of the operands in their first slots, and of the instructions; the address of the first column."""

    Q: Int64
    K: Int64
    V: Int64
    qk: Int32
    pv: Int32
    tmem: Int32


def slot_distance(c: Context) -> int:
    """What the next slot of the ring adds to a descriptor."""
    return slot_elements(c.config, c.head_dims) * ELEMENT_BYTES >> 4


@cute.jit
def scores(c: Context, products: Products, stage: cutlass.Constexpr[int], slot: Int32) -> None:
    """S = Q K^T of one query tile; then s_full."""
    d = padded_head_dim(c.head_dims[0])
    to = products.tmem + blackwell_columns(c.config, c.head_dims[1]).S[stage]
    a = products.Q + stage * (query_tile_elements(c.config, c.head_dims)[0] * ELEMENT_BYTES >> 4)
    b = products.K + Int64(slot * slot_distance(c))
    rows = tile_shapes(c.config, c.head_dims).K[0]
    with cute.arch.elect_one():
        for k in cutlass.range_constexpr(d // K_STEP):
            from_a, from_b = k_offset(TMEM_LANES, d, False, k), k_offset(rows, d, False, k)
            multiply_ss(to, a + from_a, b + from_b, products.qk, Int32(k > 0), c.config.cluster)
        tell(c, c.barriers.s_full.at(stage))


@cute.jit
def values(c: Context, products: Products, stage: cutlass.Constexpr[int], slot: Int32, phase: Int32, first: Int32) -> None:
    """O += P V of one query tile, or O = P V where ``first`` is 1, as P becomes ready."""
    columns = blackwell_columns(c.config, c.head_dims[1])
    shape, steps = tile_shapes(c.config, c.head_dims).V, c.config.tile_n // K_STEP
    to, a = products.tmem + columns.O[stage], products.tmem + columns.S[stage]
    b = products.V + Int64(slot * slot_distance(c))
    early = c.config.early_keys // K_STEP
    for begin, end, barrier in ((0, early, c.barriers.p_ready), (early, steps, c.barriers.p_last)):
        barrier.wait(stage, phase)
        with cute.arch.elect_one():
            for k in cutlass.range_constexpr(begin, end):
                keep = 1 - first if const_expr(k == 0) else Int32(1)
                multiply_ts(to, a + k * (K_STEP // 2), b + k_offset(*shape, True, k), products.pv, keep, c.config.cluster)


class State(NamedTuple):
    """The slot of the next K; key tiles so far; query tiles so far that had any.

    ``last`` is the slot of V of the step's last key tile, NONE where there is none, and ``first`` whether that was its first one, too.
    """

    slot: Slot
    step: Int32
    used: Int32
    last: Slot
    first: Int32


@cute.jit
def run(c: Context) -> None:
    """Issue all products.

    Warps: one; an elected lane issues.
    Owns: S (until softmax reads it) and O (while no correction is due) in tensor memory.
    Waits: q_full, kv_full; p_ready and p_last before O += P V; work_full.
    Signals: s_full, o_full, q_empty, kv_empty, by commit; work_empty.
    Order: S0, S1 of the first key tile; then for each tile: O0 += P0 V, S0 of the next, O1 += P1 V, S1 of the next. After the last key tile
    the next ones are those of the next step of the launch, if it has come: its softmax begins while this step ends. Not so where O leaves
    through sQ: the next Q waits for that.

    Of a pair only the leader has one. An instruction multiplies a query tile of each CTA by the same K or V, whose halves it reads from
    both, and leaves S and O in the tensor memory of the CTA that the query tile belongs to.
    """
    shapes, rows = tile_shapes(c.config, c.head_dims), c.config.cluster * TMEM_LANES
    qk = Int32(instruction(c.dtype, rows, c.config.tile_n, False))
    if const_expr(c.scalars.flip_q is not None):
        qk = qk | NEGATE_A if c.scalars.flip_q != 0 else qk
    products = Products(
        descriptor(c.shared.sQ.iterator.toint(), TMEM_LANES, shapes.Q[1]),
        descriptor(c.shared.sK.iterator.toint(), *shapes.K),
        descriptor(c.shared.sV.iterator.toint(), *shapes.V),
        qk,
        Int32(instruction(c.dtype, rows, shapes.O[1], True)),
        first_column(c.shared),
    )
    state = each_tile(c, visit, State(Slot(Int32(0), Int32(FULL)), Int32(0), Int32(0), Slot(Int32(NONE), Int32(FULL)), Int32(0)), products)
    if const_expr(not c.config.o_over_q):
        for stage in cutlass.range_constexpr(c.config.q_tiles):
            last_values(c, products, stage, state)


@cute.jit
def visit(c: Context, work: Work, state: State, products: Products) -> State:
    """The products of one step of the launch. O of the last key tile is left to the next step, unless O leaves through sQ."""
    config, barriers, count = c.config, c.barriers, work.count
    K, step, used = state.slot, state.step, state.used
    last, first = Slot(Int32(NONE), Int32(FULL)), Int32(0)
    for stage in cutlass.range_constexpr(config.q_tiles):
        if const_expr(not config.o_over_q):
            last_values(c, products, stage, state)
        if count > 0:
            barriers.q_full.wait(stage, used & 1)
            if const_expr(stage == 0):
                barriers.kv_full.wait(K.index, K.phase)
            scores(c, products, stage, K.index)
    if count > 0:
        commit(c, barriers.kv_empty.at(K.index))
    for _ in cutlass.range(count - 1, unroll=1):
        V = value_slot(config, K, FULL)
        K = next_key_slot(config, K, V)
        barriers.kv_full.wait(V.index, V.phase)
        for stage in cutlass.range_constexpr(config.q_tiles):
            values(c, products, stage, V.index, step & 1, Int32(step == state.step))
            if const_expr(stage == config.q_tiles - 1):
                commit(c, barriers.kv_empty.at(V.index))
            if const_expr(stage == 0):
                barriers.kv_full.wait(K.index, K.phase)
            scores(c, products, stage, K.index)
        commit(c, barriers.kv_empty.at(K.index))
        step = step + 1
    if count > 0:
        for stage in cutlass.range_constexpr(config.q_tiles):
            commit(c, barriers.q_empty.at(stage))
        last, first = value_slot(config, K, FULL), Int32(count == 1)
        K = next_key_slot(config, K, last)
        step = step + 1
        used = used + 1
    after = State(K, step, used, last, first)
    if const_expr(config.o_over_q):
        for stage in cutlass.range_constexpr(config.q_tiles):
            last_values(c, products, stage, after)
    return after


@cute.jit
def last_values(c: Context, products: Products, stage: cutlass.Constexpr[int], state: State) -> None:
    """O of one query tile with the last key tile, if that is still to come."""
    V = state.last
    if V.index >= 0:
        if const_expr(stage == 0):
            c.barriers.kv_full.wait(V.index, V.phase)
        values(c, products, stage, V.index, (state.step & 1) ^ 1, state.first)
        commit(c, c.barriers.o_full.at(stage))
        if const_expr(stage == c.config.q_tiles - 1):
            commit(c, c.barriers.kv_empty.at(V.index))
