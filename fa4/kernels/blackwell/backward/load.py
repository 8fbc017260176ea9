"""The load warp."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from fa4.config import TMEM_LANES
from fa4.kernels.blackwell.backward.context import Context, Work
from fa4.kernels.common.tma import Source

STATISTICS = 2 * TMEM_LANES
"""Float32 numbers of a query tile: lse of its rows, then delta."""

STATISTICS_BYTES = 4 * STATISTICS
"""Their bytes."""


@dataclass(frozen=True)
class Sources:
    """Tensors in global memory and the tiles they fill, the last three a pair's; ``mStatistics`` float32 (B, Hq, 2 * Sq rounded)."""

    mStatistics: cute.Tensor
    K: Source
    V: Source
    Q: Source
    dO: Source
    Qt: Source
    dOt: Source
    Kt: Source


@dataclass(frozen=True)
class Head:
    """A query head: its number, the batch, and the address where its statistics begin."""

    head: Int32
    batch: Int32
    statistics: Int64


@cute.jit
def run(c: Context, work: Work, sources: Sources) -> None:
    """Fill shared memory.

    Warps: one.
    Owns: sK, sV, sQ, sStatistics, sdO; of a pair sKt, sQt, sdOt.
    Waits: q_empty, do_empty, qt_empty, dot_empty, before shared memory is used again.
    Signals: k_full, v_full, q_full, row_full, do_full, kt_full, qt_full, dot_full by the bytes that arrive (elements beyond a tensor as 0).
    Order: K, then the first Q with its lse and delta, V, dO; then Q and dO of each further tile; heads of the group one after the other.
    What a tile has for the gradients follows what it has for S and dP. What no needed gradient reads is not loaded. Where tiles of a pair
    are serial, Q and Qt take turns, and dO and dOt: each waits until the product that reads the other is complete.

    At the end of a pair it waits until all is empty again, so that no commit of the leader is on its way to this CTA any more.
    """
    keys, here = (work.key_tile * c.config.cluster + c.rank, 0), (work.head, work.batch)
    if work.steps > 0:
        used, first = Int32(0), head_of(work, sources, Int32(0))
        sources.K.start(c, keys, here, 0, c.barriers.k_full.at(0))
        for_scores(c, sources, first, work.tiles.begin, used, statistics_of(first, work.tiles.begin))
        if const_expr(c.config.needed.scores):
            sources.V.start(c, keys, here, 0, c.barriers.v_full.at(0))
        for_others(c, sources, first, work.tiles.begin, used)
        if const_expr(c.config.cta_pair and c.config.needed.dq):
            sources.Kt.start(c, (work.key_tile, c.rank), here, 0, c.barriers.kt_full.at(0))
        begin, used = work.tiles.begin + 1, Int32(1)
        for member in cutlass.range(work.group, unroll=1):
            head = head_of(work, sources, member)
            address = statistics_of(head, begin)  # kept, since ptxas would multiply for each tile
            for tile in cutlass.range(begin, work.tiles.end, unroll=1):
                for_scores(c, sources, head, tile, used, address)
                for_others(c, sources, head, tile, used)
                used = used + 1
                address = address + STATISTICS_BYTES
            begin = work.tiles.begin
        if const_expr(c.config.cta_pair):
            needed, b = c.config.needed, c.barriers
            for barrier, there in ((b.q_empty, True), (b.do_empty, needed.scores), (b.dot_empty, needed.dv), (b.qt_empty, needed.scores)):
                if const_expr(there):
                    barrier.wait(0, used & 1 ^ 1)


@cute.jit
def head_of(work: Work, sources: Sources, member: Int32) -> Head:
    """One of the query heads that share the key head."""
    head, (_, heads, numbers) = work.head * work.group + member, sources.mStatistics.shape
    first = Int64(work.batch * heads + head) * numbers  # the tensor is contiguous
    return Head(head, work.batch, (sources.mStatistics.iterator + first).toint())


@cute.jit
def statistics_of(head: Head, tile: Int32) -> Int64:
    """The address of lse and delta of a query tile."""
    return head.statistics + Int64(tile) * STATISTICS_BYTES


@cute.jit
def for_scores(c: Context, sources: Sources, head: Head, tile: Int32, used: Int32, address: Int64) -> None:
    """Q of a tile, for S, and lse and delta, from ``address``; ``used`` is how many tiles came before."""
    slot, phase = used & c.config.stages - 1, used >> c.config.stages - 1 & 1  # one or two slots
    if const_expr(c.serial_pair and c.config.needed.scores):
        c.barriers.qt_empty.wait(0, used & 1 ^ 1)
    else:
        c.barriers.q_empty.wait(slot, phase ^ 1)
    rows = (tile * c.config.cluster + c.rank, 0)
    sources.Q.start(c, rows, (head.head, head.batch), slot, c.barriers.q_full.at(slot))
    statistics(c, address, used & 1)


@cute.jit
def for_others(c: Context, sources: Sources, head: Head, tile: Int32, used: Int32) -> None:
    """DO of a tile, for dP, and what a pair has for dV and dK."""
    b, rows, at = c.barriers, (tile * c.config.cluster + c.rank, 0), (head.head, head.batch)
    needed, pair = c.config.needed, c.config.cta_pair
    turns = c.serial_pair
    if const_expr(needed.scores or not pair):
        if const_expr(turns and needed.dv):
            b.dot_empty.wait(0, used & 1 ^ 1)
        else:
            b.do_empty.wait(0, used & 1 ^ 1)
        sources.dO.start(c, rows, at, 0, b.do_full.at(0))
    if const_expr(turns and needed.dk):
        b.q_empty.wait(0, used & 1)
        sources.Qt.start(c, (tile, c.rank), at, 0, b.qt_full.at(0))
    if const_expr(pair and needed.dv):
        if const_expr(turns and needed.scores):
            b.do_empty.wait(0, used & 1)
        else:
            b.dot_empty.wait(0, used & 1 ^ 1)
        sources.dOt.start(c, (tile, c.rank), at, 0, b.dot_full.at(0))
    if const_expr(pair and needed.scores and not turns):
        b.qt_empty.wait(0, used & 1 ^ 1)  # and so lse and delta of the tile after are free; without dQ and dK they are since dot_empty
        if const_expr(needed.dk):
            sources.Qt.start(c, (tile, c.rank), at, 0, b.qt_full.at(0))


@cute.jit
def statistics(c: Context, address: Int64, slot: Int32) -> None:
    """Start lse and delta of a query tile, which lie side by side here and there."""
    atom, full = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32), c.barriers.row_full.at(slot)
    aligned = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=16)
    with cute.arch.elect_one():  # such copies do not elect by themselves
        cute.arch.mbarrier_arrive_and_expect_tx(full, STATISTICS_BYTES)
        cute.copy(atom, cute.make_tensor(aligned, cute.make_layout(STATISTICS)), c.shared.sStatistics[None, slot], mbar_ptr=full)
