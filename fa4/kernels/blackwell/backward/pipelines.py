"""The barriers of the kernel as data: who waits for whom, and how many arrivals complete a phase.

::

    load --k_full v_full-->  mma  --s_full dp_full dv_full dk_full-->  compute --dv_ready dk_ready--> epilogue
         --q_full do_full->       <------p_ready ds_ready------------
         <-q_empty do_empty-      --dq_full-->  reduce
         |                        <-dq_empty--
         +--row_full (lse, delta)-----------------------------------> compute

What needs no barrier, since the tensor core works in order:

- S of the next tile goes where P was: it is issued behind the product that reads P.
- dS is written over the one before in tensor memory after ``dp_full``: dP was issued behind the product that reads dS there.
- lse and delta of a tile are free when its Q is, for dK: that product is issued after ``ds_ready``, so after the compute warps read them.
  Where nobody needs dK, the commit comes behind dQ, or else behind dV.

In a pair of CTAs the MMA warp of the even one, the leader, issues the products of both. What it waits for is counted in its shared memory:
the bytes that arrive in both CTAs, the warps of both (``JOINT``). Its commits arrive in both. A pair has barriers of its own, ``PAIRED``::

    load --qt_full dot_full kt_full-->  mma        halves of Q, dO, K along the other dimension
         <-qt_empty dot_empty---------
    compute --sent-->  relay of the other CTA --moved-->  mma       half of dS
    mma --dq_full-->  compute                      dS in shared memory has been read
        <--s_read---                               S has been read: dQ of the tile before goes between the parts of P

Where tiles are serial (``BackwardColumns.serial``), ``s_read`` says that half of dP may take columns of S; ``dq_full`` and ``dq_empty`` are
there for each part of dQ. Of a pair the halves of Q then take turns in the same shared memory: load waits for qt_empty before Q and for
q_empty before Qt, and so with dO. What ``sent`` counts leaves from where the warps that add dQ have theirs::

    reduce --sdq_empty-->  compute                 what is added has been read
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from fa4.config import ROW_SLOTS, WARP, BackwardColumns, BlackwellBackwardConfig
from fa4.kernels.common.barrier import Barrier, arrivals

WARPS = 4
GROUP = WARPS * WARP
"""Threads of a warpgroup."""

# name: (arrivals, whether there is one for each tile of Q in shared memory, or what ``Barriers.allocate`` says, rather than a single one)
GRAPH = {
    "k_full": (1, False),  # load, with the bytes of K, to mma
    "v_full": (1, False),  # load, with the bytes of V, to mma
    "q_full": (1, True),  # load, with the bytes of Q, to mma
    "q_empty": (1, True),  # mma, by commit: S and dK (or what comes last, see mma.py) of the tile are complete; in a pair, S
    "row_full": (1, True),  # load, with the bytes of lse and delta, to compute
    "do_full": (1, False),  # load, with the bytes of dO, to mma
    "do_empty": (1, False),  # mma, by commit: dP and dV of the tile are complete; in a pair, dP
    "s_full": (1, False),  # mma, by commit: S is complete
    "p_ready": (2 * GROUP, False),  # compute: P is in tensor memory, and S has been read
    "dp_full": (1, False),  # mma, by commit: dP is complete, and so are the products that read the dS before
    "ds_ready": (2 * GROUP, False),  # compute: dS is in tensor and in shared memory, and dP has been read
    "dq_full": (1, True),  # mma, by commit: dQ is complete
    "dq_empty": (GROUP, True),  # reduce has read it
    "dv_full": (1, False),  # mma, by commit: dV is complete, and V is no longer read
    "dk_full": (1, False),  # mma, by commit: dK is complete, and the last Q and, of a pair, K are no longer read
    "dv_ready": (2 * GROUP, False),  # compute to epilogue: dV is where V was
    "dk_ready": (2 * GROUP, False),  # compute to epilogue: dK is where Q was, of a pair where K was
}
# Those that only a pair has.
PAIRED = {
    "kt_full": (1, False),  # load, with the bytes of half of the columns of K, to mma
    "qt_full": (1, False),  # load, with those of Q, to mma
    "qt_empty": (1, False),  # mma, by commit: dK of the tile is complete, or dQ where nobody needs dK
    "dot_full": (1, False),  # load, with those of dO, to mma
    "dot_empty": (1, False),  # mma, by commit: dV of the tile is complete
    "sent": (1, False),  # relay, with the bytes of dS that the other CTA sends
    "moved": (WARP, False),  # relay to mma: they have come
}
# Where others take columns of S once it has been read: dQ of a pair, half of dP where tiles are serial.
TAKEN = {"s_read": (2 * GROUP, False)}  # compute has read S
# What a pair with serial tiles has.
LENT = {"sdq_empty": (GROUP, False)}  # reduce to compute: sdQ has been read, where dS to be sent goes
JOINT = ("p_ready", "ds_ready", "dq_empty", "moved", "s_read")
"""In a pair warps of both CTAs arrive at the leader's."""

TENSOR_MEMORY = ("s_full", "s_read", "p_ready", "dp_full", "ds_ready", "dq_full", "dq_empty", "dv_full", "dk_full")
"""Barriers that hand on what was done in tensor memory, and need tcgen05.fence on both sides; a commit has it built in."""


@dataclass(frozen=True)
class Barriers:
    """The barriers of ``GRAPH``, and those of ``PAIRED``, ``TAKEN`` and ``LENT``, which not every kernel has."""

    k_full: Barrier
    v_full: Barrier
    q_full: Barrier
    q_empty: Barrier
    row_full: Barrier
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
    kt_full: Barrier
    qt_full: Barrier
    qt_empty: Barrier
    dot_full: Barrier
    dot_empty: Barrier
    sent: Barrier
    moved: Barrier
    s_read: Barrier
    sdq_empty: Barrier
    counts: tuple[int, ...]

    @staticmethod
    def allocate(allocator: Any, config: BlackwellBackwardConfig, columns: BackwardColumns) -> Barriers:
        """Shared memory for all of them, in the order of the graph; ``counts`` are the arrivals of each."""
        graph = {**GRAPH, **(PAIRED if config.cta_pair else {}), **(TAKEN if config.cta_pair or columns.serial else {})}
        graph |= LENT if config.cta_pair and columns.serial else {}
        rings = {"row_full": ROW_SLOTS, "dq_full": len(columns.parts), "dq_empty": len(columns.parts)}
        counts = {
            name: [arrivals(count, config.cluster if name in JOINT else 1)] * (rings.get(name, config.stages) if ring else 1)
            for name, (count, ring) in graph.items()
        }
        start = allocator.allocate_array(Int64, sum(map(len, counts.values())))
        barriers, at = dict.fromkeys((*PAIRED, *TAKEN, *LENT), Barrier(start)), 0
        for name, each in counts.items():
            barriers[name] = Barrier(start + at, config.cta_pair and name in JOINT, name in TENSOR_MEMORY)
            at += len(each)
        return Barriers(**barriers, counts=tuple(chain.from_iterable(counts.values())))

    @cute.jit
    def initialise(self, config: cutlass.Constexpr[BlackwellBackwardConfig]) -> None:
        """By one thread, before any other uses them."""
        for i, count in enumerate(self.counts):
            cute.arch.mbarrier_init(self.k_full.start + i, count)
