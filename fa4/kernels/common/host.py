"""What every kernel's host entry has in common: the call's tensors and numbers, and the kernel's stable name."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from fa4.config import Needed, padded_head_dim
from fa4.kernels.common.mask import band_limits
from fa4.kernels.common.modifier import aux_arguments
from fa4.problem import AttentionProblem

DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}
SHORT = {"float16": "f16", "bfloat16": "bf16"}


class Limits(NamedTuple):
    """Bounds of the visible keys, see ``fa4.kernels.common.mask``; None where a side is open."""

    left: Int32 | None
    right: Int32 | None


@cute.jit
def call_limits(
    problem: cutlass.Constexpr[AttentionProblem],
    seqlens: tuple[Int32, Int32],
    window_left: Int32 | None,
    window_right: Int32 | None,
) -> Limits:
    """The limits of a call with lengths (Sq, Sk); ``problem.causal`` stands for a right bound of 0, and cuts a given one to 0."""
    right = window_right
    if const_expr(problem.causal):
        right = Int32(0) if const_expr(window_right is None) else cutlass.min(window_right, 0)
    return Limits(*band_limits(*seqlens, window_left, right))


def kernel_name(family: str, problem: AttentionProblem, suffix: str) -> str:
    """Stable name of a device function, without the suffix that the DSL adds."""
    parts = [f"fa4_{family}_{problem.direction}", SHORT[problem.dtype], f"d{problem.head_dim}"]
    if problem.head_dim_v != problem.head_dim:
        parts.append(f"dv{problem.head_dim_v}")
    parts += [
        word
        for word, present in (
            ("causal", problem.causal),
            ("left", problem.window[0]),
            ("right", problem.window[1]),
            ("softcap", problem.softcap),
            ("scoremod", problem.score_mod is not None),
            ("maskmod", problem.mask_mod is not None),
        )
        if present
    ]
    return "_".join([*parts, suffix])


def forward_arguments(problem: AttentionProblem) -> tuple[Any, ...]:
    """Arguments for ``cute.compile``: tensors of dynamic lengths and strides, the head dims static, absent numbers None."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv = (cute.sym_int() for _ in range(5))
    dtype, d, dv = DTYPES[problem.dtype], problem.head_dim, problem.head_dim_v
    lse = make_fake_tensor(Float32, (batch, heads_q, seqlen_q), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)
    return (
        _operand(dtype, (batch, seqlen_q, heads_q, d)),
        _operand(dtype, (batch, seqlen_k, heads_kv, d)),
        _operand(dtype, (batch, seqlen_k, heads_kv, dv)),
        _operand(dtype, (batch, seqlen_q, heads_q, dv)),
        lse,
        *_numbers(problem),
    )


def backward_arguments(problem: AttentionProblem, needed: Needed) -> tuple[Any, ...]:
    """Likewise for the main kernel of a backward pass: q, k, v, dout, statistics of rows, dq accumulator, semaphores, dk, dv, numbers.

    What only gradients have that are not ``needed`` is None.
    """
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, rows = (cute.sym_int() for _ in range(6))
    dtype, d, dv = DTYPES[problem.dtype], problem.head_dim, problem.head_dim_v

    def compact(element: Any, *shape: Any) -> Any:
        return make_fake_compact_tensor(element, shape, stride_order=tuple(range(len(shape)))[::-1], assumed_align=16)

    return (
        _operand(dtype, (batch, seqlen_q, heads_q, d)),
        _operand(dtype, (batch, seqlen_k, heads_kv, d)),
        _operand(dtype, (batch, seqlen_k, heads_kv, dv)),
        _operand(dtype, (batch, seqlen_q, heads_q, dv)),
        compact(Float32, batch, heads_q, cute.sym_int()),
        compact(Float32, batch, heads_q, rows, padded_head_dim(d)) if needed.dq else None,
        compact(Int32, batch, heads_q, cute.sym_int()) if needed.dq and problem.deterministic else None,
        _operand(dtype, (batch, seqlen_k, heads_kv, d)) if needed.dk else None,
        _operand(dtype, (batch, seqlen_k, heads_kv, dv)) if needed.dv else None,
        *_numbers(problem),
    )


def _operand(dtype: Any, shape: tuple[Any, ...]) -> Any:
    """A tensor (B, S, H, D) of any strides but the last."""
    strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=16)


def _numbers(problem: AttentionProblem) -> tuple[Any, ...]:
    """Scale, softcap, window bounds, stream, tensors of functions on scores."""
    return (
        Float32(1.0),
        Float32(1.0) if problem.softcap else None,
        Int32(0) if problem.window[0] else None,
        Int32(0) if problem.window[1] else None,
        make_fake_stream(),
        *aux_arguments(problem),
    )
