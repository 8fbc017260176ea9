"""The ops of attention with user functions on scores: as ``fa4.ops.attention``, with the names of registered functions and their tensors.

Ops of their own, since a list of tensors in a schema doubles what a call costs where autograd is on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4.modifier import MaskMod, Modifiers, ScoreMod, find
from fa4.ops import attention
from fa4.problem import AttentionOptions
from fa4.runtime import cuda
from fa4.runtime.backward import Saved

_MODIFIERS = "str? score_mod, str? mask_mod, Tensor[] aux"
_library = attention.library
_library.define(f"modified_attention_forward(Tensor q, Tensor k, Tensor v, {_MODIFIERS}, {attention.OPTIONS}) -> (Tensor out, Tensor lse)")
_library.define(
    "modified_attention_backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool[] needed, "
    f"{_MODIFIERS}, {attention.OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)"
)


def _options(q: Tensor, score_mod: str | None, mask_mod: str | None, aux: list[Tensor], *options: Any) -> AttentionOptions:
    """Names are looked up as the op runs: a graph may have been made by another process.

    Raises:
        ArgumentError: a name is not registered here.
    """
    score = None if score_mod is None else find("score_mod", score_mod, ScoreMod)
    mask = None if mask_mod is None else find("mask_mod", mask_mod, MaskMod)
    return attention.options_of(q, *options)._replace(modifiers=Modifiers(score, mask, tuple(aux)))


def _forward_cpu(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *options, backend, arch = arguments
    return attention.forward_cpu(q, k, v, _options(q, *options), backend, arch)


def _forward_cuda(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *options, _backend, arch = arguments
    return cuda.attention_forward(q, k, v, _options(q, *options), arch)


def _backward_cpu(dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, needed, *options, backend, arch = rest
    saved = Saved(q, k, v, out, lse, dout, dlse, tuple(needed))
    return attention.backward_cpu(saved, _options(q, *options), backend, arch)


def _backward_cuda(dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, needed, *options, _backend, arch = rest
    saved = Saved(q, k, v, out, lse, dout, dlse, tuple(needed))
    return attention.backward_cuda(saved, _options(q, *options), arch)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.names, aux = inputs[:6]
    ctx.options = inputs[6:]
    ctx.save_for_backward(q, k, v, *output, *aux)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    needed = list(ctx.needs_input_grad[:3])
    q, k, v, out, lse, *aux = ctx.saved_tensors
    nothing = (None, None, [None] * len(aux), *(None,) * len(ctx.options))
    if dout is None and dlse is None:
        return (None, None, None, *nothing)
    saved = (q, k, v, out, lse)
    gradients = torch.ops.fa4.modified_attention_backward(dout, dlse, *saved, needed, *ctx.names, aux, *ctx.options)
    return (*(gradient if need else None for gradient, need in zip(gradients, needed, strict=True)), *nothing)


attention.register("modified_attention", (_forward_cpu, _forward_cuda, _backward_cpu, _backward_cuda), (_differentiate, _save))

modified_attention_forward = torch.ops.fa4.modified_attention_forward.default
