"""The load warp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from fa4.config import ROW_SLOTS, TMEM_LANES
from fa4.kernels.blackwell.backward.context import Context, Work
from fa4.kernels.common.barrier import Slot, following
from fa4.kernels.common.tma import Source


@dataclass(frozen=True)
class Sources:
    """Tensors in global memory and the tiles they fill, the last three a pair's; ``mLSE`` and ``mDelta`` float32 (B, Hq, Sq rounded)."""

    mLSE: cute.Tensor
    mDelta: cute.Tensor
    K: Source
    V: Source
    Q: Source
    dO: Source
    Qt: Source
    dOt: Source
    Kt: Source


@cute.jit
def run(c: Context, work: Work, sources: Sources) -> None:
    """Fill shared memory.

    Warps: one.
    Owns: sK, sV, sQ, sLSE, sDelta, sdO; of a pair sKt, sQt, sdOt.
    Waits: q_empty, do_empty, qt_empty, dot_empty, before shared memory is used again.
    Signals: k_full, v_full, q_full, row_full, do_full, kt_full, qt_full, dot_full by the bytes that arrive (elements beyond a tensor as 0).
    Order: K, then the first Q with its lse and delta, V, dO; then Q and dO of each further tile; heads of the group one after the other.
    What a tile has for the gradients follows what it has for S and dP.

    At the end of a pair it waits until all is empty again, so that no commit of the leader is on its way to this CTA any more.
    """
    keys, here = (work.key_tile * c.config.cluster + c.rank, 0), (work.head, work.batch)
    at = Next(Slot(Int32(0), Int32(0)), Int32(0), work.tiles.begin, work.head * work.group)
    if work.steps > 0:
        sources.K.start(c, keys, here, 0, c.barriers.k_full.at(0))
        for_scores(c, work, sources, at)
        sources.V.start(c, keys, here, 0, c.barriers.v_full.at(0))
        at = for_others(c, work, sources, at)
        if const_expr(c.config.cta_pair):
            sources.Kt.start(c, (work.key_tile, c.rank), here, 0, c.barriers.kt_full.at(0))
    for _ in cutlass.range(1, work.steps, unroll=1):
        for_scores(c, work, sources, at)
        at = for_others(c, work, sources, at)
    if const_expr(c.config.cta_pair):
        for barrier in (c.barriers.q_empty, c.barriers.do_empty, c.barriers.dot_empty, c.barriers.qt_empty):
            barrier.wait(0, at.used & 1 ^ 1)


class Next(NamedTuple):
    """What is loaded next: the slot of Q, how many tiles came before; the query tile, and its head."""

    slot: Slot
    used: Int32
    tile: Int32
    head: Int32


@cute.jit
def for_scores(c: Context, work: Work, sources: Sources, at: Next) -> None:
    """Q of a tile, for S, and lse and delta."""
    c.barriers.q_empty.wait(at.slot.index, at.slot.phase ^ 1)
    full = c.barriers.q_full.at(at.slot.index)
    sources.Q.start(c, (at.tile * c.config.cluster + c.rank, 0), (at.head, work.batch), at.slot.index, full)
    statistics(sources, c, (at.tile, at.head, work.batch), at.used % ROW_SLOTS)


@cute.jit
def for_others(c: Context, work: Work, sources: Sources, at: Next) -> Next:
    """DO of a tile, for dP, and what a pair has for dV and dK; returns what comes next."""
    b, rows, head = c.barriers, (at.tile * c.config.cluster + c.rank, 0), (at.head, work.batch)
    b.do_empty.wait(0, at.used & 1 ^ 1)
    sources.dO.start(c, rows, head, 0, b.do_full.at(0))
    if const_expr(c.config.cta_pair):
        b.dot_empty.wait(0, at.used & 1 ^ 1)
        sources.dOt.start(c, (at.tile, c.rank), head, 0, b.dot_full.at(0))
        b.qt_empty.wait(0, at.used & 1 ^ 1)  # and so lse and delta of the tile after are free
        sources.Qt.start(c, (at.tile, c.rank), head, 0, b.qt_full.at(0))
    last = at.tile + 1 == work.tiles.end
    tile, of = work.tiles.begin if last else at.tile + 1, at.head + 1 if last else at.head
    return Next(following(at.slot, c.config.stages), at.used + 1, tile, of)


@cute.jit
def statistics(sources: Sources, c: Context, place: tuple[Int32, Int32, Int32], slot: Int32) -> None:
    """Start lse and delta of the query tile ``place``, (tile, head, batch)."""
    tile, head, batch = place
    full = c.barriers.row_full.at(slot)
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    _, heads, rows = sources.mLSE.shape
    first = Int64((batch * heads + head) * (rows // TMEM_LANES) + tile) * TMEM_LANES  # both tensors are contiguous
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * TMEM_LANES * 4)
        for mX, sX in ((sources.mLSE, c.shared.sLSE), (sources.mDelta, c.shared.sDelta)):  # such copies do not elect by themselves
            source = cute.make_ptr(Float32, (mX.iterator + first).toint(), cute.AddressSpace.gmem, assumed_align=16)
            cute.copy(atom, cute.make_tensor(source, cute.make_layout(TMEM_LANES)), sX[None, slot], mbar_ptr=full)
