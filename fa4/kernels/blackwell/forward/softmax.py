"""The two softmax warpgroups."""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from fa4.config import TMEM_LANES
from fa4.kernels.blackwell.forward.context import Context, Work, each_tile
from fa4.kernels.blackwell.forward.pipelines import give_factor
from fa4.kernels.common.exponential import exp2_of_pair
from fa4.kernels.common.mask import Band, ones_from
from fa4.kernels.common.modifier import ALONG_KEYS
from fa4.kernels.common.opaque import opaque, thread_index
from fa4.kernels.common.score import capped
from fa4.kernels.common.tensor_memory import load_columns, store_columns

CHUNK = 32
"""Keys whose P is computed, rounded and stored at a time."""


class Row(NamedTuple):
    """A row so far: what is subtracted from scores (log2 units), and the sum of P; ``step`` counts key tiles."""

    reference: Float32
    total: Float32
    step: Int32


class State(NamedTuple):
    """Key tiles, and query tiles with keys so far."""

    step: Int32
    used: Int32


def run(c: Context, mLSE: cute.Tensor, stage: Int32, thread: Int32) -> None:
    """From S to P of query tile ``stage``, a row for each thread. It is a number of the warp: both tiles share the code.

    Warps: four for each query tile.
    Owns: S and P of its tile in tensor memory, from s_full to p_last; ``factor`` and ``total`` of its rows; lse.
    Waits: s_full; total_empty; work_full.
    Signals: factor; p_ready when P has ``early_keys``, p_last; total_full at the end; work_empty.
    Order: a user's mask, as bits; S to registers; softcap, a user's function on scores, masks; maximum; factor to correction;
        P = exp2(S - reference) by chunks to tensor memory; sum.
    """
    each_tile(c, visit, State(Int32(0), Int32(0)), mLSE, stage, thread)


@cute.jit
def visit(c: Context, work: Work, state: State, mLSE: cute.Tensor, stage: Int32, thread: Int32) -> State:
    """The rows of one query tile."""
    tiles = work.tiles
    row = Row(-Float32.inf, Float32(0.0), state.step)
    for tile in cutlass.range(tiles.end - 1, tiles.full_end - 1, -1, unroll=1):
        row = scores(c, work, stage, thread, tile, row, True)
    for tile in cutlass.range(tiles.full_end - 1, tiles.full_begin - 1, -1, unroll=1):
        row = scores(c, work, stage, thread, tile, row, False)
    if const_expr(work.band.left_limit is not None):
        for tile in cutlass.range(tiles.full_begin - 1, tiles.begin - 1, -1, unroll=1):
            row = scores(c, work, stage, thread, tile, row, True)
    totals = c.shared.total  # a name of its own: what is assigned to under a condition must be no compile-time value
    if work.count > 0:
        c.barriers.total_empty.wait(stage, state.used & 1 ^ 1)
        totals[thread, stage] = row.total
        c.barriers.total_full.arrive(stage)
    again = c.work(opaque(work.index))  # and the thread's index: no registers hold them through the loops
    query = c.query(again, stage * TMEM_LANES + thread_index() % TMEM_LANES)
    if query.exists:
        # A row that saw no key: -inf + log2(0) = -inf.
        mLSE[again.batch, query.head, query.position] = (row.reference + cute.math.log2(row.total, fastmath=True)) * math.log(2.0)
    return State(row.step, state.used + Int32(work.count > 0))


