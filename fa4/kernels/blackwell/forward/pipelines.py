"""The barriers of the kernel as data: who waits for whom, and how many arrivals complete a phase.

::

    load --q_full--> mma --s_full--> softmax ----factor-----> correction --o_ready--> epilogue
         <-q_empty-      <-p_ready--         --total_full--->            <-o_empty-
         --kv_full->     <-p_last---         <-total_empty---     |
         <-kv_empty-     <-p_ready--------------------------------+
                         --o_full-------------------------------->+

All but ``factor`` are mbarriers, with an entry for each query tile or for each slot of the ring. Threads arrive for themselves: their
own accesses are ordered before, and no warp has to come together for it.

A factor goes from a warp of the softmax to the warp of correction that has the same rows, through a named barrier of these two: one
instruction on either side, no phases. It needs no barrier back: the next factor is written after s_full of the next key tile, whose S is
issued after the product that waits for p_ready of this one, where correction arrives when it has read the factor. The sum of a row,
which follows the last factor without such a wait, has mbarriers.

In a pair of CTAs the MMA warp of the even one, the leader, issues the products of both. What it waits for is counted in its shared memory:
``q_full`` and ``kv_full`` the bytes that arrive in both CTAs, ``p_ready`` and ``p_last`` the warps of both (``JOINT``), once each. Its
commits arrive in both. All other barriers stay within a CTA. No phase can be overrun: whoever arrives at the leader's barrier for the next
phase has waited for a commit that was issued after the leader had seen the phase before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fa4.config import WARP, BlackwellForwardConfig
from fa4.kernels.common.barrier import Barrier, arrivals
from fa4.kernels.common.tcgen05 import fence_after_sync

GROUP = 4 * WARP
"""Threads of a softmax or correction warpgroup."""

# name: (arrivals of a CTA, whether there is one for each slot of the ring rather than for each query tile)
GRAPH = {
    "q_full": (1, False),  # load, with the bytes of Q, to mma
    "q_empty": (1, False),  # mma, by commit: all S of the tile are complete; where O leaves through sQ also the epilogue: it has left
    "kv_full": (1, True),  # load, with the bytes of K or V, to mma
    "kv_empty": (1, True),  # mma, by commit: the products that read the slot are complete
    "s_full": (1, False),  # mma, by commit: S is complete, and so is the product that read the P before
    "p_ready": (2 * GROUP, False),  # softmax: most of P is in tensor memory; correction: O has the reference of this P
    "p_last": (GROUP, False),  # softmax: all of P is
    "total_full": (GROUP, False),  # softmax to correction: the sum of the row
    "total_empty": (GROUP, False),  # correction has read it
    "o_full": (1, False),  # mma, by commit: O is complete
    "o_ready": (GROUP, False),  # correction to epilogue: O is in shared memory
    "o_empty": (1, False),  # epilogue: it has left
}


JOINT = ("p_ready", "p_last")
"""In a pair warps of both CTAs arrive at the leader's."""

TENSOR_MEMORY = ("s_full", "p_ready", "p_last", "o_full")
"""Barriers that hand on what was done in tensor memory, and need tcgen05.fence on both sides; a commit has it built in."""

FIRST_PAIR = 2
"""The first named barrier of warp pairs; those before are of the whole CTA."""


@cute.jit
def _pair(query_tile: Int32, thread: Int32) -> Int32:
    """The named barrier of the softmax warp and the correction warp that have the same rows."""
    return FIRST_PAIR + query_tile * (GROUP // WARP) + thread // WARP


@cute.jit
def give_factor(query_tile: Int32, thread: Int32) -> None:
    """By a softmax warp: its factors are in shared memory. PTX ISA 9.7.13.1, producer and consumer."""
    cute.arch.barrier_arrive(barrier_id=_pair(query_tile, thread), number_of_threads=2 * WARP)


@cute.jit
def take_factor(query_tile: Int32, thread: Int32) -> None:
    """By a correction warp: waits until they are; hands on what the commit of s_full did in tensor memory."""
    cute.arch.barrier(barrier_id=_pair(query_tile, thread), number_of_threads=2 * WARP)
    fence_after_sync()


@dataclass(frozen=True)
class Barriers:
    """The barriers of ``GRAPH``."""

    q_full: Barrier
    q_empty: Barrier
    kv_full: Barrier
    kv_empty: Barrier
    s_full: Barrier
    p_ready: Barrier
    p_last: Barrier
    total_full: Barrier
    total_empty: Barrier
    o_full: Barrier
    o_ready: Barrier
    o_empty: Barrier

    @staticmethod
    def counts(config: BlackwellForwardConfig) -> list[int]:
        """Arrivals of each mbarrier, in the order they lie in memory."""
        return [
            arrivals(count, config.cluster if name in JOINT else 1) + (name == "q_empty" and config.o_over_q)
            for name, (count, ring) in GRAPH.items()
            for _ in range(config.stages if ring else config.q_tiles)
        ]

    @staticmethod
    def allocate(allocator: Any, config: BlackwellForwardConfig) -> Barriers:
        """Shared memory for all of them."""
        start = allocator.allocate_array(Int64, len(Barriers.counts(config)))
        barriers, at = {}, 0
        for name, (_, ring) in GRAPH.items():
            barriers[name] = Barrier(start + at, config.cta_pair and name in JOINT, name in TENSOR_MEMORY)
            at += config.stages if ring else config.q_tiles
        return Barriers(**barriers)

    @cute.jit
    def initialise(self, config: cutlass.Constexpr[BlackwellForwardConfig]) -> None:
        """By one thread, before any other uses them."""
        for i, count in enumerate(Barriers.counts(config)):
            cute.arch.mbarrier_init(self.q_full.start + i, count)
