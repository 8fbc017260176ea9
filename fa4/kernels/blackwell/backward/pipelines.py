"""The barriers of the kernel as data: who waits for whom, and how many arrivals complete a phase.

::

    load --k_full v_full-->  mma  --s_full dp_full dv_full dk_full-->  compute --grad_ready--> epilogue
         --q_full do_full->       <------p_ready ds_ready------------
         <-q_empty do_empty-      --dq_full-->  reduce
         |                        <-dq_empty--
         +--q_full (lse, delta)-------------------------------------> compute

What needs no barrier, since the tensor core works in order:

- S of the next tile goes where P was: it is issued behind the product that reads P.
- dS is written over the one before, in shared and in tensor memory, after ``dp_full``: dP was issued behind both products that read dS.
- lse and delta of a tile are free when its Q is: dK, the last to read Q, is issued after ``ds_ready``, and so after the compute warps read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from fa4.config import BlackwellBackwardConfig
from fa4.kernels.blackwell.forward.pipelines import Barrier

WARPS = 4
"""Warps of a warpgroup: each arrives once, after all its lanes have done their part."""

# name: (arrivals, whether there is one for each tile of Q in shared memory rather than a single one)
GRAPH = {
    "k_full": (1, False),  # load, with the bytes of K, to mma
    "v_full": (1, False),  # load, with the bytes of V, to mma
    "q_full": (2, True),  # load, with the bytes of Q, and with those of lse and delta, to mma and compute
    "q_empty": (1, True),  # mma, by commit: S and dK of the tile are complete
    "do_full": (1, False),  # load, with the bytes of dO, to mma
    "do_empty": (1, False),  # mma, by commit: dP and dV of the tile are complete
    "s_full": (1, False),  # mma, by commit: S is complete
    "p_ready": (2 * WARPS, False),  # compute: P is in tensor memory, and S has been read
    "dp_full": (1, False),  # mma, by commit: dP is complete, and so are the products that read the dS before
    "ds_ready": (2 * WARPS, False),  # compute: dS is in tensor and in shared memory, and dP has been read
    "dq_full": (1, False),  # mma, by commit: dQ is complete
    "dq_empty": (WARPS, False),  # reduce has read it
    "dv_full": (1, False),  # mma, by commit: dV is complete, and V is no longer read
    "dk_full": (1, False),  # mma, by commit: dK is complete, and K is no longer read
    "dv_ready": (2 * WARPS, False),  # compute to epilogue: dV is where V was
    "dk_ready": (2 * WARPS, False),  # compute to epilogue: dK is where K was
}


@dataclass(frozen=True)
class Barriers:
    """The barriers of ``GRAPH``."""

    k_full: Barrier
    v_full: Barrier
    q_full: Barrier
    q_empty: Barrier
    do_full: Barrier
    do_empty: Barrier
    s_full: Barrier
    p_ready: Barrier
    dp_full: Barrier
    ds_ready: Barrier
    dq_full: Barrier
    dq_empty: Barrier
    dv_full: Barrier
    dk_full: Barrier
    dv_ready: Barrier
    dk_ready: Barrier

    @staticmethod
    def counts(config: BlackwellBackwardConfig) -> list[int]:
        """Arrivals of each mbarrier, in the order they lie in memory."""
        return [arrivals for arrivals, ring in GRAPH.values() for _ in range(config.stages if ring else 1)]

    @staticmethod
    def allocate(allocator: Any, config: BlackwellBackwardConfig) -> Barriers:
        """Shared memory for all of them."""
        start = allocator.allocate_array(Int64, len(Barriers.counts(config)))
        barriers, at = {}, 0
        for name, (_, ring) in GRAPH.items():
            barriers[name] = Barrier(start + at)
            at += config.stages if ring else 1
        return Barriers(**barriers)

    @cute.jit
    def initialise(self, config: cutlass.Constexpr[BlackwellBackwardConfig]) -> None:
        """By one thread, before any other uses them."""
        for i, count in enumerate(Barriers.counts(config)):
            cute.arch.mbarrier_init(self.k_full.start + i, count)
