"""The backward pass on GPU kernels, whatever executes them: before, main and after, with the memory that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from fa4 import tuning
from fa4.compiler import get
from fa4.compiler.artifact import Artifact
from fa4.config import ROW_TILE, BlackwellBackwardConfig, Needed, padded_head_dim
from fa4.kernels.common.dq_layout import BLOCK_ROWS
from fa4.modifier import DeviceFunctions
from fa4.problem import AttentionOptions
from fa4.runtime.forward import Find, Scalar, aux_operands, compiled_for, numbers, options_class
from fa4.runtime.tensors import dense_operand, kernel_operand


class Execute(Protocol):
    """Runs the host code of an artifact, see ``fa4.runtime.virtual.run``."""

    def __call__(
        self,
        artifact: Artifact,
        inputs: tuple[Tensor | None, ...],
        outputs: tuple[Tensor | None, ...],
        scalars: tuple[Scalar, ...],
        aux: Sequence[Tensor] = (),
        *,
        updated: tuple[Tensor | None, ...] = (),
    ) -> None:
        """Tensors that are read, written, and read and written, numbers, and tensors of functions on scores."""


@dataclass(frozen=True)
class Saved:
    """What a backward pass starts from.

    q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), out and dout (B, Sq, Hq, Dv), lse and dlse (B, Hq, Sq) float32, any strides.
    An absent dout or dlse is zero. ``needed`` says which of dq, dk and dv are wanted.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor | None
    dlse: Tensor | None
    needed: tuple[bool, bool, bool] = (True, True, True)


def attention_backward(saved: Saved, options: AttentionOptions, arch: str, execute: Execute, find: Find = get) -> tuple[Tensor | None, ...]:
    """``(dq, dk, dv)`` by the kernels of ``arch``, contiguous, in the dtype of q; None where not needed.

    Three launches: row sums and zeros; the main kernel, compiled for what is needed; and, where dq is, its sums in dq's dtype. Beside the
    results they use 4 bytes * B * Hq * Sq rounded up to 128 * 2, where dq is needed * (D rounded up to 16 + 2), and then in deterministic
    mode B * Hq * Sq / 8 bytes for semaphores, which the first launch resets. An operand that a kernel cannot read, and an expanded dout, is
    copied once.

    Raises:
        CompileError, UnsupportedError: there is no kernel for this request.
    """
    functions: DeviceFunctions = (None, None)
    if options.modifiers is not None:
        options.modifiers.check_derivative()
        functions = options.modifiers.functions_for("backward")
    q, k, v = saved.q, saved.k, saved.v
    batch, seqlen, heads, head_dim = q.shape
    needed = Needed(*saved.needed)
    if not needed.names:
        return None, None, None
    if batch * seqlen * k.shape[1] == 0:
        dq, dk, dv = (x.new_zeros(x.shape) if need else None for x, need in zip((q, k, v), saved.needed, strict=True))
        return dq, dk, dv
    dout = q.new_zeros(saved.out.shape) if saved.dout is None else dense_operand(saved.dout)
    ordered = options.deterministic and needed.dq
    rounded, columns = -(-seqlen // ROW_TILE) * ROW_TILE, padded_head_dim(head_dim)
    statistics = q.new_empty((batch, heads, 2 * rounded), dtype=torch.float32)
    rows = batch * heads * rounded
    sums, blocks = rows * columns * needed.dq, rows // BLOCK_ROWS * ordered
    zeros = q.new_empty(sums + blocks, dtype=torch.float32)
    dq_sums, rest = zeros.split_with_sizes((sums, blocks))
    semaphores = rest.view(torch.int32).view(batch, heads, rounded // BLOCK_ROWS) if ordered else None

    # Only sums of dq depend on the order of CTAs: without them both modes share a kernel.
    target = arch, tuning.LONG
    problem, full = compiled_for("backward", q.dtype, (head_dim, v.shape[3]), options_class(options), target, ordered, functions)
    config = _restricted(full, needed)
    before, after = tuning.around_backward(problem, saved.dlse is not None)
    execute(find(*before, arch), (kernel_operand(saved.out), dout, saved.lse, saved.dlse), (statistics, zeros), ())

    dk, dv = (x.new_empty(x.shape) if need else None for x, need in zip((k, v), saved.needed[1:], strict=True))
    operands = kernel_operand(q), kernel_operand(k), kernel_operand(v), dout
    updated = dq_sums.view(batch, heads, rounded, columns) if needed.dq else None, semaphores
    read, aux = (*operands, statistics), aux_operands(options)
    execute(find(problem, config, arch), read, (dk, dv), numbers(problem, options), aux, updated=updated)

    dq = None
    if needed.dq:
        dq = q.new_empty(q.shape)
        execute(find(*after, arch), (dq_sums,), (dq,), (options.softmax_scale,))
    return dq, dk, dv


@lru_cache(maxsize=256)
def _restricted(config: tuning.KernelConfig, needed: Needed) -> tuning.KernelConfig:
    """The configuration of a kernel that computes these gradients alone; made once, so that a call finds its kernel at once."""
    return replace(config, needed=needed) if isinstance(config, BlackwellBackwardConfig) else config
