"""The barriers of the kernel as data: who waits for whom, and how many arrivals complete a phase.

::

    load --q_full--> mma --s_full--> softmax ----factor-----> correction --o_ready--> epilogue
         <-q_empty-      <-p_ready--         --total_full--->            <-o_empty-
         --kv_full->     <-p_last---         <-total_empty---     |
         <-kv_empty-     <-p_ready--------------------------------+
                         --o_full-------------------------------->+

All but ``factor`` are mbarriers, with an entry for each query tile or for each slot of the ring. In the dynamic order there are two more,
from load to all roles and back, for the answers that say which tile is next: ``work_full`` and ``work_empty``. Threads arrive for
themselves: their own accesses are ordered before, and no warp has to come together for it.

A factor goes from a warp of the softmax to the warp of correction that has the same rows, through a named barrier of these two: one
instruction on either side, no phases. It needs no barrier back: the next factor is written after s_full of the next key tile, whose S is
issued after the product that waits for p_ready of this one, where correction arrives when it has read the factor. The sum of a row,
which follows the last factor without such a wait, has mbarriers.

In a pair of CTAs the MMA warp of the even one, the leader, issues the products of both. What it waits for is counted in its shared memory:
``q_full`` and ``kv_full`` the bytes that arrive in both CTAs, ``p_ready`` and ``p_last`` the warps of both (``JOINT``), once each. Its
commits arrive in both. Its load warp also asks for tiles: an answer comes to both CTAs, and the warps of both arrive at ``work_empty``. All
other barriers stay within a CTA. No phase can be overrun: whoever arrives at the leader's barrier for the next phase has waited for a
commit or an answer that was issued after the leader had seen the phase before.
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

QUERY_TILE, SLOT, ANSWER = "query tile", "slot", "answer"

ANSWERS = 2
"""In the dynamic order, how many answers to requests for tiles there is room for: load reads one before others have read the last. A power
of two."""

# name: (arrivals of a CTA, what there is one for)
GRAPH = {
    "q_full": (1, QUERY_TILE),  # load, with the bytes of Q, to mma
    "q_empty": (1, QUERY_TILE),  # mma, by commit: all S of the tile are complete; where O leaves through sQ also the epilogue: it has left
    "kv_full": (1, SLOT),  # load, with the bytes of K or V, to mma
    "kv_empty": (1, SLOT),  # mma, by commit: the products that read the slot are complete
    "s_full": (1, QUERY_TILE),  # mma, by commit: S is complete, and so is the product that read the P before
    "p_ready": (2 * GROUP, QUERY_TILE),  # softmax: most of P is in tensor memory; correction: O has the reference of this P
    "p_last": (GROUP, QUERY_TILE),  # softmax: all of P is
    "total_full": (GROUP, QUERY_TILE),  # softmax to correction: the sum of the row
    "total_empty": (GROUP, QUERY_TILE),  # correction has read it
    "o_full": (1, QUERY_TILE),  # mma, by commit: O is complete
    "o_ready": (GROUP, QUERY_TILE),  # correction to epilogue: O is in shared memory
    "o_empty": (1, QUERY_TILE),  # epilogue: it has left
    "work_full": (1, ANSWER),  # load, with the bytes of the answer, to all roles: what the next tile is
    "work_empty": (3 * GROUP + 3 * WARP, ANSWER),  # all roles have read it
}


JOINT = ("p_ready", "p_last", "work_empty")
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


def entries(config: BlackwellForwardConfig, each: str) -> int:
    """How many barriers there are where there is one for ``each`` query tile, slot or answer."""
    return {QUERY_TILE: config.q_tiles, SLOT: config.stages, ANSWER: ANSWERS if config.order == "dynamic" else 0}[each]


def _absent(config: BlackwellForwardConfig, name: str) -> int:
    """Threads that do not arrive: of a softmax warpgroup without a query tile."""
    return (2 - config.q_tiles) * GROUP if name == "work_empty" else 0


def _more(config: BlackwellForwardConfig, name: str) -> int:
    """Further arrivals: where O leaves through sQ the epilogue's; fewer where only the leader of a pair has an MMA warp."""
    return {"q_empty": int(config.o_over_q), "work_empty": -int(config.cta_pair)}.get(name, 0)


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
    work_full: Barrier
    work_empty: Barrier

    @staticmethod
    def counts(config: BlackwellForwardConfig) -> list[int]:
        """Arrivals of each mbarrier, in the order they lie in memory."""
        return [
            arrivals(count - _absent(config, name), config.cluster if name in JOINT else 1) + _more(config, name)
            for name, (count, each) in GRAPH.items()
            for _ in range(entries(config, each))
        ]

    @staticmethod
    def allocate(allocator: Any, config: BlackwellForwardConfig) -> Barriers:
        """Shared memory for all of them."""
        start = allocator.allocate_array(Int64, len(Barriers.counts(config)))
        barriers, at = {}, 0
        for name, (_, each) in GRAPH.items():
            barriers[name] = Barrier(start + at, config.cta_pair and name in JOINT, name in TENSOR_MEMORY)
            at += entries(config, each)
        return Barriers(**barriers)

    @cute.jit
    def initialise(self, config: cutlass.Constexpr[BlackwellForwardConfig]) -> None:
        """By one thread, before any other uses them."""
        for i, count in enumerate(Barriers.counts(config)):
            cute.arch.mbarrier_init(self.q_full.start + i, count)
