"""The load warp."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from fa4.config import TMEM_LANES
from fa4.kernels.blackwell.backward.context import Context, Work
from fa4.kernels.blackwell.forward.context import Slot, following
from fa4.kernels.blackwell.forward.load import Source


@dataclass(frozen=True)
class Sources:
    """Tensors in global memory and the tiles they fill; ``mLSE`` and ``mDelta`` float32 (B, Hq, Sq rounded). Only a pair uses the last three."""

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
    pair = c.config.cta_pair
    keys, here = work.key_tile * c.config.cluster + c.rank, (work.head, work.batch)
    slot, place, used = Slot(Int32(0), Int32(0)), Slot(Int32(0), Int32(0)), Int32(0)
    if work.steps > 0:
        sources.K.start(c, (keys, 0), here, 0, c.barriers.k_full.at(0))
    for member in cutlass.range(work.group, unroll=1):
        at = (work.head * work.group + member, work.batch)
        for tile in cutlass.range(work.tiles.begin, work.tiles.end, unroll=1):
            rows = tile * c.config.cluster + c.rank
            c.barriers.q_empty.wait(slot.index, slot.phase ^ 1)
            sources.Q.start(c, (rows, 0), at, slot.index, c.barriers.q_full.at(slot.index))
            statistics(sources, c, (tile, *at), place.index)
            if used == 0:
                sources.V.start(c, (keys, 0), here, 0, c.barriers.v_full.at(0))
            c.barriers.do_empty.wait(0, used & 1 ^ 1)
            sources.dO.start(c, (rows, 0), at, 0, c.barriers.do_full.at(0))
            if const_expr(pair):
                c.barriers.dot_empty.wait(0, used & 1 ^ 1)
                sources.dOt.start(c, (tile, c.rank), at, 0, c.barriers.dot_full.at(0))
                if used == 0:
                    sources.Kt.start(c, (work.key_tile, c.rank), here, 0, c.barriers.kt_full.at(0))
                c.barriers.qt_empty.wait(0, used & 1 ^ 1)  # and so lse and delta of the tile after are free
                sources.Qt.start(c, (tile, c.rank), at, 0, c.barriers.qt_full.at(0))
            slot, place, used = following(slot, c.config.stages), following(place, c.config.row_slots), used + 1
    if const_expr(pair):
        for barrier in (c.barriers.q_empty, c.barriers.do_empty, c.barriers.dot_empty, c.barriers.qt_empty):
            barrier.wait(0, used & 1 ^ 1)


@cute.jit
def statistics(sources: Sources, c: Context, place: tuple[Int32, Int32, Int32], slot: Int32) -> None:
    """Start lse and delta of the query tile ``place``, (tile, head, batch)."""
    tile, head, batch = place
    full = c.barriers.row_full.at(slot)
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * TMEM_LANES * 4)
        for mX, sX in ((sources.mLSE, c.shared.sLSE), (sources.mDelta, c.shared.sDelta)):  # such copies do not elect by themselves
            cute.copy(atom, cute.local_tile(mX[batch, head, None], (TMEM_LANES,), (tile,)), sX[None, slot], mbar_ptr=full)
