"""The two compute warpgroups."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from fa4.config import ROW_SLOTS, TMEM_LANES, WARP
from fa4.kernels.blackwell.backward import exchange
from fa4.kernels.blackwell.backward.context import Context, Work
from fa4.kernels.common.barrier import Slot, following
from fa4.kernels.common.exponential import exp2_of_pair
from fa4.kernels.common.mask import ones_from
from fa4.kernels.common.modifier import ALONG_KEYS, ALONG_QUERIES, Place
from fa4.kernels.common.opaque import opaque
from fa4.kernels.common.score import capped
from fa4.kernels.common.tensor_memory import load_columns, store_columns

QUERIES = TMEM_LANES // 2
"""Queries of a warpgroup."""
CHUNK = 32
"""Queries whose lse or delta is in registers at a time, and whose visibility is a word."""
MODIFIED_CHUNK = 16
"""Queries whose scores a user's function changes at a time: their slopes, and what it computes, take registers beside P."""


class Who(NamedTuple):
    """A thread: which half of the queries, its number in the warpgroup, and the query head that it is at."""

    half: Int32
    thread: Int32
    head: Int32


@cute.jit
def run(c: Context, work: Work, half: Int32, thread: Int32) -> None:
    """From S and dP to P and dS, a key and 64 queries for each thread.

    Warps: eight, two warpgroups; ``half`` says which queries.
    Owns: its half of S, then P, and of dP, then dS, in tensor memory; its half of sdS.
    Waits: row_full (lse and delta); s_full, dp_full. In a pair, before dS goes to shared memory: dq_full, or, where tiles are serial and dS
    is to be sent, sdq_empty.
    Signals: p_ready, ds_ready; in a pair, and where tiles are serial, s_read.
    Order: a user's mask, as bits; S to registers; by chunks softcap, a user's function on scores, masks, and P = exp2(S - lse) to tensor
    memory; p_ready; dP to registers; dS = P (dP - delta), times the slopes of what S went through, to tensor and to shared memory;
    ds_ready.

    In a pair each CTA adds the dQ of half of the queries, and needs their dS for the keys of both: the warpgroup that has the other half
    sends its dS to the other CTA, by warps. There dq_full is waited for before dS is written to shared memory: dQ of the tile before has
    read it, here and there, and so that dS had arrived. Where tiles are serial s_full has said so.

    P goes nowhere without dV: p_ready then says that S has been read. dS goes to tensor memory for dK, to shared memory for dQ.
    """
    at = State(Slot(Int32(0), Int32(0)), Int32(0))
    tiles = work.tiles
    for member in cutlass.range(work.group, unroll=1):
        who = Who(half, thread, work.head * work.group + member)
        for tile in cutlass.range(tiles.begin, tiles.full_begin, unroll=1):
            at = visit(c, work, who, tile, at, True)
        for tile in cutlass.range(tiles.full_begin, tiles.full_end, unroll=1):
            at = visit(c, work, who, tile, at, False)
        if const_expr(work.queries.right_limit is not None or c.modifiers.present):
            for tile in cutlass.range(tiles.full_end, tiles.end, unroll=1):
                at = visit(c, work, who, tile, at, True)


class State(NamedTuple):
    """The slot of a tile's lse and delta, and the parity of its number."""

    slot: Slot
    phase: Int32


@cute.jit
def visit(c: Context, work: Work, who: Who, tile: Int32, at: State, masked: cutlass.Constexpr[bool]) -> State:
    """One query tile; returns what comes next."""
    first_query = tile * TMEM_LANES + who.half * QUERIES
    key, seen = work.first_key + who.thread, []
    batch, head = work.batch, who.head
    if const_expr(c.modifiers.present):
        # New to the compiler in every tile: what it would keep of them, the addresses of what functions read, would be spilled.
        batch, head, key = opaque(batch), opaque(head), opaque(key)
    first = batch, head, first_query, c.modifiers.existing(key, ALONG_KEYS, masked)
    if const_expr(c.modifiers.mask is not None):
        asked = [c.modifiers.moved(first, Int32(begin), ALONG_QUERIES, False) for begin in range(0, QUERIES, CHUNK)]
        seen = [c.modifiers.seen(each, ALONG_QUERIES, masked) for each in asked]
    c.barriers.row_full.wait(at.slot.index, at.slot.phase)
    c.barriers.s_full.wait(0, at.phase)
    P = probabilities(c, work, who, (first, key), seen, at, masked)
    if const_expr(c.config.needed.dv):
        c.barriers.p_ready.arrive(0)
    if const_expr(c.config.needed.scores):
        dscores(c, P, who, at.slot.index, at.phase)
    return State(following(at.slot, ROW_SLOTS), at.phase ^ 1)


