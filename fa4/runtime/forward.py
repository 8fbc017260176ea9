"""The forward pass on a GPU kernel, whatever executes it: problem class, operands, results, arguments in the kernel's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fa4 import tuning
from fa4.arch import get_arch
from fa4.compiler import get
from fa4.compiler.artifact import Artifact
from fa4.errors import ShapeError
from fa4.modifier import DeviceFunctions
from fa4.problem import AttentionOptions, AttentionProblem, Direction
from fa4.runtime.tensors import aux_operand, kernel_operand

Scalar = float | int | None
# Runs the host code of an artifact on input tensors, output tensors, numbers and the tensors of user functions.
Execute = Callable[[Artifact, Sequence[Tensor], Sequence[Tensor], Sequence[Scalar], Sequence[Tensor]], None]

Find = Callable[[AttentionProblem, Any, str], Artifact]
"""What a problem, a configuration and an architecture are compiled to, as ``fa4.compiler.get``."""

MAX_INT32 = (1 << 31) - 1


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, arch: str, execute: Execute, find: Find = get
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` by the kernel of ``arch``: out (B, Sq, Hq, Dv) in the dtype of q, lse (B, Hq, Sq) float32, both contiguous.

    q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv): float16 or bfloat16, any strides; copied once where a kernel cannot read
    them (see ``kernel_operand``). The kernel is compiled once and served from the cache.

    Raises:
        ShapeError: lengths beyond the kernel's 32-bit indices.
        CompileError, UnsupportedError: there is no kernel for this request.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    _, seqlen_k, heads_kv, head_dim_v = v.shape
    out = q.new_empty((batch, seqlen_q, heads, head_dim_v))
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    rows = batch * heads * seqlen_q
    if rows == 0:
        return out, lse
    if seqlen_q + seqlen_k > MAX_INT32 - 1024 or rows > MAX_INT32:
        rule = "Sq + Sk and B * Hq * Sq must stay below 2**31"
        raise ShapeError("q", tuple(q.shape), rule, "split the batch")
    target = arch, tuning.Queries.of(seqlen_q, heads // heads_kv)
    modifiers = options.modifiers
    functions = modifiers.functions if modifiers else (None, None)
    problem, config = compiled_for("forward", q.dtype, (head_dim, head_dim_v), options_class(options), target, functions=functions)
    inputs = kernel_operand(q), kernel_operand(k), kernel_operand(v)
    aux = aux_operands(options)
    execute(find(problem, config, arch), inputs, (out, lse), numbers(problem, options), aux)
    return out, lse


def aux_operands(options: AttentionOptions) -> list[Tensor]:
    """The tensors of a call's functions on scores, as kernels read them."""
    return [aux_operand(x) for x in options.modifiers.aux] if options.modifiers else []


def options_class(options: AttentionOptions) -> tuple[tuple[int | None, int | None], bool]:
    """What a kernel knows of the options when it is compiled: which bounds there are, if the right one is 0, and if there is a softcap."""
    left, right = options.window_left, options.window_right
    return (None if left is None else 1, right and 1), options.softcap > 0


def numbers(problem: AttentionProblem, options: AttentionOptions) -> tuple[Scalar, ...]:
    """The numbers of a call, in the order of a kernel's arguments; absent ones None."""
    left, right = options.window_left, options.window_right
    return (
        options.softmax_scale,
        options.softcap if problem.softcap else None,
        None if left is None else max(-MAX_INT32, min(left, MAX_INT32)),
        max(-MAX_INT32, min(right, MAX_INT32)) if right else None,  # 0 is compiled in
    )


@lru_cache(maxsize=1024)
def compiled_for(
    direction: Direction,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    options: tuple[tuple[int | None, int | None], bool],
    target: tuple[str, tuning.Queries],
    deterministic: bool = False,
    functions: DeviceFunctions = (None, None),
) -> tuple[AttentionProblem, Any]:
    """Problem class and configuration of a request; ``options`` as ``options_class`` has them, ``target`` (arch, queries).

    Forward kernels write every result once, in a fixed order: deterministic or not is the same kernel.
    """
    (bounds, softcap), (arch, queries) = options, target
    problem = AttentionProblem.of(direction, dtype, head_dims, bounds, float(softcap), deterministic, functions)
    return problem, tuning.config(problem, get_arch(arch), queries)
