"""An array of mbarriers as the roles of a Blackwell kernel use it (PTX ISA section 9.7.13.15 and 9.7.16.10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, const_expr

from fa4.config import WARP
from fa4.kernels.common.tcgen05 import fence_after_sync, fence_before_sync

LEADER = 0
"""Rank of the CTA of a pair that issues the products."""

# The leader's mbarrier of this address, with what the warp did before visible in all of the cluster.
_ARRIVE_AT_LEADER = (
    f"{{ .reg .b32 there; mapa.shared::cluster.u32 there, {{$r0}}, {LEADER}; "
    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }"
)


def arrivals(threads: int, ctas: int) -> int:
    """What completes a phase: so many threads, or, where both CTAs of a pair arrive at the leader's barrier, their warps."""
    return threads if ctas == 1 else threads // WARP * ctas


@dataclass(frozen=True)
class Barrier:
    """An array of mbarriers in shared memory.

    ``joint`` where the leader of a pair has those that count. ``fences`` says whether threads that arrive hand on what they did in tensor
    memory, and those that wait go on in it: both need tcgen05.fence. A commit has its own built in.
    """

    start: cute.Pointer
    joint: bool = False
    fences: bool = False

    def at(self, index: Any) -> cute.Pointer:
        """One of them."""
        return self.start + index

    @cute.jit
    def wait(self, index: Int32, phase: Int32) -> None:
        """Until the phase of this parity is complete."""
        cute.arch.mbarrier_wait(self.at(index), phase)
        if const_expr(self.fences):
            fence_after_sync()

    @cute.jit
    def arrive(self, index: Int32) -> None:
        """For each thread that comes here, or at the leader's once for the warp: memory accesses up to here are ordered before."""
        if const_expr(self.fences):
            fence_before_sync()
        if const_expr(self.joint):
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.inline_ptx(_ARRIVE_AT_LEADER, read_only_args=[self.at(index).toint()])
        else:
            cute.arch.mbarrier_arrive(self.at(index))