@cute.jit
def probabilities(
    c: Context, work: Work, who: Who, where: tuple[Place, Int32], seen: list[Int32], at: State, masked: cutlass.Constexpr[bool]
) -> cute.Tensor:
    """P of this thread to tensor memory; returns it in float32, times the slopes of softcap and of a user's function on scores.

    ``where`` is what users' functions are told of the first score, and the key, which need not exist. ``seen`` has, where there is a user's
    mask, its words for each 32 queries.
    """
    (half, thread, _), (first, key) = who, where
    address, to = c.columns.S + half * QUERIES, c.columns.S + half * c.columns.second.p
    P = cute.make_rmem_tensor(QUERIES, Float32)
    load_columns(address, P, thread)
    if const_expr(c.columns.serial or (c.config.cta_pair and c.config.needed.dq)):
        c.barriers.s_read.arrive(0)
    if const_expr(not c.config.needed.dv):  # nobody waits for P
        c.barriers.p_ready.arrive(0)
    modified, capping, policy = c.modifiers.score is not None, c.scalars.gain is not None, c.config.exp2
    size = MODIFIED_CHUNK if const_expr(modified) else CHUNK
    for begin in cutlass.range_constexpr(0, QUERIES, size):
        part = cute.make_tensor(P.iterator + begin, cute.make_layout(size))
        slope = cute.make_rmem_tensor(size, Float32)
        if const_expr(modified):
            slope.fill(1.0)
        if const_expr(capping):
            for i in cutlass.range_constexpr(size):
                part[i] = capped(part[i], c.scalars.gain)
                slope[i] = 1.0 - 4.0 * part[i] * part[i]
        if const_expr(modified):
            place = c.modifiers.moved(first, Int32(begin), ALONG_QUERIES, False)
            c.modifiers.change(part, place, ALONG_QUERIES, masked, slope)
        if const_expr(masked):
            hide(in_band(c, work, key, first[2] + begin), part)
        if const_expr(c.modifiers.mask is not None):
            hide(seen[begin // CHUNK] >> begin % CHUNK, part)
        lse, scale = statistic(c.shared.sLSE, half, begin, size, at.slot.index), c.scalars.scale_log2
        for i in cutlass.range_constexpr(0, size, 2):
            x, y = cute.arch.fma_packed_f32x2((part[i], part[i + 1]), (scale, scale), (-lse[i], -lse[i + 1]))
            if const_expr(policy.share > 0):
                x, y = exp2_of_pair(policy, (begin + i) // 2, x, y)
            part[i], part[i + 1] = x, y
        if const_expr(policy.share == 0):  # together, which takes fewer moves
            part.store(cute.math.exp2(part.load(), fastmath=True))
        if const_expr(c.config.needed.dv):
            store_columns(to + begin // 2, rounded(c, part), thread)
        if const_expr(modified):  # what is hidden has no gradient, whatever the slope is there
            for i in cutlass.range_constexpr(size):
                part[i] = part[i] * slope[i] if part[i] != 0.0 else part[i]
        elif const_expr(capping):
            for i in cutlass.range_constexpr(0, size, 2):
                part[i], part[i + 1] = cute.arch.mul_packed_f32x2((part[i], part[i + 1]), (slope[i], slope[i + 1]))
    if const_expr(c.config.needed.dv):
        cute.arch.fence_view_async_tmem_store()
    return P


@cute.jit
def dscores(c: Context, P: cute.Tensor, who: Who, slot: Int32, phase: Int32) -> None:
    """DS of this thread to tensor memory, for dK, and to shared memory, for dQ."""
    half, thread, _ = who
    address, to = c.columns.dP + half * c.columns.second.dp, c.columns.dP + half * c.columns.second.ds
    c.barriers.dp_full.wait(0, phase)
    words = cute.make_rmem_tensor(QUERIES // 2, Float32)
    for chunk in cutlass.range_constexpr(QUERIES // CHUNK):
        dS = cute.make_rmem_tensor(CHUNK, Float32)
        load_columns(address + chunk * c.columns.second.within, dS, thread)
        delta = statistic(c.shared.sDelta, half, chunk * CHUNK, CHUNK, slot)
        for i in cutlass.range_constexpr(0, CHUNK, 2):
            at = chunk * CHUNK + i
            x, y = cute.arch.sub_packed_f32x2((dS[i], dS[i + 1]), (delta[i], delta[i + 1]))
            dS[i], dS[i + 1] = cute.arch.mul_packed_f32x2((x, y), (P[at], P[at + 1]))
        part = cute.make_tensor(words.iterator + chunk * (CHUNK // 2), cute.make_layout(CHUNK // 2))
        part.store(rounded(c, dS).load())
    if const_expr(c.config.needed.dk):
        store_columns(to, words, thread)  # where, in a pair, dP of the last chunk was
    if const_expr(c.config.needed.dq):
        for_queries(c, words, who, phase)
    if const_expr(c.config.needed.dk):
        cute.arch.fence_view_async_tmem_store()
    if const_expr(c.config.needed.dq):
        cute.arch.fence_proxy("async.shared", space="cta")
        if const_expr(c.config.cta_pair):
            if half != c.rank:
                exchange.send(c, thread // WARP)
    c.barriers.ds_ready.arrive(0)


@cute.jit
def for_queries(c: Context, words: cute.Tensor, who: Who, phase: Int32) -> None:
    """DS of this thread to shared memory."""
    half, thread, _ = who
    if const_expr(c.config.cta_pair and not c.columns.serial):
        c.barriers.dq_full.wait(0, phase ^ 1)
    if const_expr(c.serial_pair):
        if half != c.rank:
            c.barriers.sdq_empty.wait(0, phase ^ 1)
    part = half
    if const_expr(c.config.cta_pair):
        part = c.rank if half == c.rank else Int32(c.config.cluster)
    row = opaque(part * TMEM_LANES + thread)  # swizzled addresses are worked out here, not kept in registers
    values = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=c.dtype), cute.make_layout(QUERIES))
    for i in cutlass.range_constexpr(QUERIES // 8):
        source = cute.make_tensor(values.iterator + i * 8, cute.make_layout(8))
        cute.autovec_copy(source, cute.local_tile(c.shared.sdS[row, None, 0], (8,), (i,)))


@cute.jit
def statistic(source: cute.Tensor, half: Int32, begin: cutlass.Constexpr[int], size: cutlass.Constexpr[int], slot: Int32) -> cute.Tensor:
    """Lse or delta of a chunk of queries: the same for all threads."""
    values = cute.make_rmem_tensor(size, Float32)
    cute.autovec_copy(cute.local_tile(source[None, slot], (size,), (half * (QUERIES // size) + begin // size,)), values)
    return values


@cute.jit
def rounded(c: Context, values: cute.Tensor) -> cute.Tensor:
    """A chunk in the dtype, two in a word."""
    size = cute.size(values)
    found = cute.make_rmem_tensor(size, c.dtype)
    found.store(values.load().to(c.dtype))
    return cute.make_tensor(cute.recast_ptr(found.iterator, dtype=Float32), cute.make_layout(size // 2))


@cute.jit
def in_band(c: Context, work: Work, key: Int32, first_query: Int32) -> Int32:
    """Which of the 32 queries from ``first_query`` on see a key, a bit for each: none where there is no such key."""
    end = work.queries.end_key(key) if key < c.seqlens[1] else Int32(0)
    return ~ones_from(end - first_query) & ones_from(work.queries.first_key(key) - first_query)


@cute.jit
def hide(visible: Int32, S: cute.Tensor) -> None:
    """Set the scores of queries to -inf but those that ``visible`` has a bit for."""
    for i in cutlass.range_constexpr(cute.size(S)):
        S[i] = S[i] if visible & (1 << i if i < 31 else -(1 << 31)) != 0 else -Float32.inf
