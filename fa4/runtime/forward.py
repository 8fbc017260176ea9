"""The forward pass on a GPU kernel, whatever executes it: problem class, operands, results, arguments in the kernel's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fa4 import tuning
from fa4.arch import get_arch
from fa4.compiler import get
from fa4.compiler.artifact import Artifact
from fa4.errors import ShapeError
from fa4.problem import AttentionOptions, AttentionProblem
from fa4.runtime.tensors import kernel_operand

Scalar = float | int | None
# Runs the host code of an artifact on input tensors, output tensors and numbers.
Execute = Callable[[Artifact, Sequence[Tensor], Sequence[Tensor], Sequence[Scalar]], None]

MAX_INT32 = (1 << 31) - 1


def attention_forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, arch: str, execute: Execute) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` by the kernel of ``arch``: out (B, Sq, Hq, Dv) in the dtype of q, lse (B, Hq, Sq) float32, both contiguous.

    q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv): float16 or bfloat16, any strides; copied once where a kernel cannot read
    them (see ``kernel_operand``). The kernel is compiled once and served from the cache.

    Raises:
        ShapeError: lengths beyond the kernel's 32-bit indices.
        CompileError, UnsupportedError: there is no kernel for this request.
    """
    batch, seqlen_q, heads = q.shape[:3]
    out = q.new_empty((batch, seqlen_q, heads, v.shape[3]))
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    if seqlen_q + k.shape[1] > MAX_INT32 - 1024 or lse.numel() > MAX_INT32:
        rule = "Sq + Sk and B * Hq * Sq must stay below 2**31"
        raise ShapeError("q", tuple(q.shape), rule, "split the batch")
    bounds = (options.window_left, options.window_right)
    # The forward kernels write every result once, in a fixed order: deterministic or not is the same kernel.
    problem = AttentionProblem.of("forward", q.dtype, (q.shape[3], v.shape[3]), bounds, options.softcap, deterministic=False)
    artifact = get(problem, tuning.config(problem, get_arch(arch)), arch)
    left, right = (None if bound is None else max(-MAX_INT32, min(bound, MAX_INT32)) for bound in bounds)
    scalars = (
        options.softmax_scale,
        options.softcap if problem.softcap else None,
        left if problem.window[0] else None,
        right if problem.window[1] else None,
    )
    execute(artifact, [kernel_operand(x) for x in (q, k, v)], (out, lse), scalars)
    return out, lse
