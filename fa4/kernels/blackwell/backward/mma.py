"""The MMA warp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fa4.config import ELEMENT_BYTES, TMEM_LANES, padded_head_dim
from fa4.kernels.blackwell.backward.context import Context, Work
from fa4.kernels.blackwell.backward.storage import tile_shapes
from fa4.kernels.common.barrier import Slot, commit, following, tell
from fa4.kernels.common.tcgen05 import K_STEP, NEGATE_A, descriptor, instruction, k_offset, multiply_ss, multiply_ts, n_offset
from fa4.kernels.common.tensor_memory import first_column

TILE = TMEM_LANES
"""Queries, and keys, of a tile."""


@dataclass(frozen=True)
class Operand:
    """A tile of ``shape`` in shared memory, or the first of several; ``slot`` is what the next one adds to the descriptor."""

    start: Int64
    shape: tuple[int, int]

    @staticmethod
    def of(tile: cute.Tensor, shape: tuple[int, int]) -> Operand:
        """The operand at a tensor's address."""
        return Operand(descriptor(tile.iterator.toint(), *shape), shape)

    def step(self, k: int, along_rows: bool, slot: Int32 | int = 0, first: int = 0) -> Int64:
        """Descriptor of a step of K, which runs along a row, or ``along_rows`` from row to row; ``first`` of the other dimension on."""
        start = self.start + Int64(slot * (self.shape[0] * self.shape[1] * ELEMENT_BYTES >> 4))
        return start + (k_offset(*self.shape, along_rows, k) + n_offset(*self.shape, along_rows, first))


@dataclass(frozen=True)
class Products:
    """The address of the first column, how S is multiplied (K may be negated), operands; without a pair Qt is Q, and so on."""

    tmem: Int32
    kq: Int32
    K: Operand
    V: Operand
    Q: Operand
    dO: Operand
    Qt: Operand
    dOt: Operand
    Kt: Operand
    dS: Operand


class State(NamedTuple):
    """The slot of a tile's Q, and its number."""

    slot: Slot
    step: Int32


