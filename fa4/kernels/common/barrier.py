"""Barriers as the roles of a Blackwell kernel use them, and places in a ring (PTX ISA section 9.7.13.15 and 9.7.16.10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import tcgen05

from fa4.config import WARP
from fa4.kernels.common.tcgen05 import fence_after_sync, fence_before_sync

LEADER = 0
"""Rank of the CTA of a pair that issues the products."""

_BOTH = 0b11  # mask of the CTAs of a pair

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


@cute.jit
def tell(c: Any, barrier: cute.Pointer) -> None:
    """Arrive when all products so far are complete, in both CTAs of a pair; for one elected thread."""
    if const_expr(c.config.cta_pair):
        tcgen05.commit(barrier, _BOTH, tcgen05.CtaGroup.TWO)
    else:
        tcgen05.commit(barrier)


@cute.jit
def commit(c: Any, barrier: cute.Pointer) -> None:
    """Arrive when all products so far are complete."""
    with cute.arch.elect_one():
        tell(c, barrier)


def rank_of_cta(config: Any) -> Int32:
    """Its rank in its cluster, LEADER without a pair."""
    return cute.arch.block_idx_in_cluster() if config.cta_pair else Int32(LEADER)


@cute.jit
def initialise(barriers: Any, config: cutlass.Constexpr[Any]) -> None:
    """By one warp; others may use them, and those of the other CTA of a pair, after ``sync_cluster``."""
    with cute.arch.elect_one():
        barriers.initialise(config)
    cute.arch.mbarrier_init_fence()


@cute.jit
def sync_cluster(ctas: cutlass.Constexpr[int]) -> None:
    """A barrier of all threads of the cluster."""
    if const_expr(ctas > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


class Slot(NamedTuple):
    """A place in the ring, and the parity of the phase in which it is used."""

    index: Int32
    phase: Int32


@cute.jit
def following(slot: Slot, stages: cutlass.Constexpr[int]) -> Slot:
    """The next slot; the parity flips where the ring starts again."""
    wraps = slot.index + 1 == stages
    return Slot(Int32(0) if wraps else slot.index + 1, slot.phase ^ Int32(wraps))