@cute.jit
def scores(c: Context, work: Work, stage: Int32, thread: Int32, tile: Int32, row: Row, masked: cutlass.Constexpr[bool]) -> Row:
    """One key tile."""
    address = stage * c.config.tile_n  # blackwell_columns(...).S
    S = cute.make_rmem_tensor(c.config.tile_n, Float32)
    first_key = tile * c.config.tile_n
    query = c.query(work, stage * TMEM_LANES + thread)
    # Functions are not asked about rows that stand for no query.
    asked = work.batch, query.head if query.exists else 0, query.position if query.exists else 0
    seen = []
    if const_expr(c.modifiers.mask is not None):
        seen = [c.modifiers.seen((*asked, first_key + begin), ALONG_KEYS, masked) for begin in range(0, c.config.tile_n, CHUNK)]
    c.barriers.s_full.wait(stage, row.step & 1)
    load_columns(address, S, thread)
    if const_expr(c.scalars.gain is not None or c.modifiers.present or masked):
        for chunk in cutlass.range_constexpr(c.config.tile_n // CHUNK):
            part = cute.make_tensor(S.iterator + chunk * CHUNK, cute.make_layout(CHUNK))
            if const_expr(c.scalars.gain is not None):
                for i in cutlass.range_constexpr(CHUNK):
                    part[i] = capped(part[i], c.scalars.gain)
            if const_expr(c.modifiers.score is not None):
                c.modifiers.change(part, (*asked, first_key + chunk * CHUNK), ALONG_KEYS, masked)
            if const_expr(c.modifiers.mask is not None):
                hide(seen[chunk], part)
            if const_expr(masked):
                hide(in_band(work.band, query.position, first_key + chunk * CHUNK), part)
    largest = S.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0) * c.scalars.scale_log2
    new = cute.arch.fmax(row.reference, largest)
    grew = cute.arch.vote_any_sync(Boolean(new - row.reference > c.config.rescale_threshold))
    reference = new if grew else row.reference
    factor = cute.math.exp2(row.reference - finite(reference), fastmath=True) if grew else Float32(1.0)
    c.shared.factor[thread, stage] = factor
    give_factor(stage, thread)

    total = row.total * factor
    for chunk in cutlass.range_constexpr(c.config.tile_n // CHUNK):
        total = total + exponentials(c, S, chunk, finite(reference))
        P = cute.make_rmem_tensor(CHUNK, c.dtype)
        for i in cutlass.range_constexpr(CHUNK):
            P[i] = S[chunk * CHUNK + i].to(c.dtype)
        words = cute.make_tensor(cute.recast_ptr(P.iterator, dtype=Float32), cute.make_layout(CHUNK // 2))
        store_columns(address + chunk * (CHUNK // 2), words, thread)
        if const_expr((chunk + 1) * CHUNK == c.config.early_keys):
            cute.arch.fence_view_async_tmem_store()
            c.barriers.p_ready.arrive(stage)
    cute.arch.fence_view_async_tmem_store()
    c.barriers.p_last.arrive(stage)
    return Row(reference, total, row.step + 1)


@cute.jit
def finite(reference: Float32) -> Float32:
    """What to subtract: 0 where every key so far is hidden, so that exp2(-inf - 0) = 0 and no (-inf) - (-inf) arises."""
    return Float32(0.0) if reference == -Float32.inf else reference


@cute.jit
def exponentials(c: Context, S: cute.Tensor, chunk: cutlass.Constexpr[int], reference: Float32) -> Float32:
    """Replace scores of a chunk by P; returns their sum, before P is rounded."""
    scale = c.scalars.scale_log2
    total = (Float32(0.0), Float32(0.0))
    for i in cutlass.range_constexpr(chunk * CHUNK, (chunk + 1) * CHUNK, 2):
        x, y = cute.arch.fma_packed_f32x2((S[i], S[i + 1]), (scale, scale), (-reference, -reference))
        S[i], S[i + 1] = exp2_of_pair(c.config.exp2, i // 2, x, y)
        total = cute.arch.add_packed_f32x2(total, (S[i], S[i + 1]))
    return total[0] + total[1]


@cute.jit
def hide(seen: Int32, S: cute.Tensor) -> None:
    """Set the scores of 32 keys to -inf but those that ``seen`` has a bit for.

    From a word ptxas makes seven predicates at a time (R2P) instead of comparing for each key.
    """
    for i in cutlass.range_constexpr(cute.size(S)):
        S[i] = S[i] if seen & (1 << i if i < 31 else -(1 << 31)) != 0 else -Float32.inf


@cute.jit
def in_band(band: Band, row: Int32, first_key: Int32) -> Int32:
    """Which of the 32 keys from ``first_key`` on ``row`` sees, a bit for each."""
    seen = ~ones_from(band.end_key(row) - first_key)
    if const_expr(band.left_limit is not None):
        seen = seen & ones_from(band.first_key(row) - first_key)
    return seen
