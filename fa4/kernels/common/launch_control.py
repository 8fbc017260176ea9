"""Cluster launch control: taking the place of clusters that have not started (PTX ISA 9.7.13.18, clusterlaunchcontrol)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

ANSWER_BYTES = 16

# Of a request that failed the first CTA may not be asked for.
_READ = (
    "{ .reg .b64 low, high; .reg .b128 answer; .reg .pred found; "
    "ld.shared.v2.b64 {low, high}, [{$r0}]; mov.b128 answer, {low, high}; "
    "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 found, answer; mov.b32 {$w0}, -1; "
    "@found clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 {$w0}, answer; }"
)


@cute.jit
def ask(answer: cute.Pointer, full: cute.Pointer, cluster: cutlass.Constexpr[int]) -> None:
    """Cancel the launch of a cluster that has not started; the answer goes to all CTAs of this one. For one elected thread.

    ``full``, in each CTA, is told of the 16 bytes of ``answer``. No request may follow one that failed.
    """
    cute.arch.issue_clc_query(full, answer, multicast=cluster > 1)


@cute.jit
def read_answer(answer: Int32) -> Int32:
    """The index in x of the first CTA of the cluster whose launch was cancelled; -1 where there was none left."""
    return cute.arch.inline_ptx(_READ, write_only_types=[Int32], read_only_args=[answer])
