"""The load warp."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa4.config import TMEM_LANES
from fa4.kernels.blackwell.backward.context import Context, Work
from fa4.kernels.blackwell.forward.context import Slot, following
from fa4.kernels.blackwell.forward.load import Source


@dataclass(frozen=True)
class Sources:
    """Tensors in global memory and the tiles they fill; ``mLSE`` and ``mDelta`` float32 (B, Hq, Sq rounded)."""

    Q: Source
    K: Source
    V: Source
    dO: Source
    mLSE: cute.Tensor
    mDelta: cute.Tensor


@cute.jit
def run(c: Context, work: Work, sources: Sources) -> None:
    """Fill shared memory.

    Warps: one.
    Owns: sK, sV, sQ, sLSE, sDelta, sdO.
    Waits: q_empty, do_empty, before shared memory is used again.
    Signals: k_full, v_full, q_full, do_full by the bytes that arrive (elements beyond a tensor arrive as 0).
    Order: K, then the first Q with its lse and delta, V, dO; then Q and dO of each further tile; heads of the group one after the other.
    """
    count = work.tiles.end - work.tiles.begin
    slot, used = Slot(Int32(0), Int32(0)), Int32(0)
    if work.steps > 0:
        sources.K.start(work.key_tile, (work.head, work.batch), 0, c.barriers.k_full.at(0))
    for member in cutlass.range(work.group, unroll=1):
        at = (work.head * work.group + member, work.batch)
        for i in cutlass.range(count, unroll=1):
            tile = work.tiles.begin + i
            c.barriers.q_empty.wait(slot.index, slot.phase ^ 1)
            full = c.barriers.q_full.at(slot.index)
            sources.Q.start(tile, at, slot.index, full)
            statistics(c, sources, (tile, *at), slot.index, full)
            if used == 0:
                sources.V.start(work.key_tile, (work.head, work.batch), 0, c.barriers.v_full.at(0))
            c.barriers.do_empty.wait(0, used & 1 ^ 1)
            sources.dO.start(tile, at, 0, c.barriers.do_full.at(0))
            slot = following(slot, c.config.stages)
            used = used + 1


@cute.jit
def statistics(c: Context, sources: Sources, place: tuple[Int32, Int32, Int32], slot: Int32, full: cute.Pointer) -> None:
    """Start lse and delta of the query tile ``place``, (tile, head, batch); like Q, they announce to ``full`` what it is to expect."""
    tile, head, batch = place
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * TMEM_LANES * 4)
        for mX, sX in ((sources.mLSE, c.shared.sLSE), (sources.mDelta, c.shared.sDelta)):  # such copies do not elect by themselves
            cute.copy(atom, cute.local_tile(mX[batch, head, None], (TMEM_LANES,), (tile,)), sX[None, slot], mbar_ptr=full)
