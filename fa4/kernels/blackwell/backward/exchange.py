"""dS from one CTA of a pair to the other, through distributed shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4.config import ELEMENT_BYTES, TMEM_LANES, WARP
from fa4.kernels.blackwell.backward.context import Context, Work

ROW = TMEM_LANES // 2 * ELEMENT_BYTES
"""Bytes of dS of a key: half of the queries."""

_COPY = (
    "{ .reg .b32 to, bar; mapa.shared::cluster.u32 to, {$r0}, {$r4}; mapa.shared::cluster.u32 bar, {$r3}, {$r4}; "
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [{$r1}], {$r2}, [bar]; }"
)


@cute.jit
def send(c: Context, warp: Int32) -> None:
    """Copy the rows of a warp, from the last part of sdS to the part of this CTA in the other CTA's; its ``sent`` counts the bytes."""
    cute.arch.sync_warp()
    start, rows = c.shared.sdS.iterator.toint(), warp * (WARP * ROW)
    to, source = start + c.rank * (TMEM_LANES * ROW) + rows, start + c.config.cluster * TMEM_LANES * ROW + rows
    with cute.arch.elect_one():
        arguments = [to, source, Int32(WARP * ROW), c.barriers.sent.at(0).toint(), 1 - c.rank]
        cute.arch.inline_ptx(_COPY, read_only_args=arguments)


@cute.jit
def relay(c: Context, work: Work) -> None:
    """Tell the leader when this CTA has what the other one sent: a copy can signal only where it goes.

    Warps: one, in each CTA of a pair.
    Owns: nothing.
    Waits: sent.
    Signals: moved, of the leader.
    Order: announce the bytes of a tile; wait for them; signal.
    """
    for step in cutlass.range(work.steps, unroll=1):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(c.barriers.sent.at(0), TMEM_LANES * ROW)
        c.barriers.sent.wait(0, step & 1)
        c.barriers.moved.arrive(0)