@cute.jit
def scores(c: Context, p: Products, state: State) -> None:
    """S^T = K Q^T; then s_full."""
    c.barriers.q_full.wait(state.slot.index, state.slot.phase)
    with cute.arch.elect_one():
        for k in cutlass.range_constexpr(p.K.shape[1] // K_STEP):
            a, b = p.K.step(k, False), p.Q.step(k, False, state.slot.index)
            multiply_ss(p.tmem + c.columns.S, a, b, p.kq, Int32(k > 0), c.config.cluster)
        tell(c, c.barriers.s_full.at(0))
        if const_expr(c.config.cta_pair):
            tell(c, c.barriers.q_empty.at(0))


@cute.jit
def dprobabilities(c: Context, p: Products, state: State) -> None:
    """dP^T = V dO^T; then dp_full."""
    if const_expr(c.config.needed.scores):
        c.barriers.do_full.wait(0, state.step & 1)
        if const_expr(c.columns.serial):
            if const_expr(c.config.needed.dq and len(c.columns.parts) > 1):
                c.barriers.dq_empty.wait(1, state.step & 1 ^ 1)
            some_of_dprobabilities(c, p, 0, TILE // 2)
            c.barriers.s_read.wait(0, state.step & 1)
            some_of_dprobabilities(c, p, TILE // 2, TILE)
        else:
            some_of_dprobabilities(c, p, 0, TILE)


@cute.jit
def some_of_dprobabilities(c: Context, p: Products, begin: cutlass.Constexpr[int], end: cutlass.Constexpr[int]) -> None:
    """DP^T of some of the queries; behind the last of them dp_full, and do_empty where no other product reads dO."""
    how = Int32(instruction(c.dtype, c.tile_n, end - begin))
    to = c.columns.dP if begin == 0 else c.columns.S + TILE // 4  # between the parts of P
    first = begin // c.config.cluster  # of a pair each CTA has half of the rows
    with cute.arch.elect_one():
        for k in cutlass.range_constexpr(p.V.shape[1] // K_STEP):
            multiply_ss(p.tmem + to, p.V.step(k, False), p.dO.step(k, False, first=first), how, Int32(k > 0), c.config.cluster)
        if const_expr(end == TILE):
            tell(c, c.barriers.dp_full.at(0))
            if const_expr(c.config.cta_pair or last_of_dout(c) == "dP"):
                tell(c, c.barriers.do_empty.at(0))


def last_of_dout(c: Context) -> str:
    """Which product reads a tile of dO last: dV, which waits for P."""
    return "dV" if c.config.needed.dv else "dP"


def last_of_rows(c: Context) -> str:
    """Which product of a tile is the last that waits for the compute warps: when it is complete, lse and delta have been read, and Q."""
    needed = c.config.needed
    return "dK" if needed.dk else "dQ" if needed.dq else "dV"


@cute.jit
def dvalues(c: Context, p: Products, state: State) -> None:
    """DV += P^T dO, when P is there; then dO is free, where it came last. Without dV: when S has been read."""
    b = c.barriers
    b.p_ready.wait(0, state.step & 1)
    if const_expr(c.config.needed.dv):
        if const_expr(c.config.cta_pair):
            b.dot_full.wait(0, state.step & 1)
        elif const_expr(not c.config.needed.scores):
            b.do_full.wait(0, state.step & 1)
        transposed(c, p, (c.columns.dV, c.columns.S, padded_head_dim(c.head_dims[1]), c.columns.second.p), p.dOt, 0, state.step)
        if const_expr(c.config.cta_pair):
            commit(c, b.dot_empty.at(0))
        elif const_expr(last_of_dout(c) == "dV"):
            commit(c, b.do_empty.at(0))
        if const_expr(last_of_rows(c) == "dV" and not c.config.cta_pair):
            commit(c, b.q_empty.at(state.slot.index))


@cute.jit
def dkeys(c: Context, p: Products, state: State) -> None:
    """DK += dS^T Q; then Q is free."""
    if const_expr(c.config.needed.dk):
        if const_expr(c.config.cta_pair):
            c.barriers.qt_full.wait(0, state.step & 1)
        transposed(
            c, p, (c.columns.dK, c.columns.dP, padded_head_dim(c.head_dims[0]), c.columns.second.ds), p.Qt, state.slot.index, state.step
        )
        commit(c, rows_empty(c, state))


def rows_empty(c: Context, state: State) -> cute.Pointer:
    """The barrier of ``last_of_rows``."""
    return c.barriers.qt_empty.at(0) if c.config.cta_pair else c.barriers.q_empty.at(state.slot.index)


@cute.jit
def transposed(
    c: Context, p: Products, columns: cutlass.Constexpr[tuple[int, int, int, int]], b: Operand, slot: Int32 | int, step: Int32
) -> None:
    """D (+)= A B of ``columns`` (where D is, where A is, how many D has, where A goes on): A (keys, queries) in two parts of 64 queries."""
    to, a, n, second = columns
    how = Int32(instruction(c.dtype, c.tile_n, n, b_along_rows=True))
    half = TILE // K_STEP // 2
    with cute.arch.elect_one():
        for k in cutlass.range_constexpr(2 * half):
            keep = Int32(step > 0) if const_expr(k == 0) else Int32(1)
            at = a + k // half * second + k % half * (K_STEP // 2)
            multiply_ts(p.tmem + to, p.tmem + at, b.step(k, True, slot), how, keep, c.config.cluster)


@cute.jit
def dqueries(c: Context, p: Products, state: State) -> None:
    """DQ = dS K, over the keys of the cluster, when a pair has all of dS and the one before has been read; then dq_full.

    Without dK Q is free, then.
    """
    if const_expr(c.config.needed.dq):
        parts, first = c.columns.parts, 0
        if const_expr(c.config.cta_pair):
            c.barriers.moved.wait(0, state.step & 1)
        if const_expr(not c.columns.serial):  # whose S and dP have waited
            c.barriers.dq_empty.wait(0, state.step & 1 ^ 1)
        for part in cutlass.range_constexpr(len(parts)):
            n = parts[part] * c.config.cluster
            how = Int32(instruction(c.dtype, TILE, n, b_along_rows=True, a_along_rows=True))
            with cute.arch.elect_one():
                for k in cutlass.range_constexpr(c.tile_n // K_STEP):
                    a, b = p.dS.step(k, True), p.Kt.step(k, True, first=first)
                    multiply_ss(p.tmem + c.columns.dQ + first, a, b, how, Int32(k > 0), c.config.cluster)
                tell(c, c.barriers.dq_full.at(part))
                if const_expr(last_of_rows(c) == "dQ" and part == len(parts) - 1):
                    tell(c, rows_empty(c, state))
            first = first + parts[part]


@cute.jit
def from_scores(c: Context, p: Products, state: State, last: cutlass.Constexpr[bool] = False) -> None:
    """Both products that need dS; then, of the ``last`` tile, dk_full.

    What comes second hides whether the reduce warps are quick: dK where dQ can come before it.
    """
    if const_expr(c.config.needed.scores):
        c.barriers.ds_ready.wait(0, state.step & 1)
    if const_expr(c.columns.dq_apart):
        dqueries(c, p, state)
    dkeys(c, p, state)
    if const_expr(last):
        keys_done(c)
    if const_expr(not c.columns.dq_apart):
        dqueries(c, p, state)


@cute.jit
def run(c: Context, work: Work) -> None:
    """Issue all products.

    Warps: one; an elected lane issues.
    Owns: S, dP, dQ (until others read them), dV and dK in tensor memory.
    Waits: k_full, v_full; q_full, do_full; p_ready before dV; ds_ready before dK and dQ; dq_empty before what overwrites dQ.
    Signals: s_full, dp_full, dq_full, q_empty, do_empty; dv_full and dk_full behind the last dV and dK; all by commit.
    Order: S, dP, dV of the first tile; then for each next tile: S of it, dK and dQ of the one before, dP and dV of it; dK and dQ of the
    last. Where tiles are ``serial``: S, dP, dV, dK, dQ of one tile before the next; half of dP waits for s_read.

    Of a pair only the leader has one. It also waits for kt_full, qt_full, dot_full, and for moved before dQ; it signals qt_empty and
    dot_empty. Where tiles are not serial, dQ of a tile comes after dP of the next, since half of dS is under way until then, and waits for
    s_read.

    Products for gradients that nobody needs are left out, with their waits and signals. What the commit of a missing dK would have told the
    load warp, that Q, lse and delta have been read, the last product tells that waits for the compute warps (``last_of_rows``).
    """
    kq = Int32(instruction(c.dtype, c.tile_n, TILE))
    if const_expr(c.scalars.flip_q is not None):
        kq = kq | NEGATE_A if c.scalars.flip_q != 0 else kq
    shared, shapes = c.shared, tile_shapes(c.config, c.head_dims)
    firsts = ((shared.sK, shapes.K), (shared.sV, shapes.V), (shared.sQ, shapes.Q), (shared.sdO, shapes.dO))
    more, dS = (firsts[2], firsts[3], firsts[0]), (TILE, TILE)
    if const_expr(c.config.cta_pair):
        more, dS = ((shared.sQt, shapes.Qt), (shared.sdOt, shapes.dOt), (shared.sKt, shapes.Kt)), (c.tile_n, TILE // 2)
    p = Products(first_column(c.shared), kq, *(Operand.of(*tile) for tile in (*firsts, *more, (shared.sdS, dS))))
    if work.steps > 0:
        c.barriers.k_full.wait(0, 0)
        if const_expr(c.columns.serial):
            one_by_one(c, p, work)
        elif const_expr(c.config.cta_pair):
            paired(c, p, work)
        else:
            overlapped(c, p, work)


@cute.jit
def values_done(c: Context) -> None:
    """No further product adds to dV or reads V."""
    if const_expr(c.config.needed.dv):
        commit(c, c.barriers.dv_full.at(0))


@cute.jit
def keys_done(c: Context) -> None:
    """No further product adds to dK."""
    if const_expr(c.config.needed.dk):
        commit(c, c.barriers.dk_full.at(0))


@cute.jit
def overlapped(c: Context, p: Products, work: Work) -> None:
    """The steady state: the tensor core has two products to do while the compute warps turn S into P, and two more before they have dS."""
    state = State(Slot(Int32(0), Int32(0)), Int32(0))
    scores(c, p, state)
    if const_expr(c.config.needed.scores):
        c.barriers.v_full.wait(0, 0)
    dprobabilities(c, p, state)
    dvalues(c, p, state)
    for step in cutlass.range(1, work.steps, unroll=1):
        new = State(following(state.slot, c.config.stages), step)
        scores(c, p, new)
        from_scores(c, p, state)
        if const_expr(c.config.needed.dq and c.columns.dQ < c.columns.dP + TILE):  # dP overwrites dQ
            c.barriers.dq_empty.wait(0, state.step & 1)
        dprobabilities(c, p, new)
        dvalues(c, p, new)
        state = new
    values_done(c)
    from_scores(c, p, state, last=True)


@cute.jit
def paired(c: Context, p: Products, work: Work) -> None:
    """A pair: dQ goes where S of the next tile was, once that is in registers, while P is worked out; before another S it must be read."""
    state = State(Slot(Int32(0), Int32(0)), Int32(0))
    needed = c.config.needed
    scores(c, p, state)
    if const_expr(needed.scores):
        c.barriers.v_full.wait(0, 0)
    dprobabilities(c, p, state)
    dvalues(c, p, state)
    if const_expr(needed.dq):
        c.barriers.kt_full.wait(0, 0)
    for step in cutlass.range(1, work.steps, unroll=1):
        new = State(following(state.slot, 1), step)
        if const_expr(needed.dq):
            c.barriers.dq_empty.wait(0, step & 1)
        scores(c, p, new)
        if const_expr(needed.scores):
            c.barriers.ds_ready.wait(0, state.step & 1)
        dkeys(c, p, state)
        dprobabilities(c, p, new)
        if const_expr(needed.dq):
            c.barriers.s_read.wait(0, step & 1)
        dqueries(c, p, state)
        dvalues(c, p, new)
        state = new
    values_done(c)
    if const_expr(needed.scores):
        c.barriers.ds_ready.wait(0, state.step & 1)
    dkeys(c, p, state)
    keys_done(c)
    dqueries(c, p, state)


@cute.jit
def one_by_one(c: Context, p: Products, work: Work) -> None:
    """``serial``: half of dP comes while P is worked out, all before dV. The next S waits for the first part of dQ to be read."""
    state = State(Slot(Int32(0), Int32(0)), Int32(0))
    for step in cutlass.range(work.steps, unroll=1):
        if const_expr(c.config.needed.dq):
            c.barriers.dq_empty.wait(0, step & 1 ^ 1)
        scores(c, p, state)
        if const_expr(c.config.needed.scores):
            if step == 0:
                c.barriers.v_full.wait(0, 0)
        dprobabilities(c, p, state)
        dvalues(c, p, state)
        if const_expr(c.config.cta_pair and c.config.needed.dq):
            if step == 0:
                c.barriers.kt_full.wait(0, 0)
        from_scores(c, p, state)
        state = State(following(state.slot, c.config.stages), step + 1)
    values_done(c)
    keys_done(c)
