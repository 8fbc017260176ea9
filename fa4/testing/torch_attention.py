"""Plain torch attention in the dtype of its inputs: its error against float64 sets the scale of what a kernel may deviate.

Its backward is the one that every attention kernel computes, from the saved out and lse (FlashAttention-2, arXiv 2307.08691, Algorithm
2), written with whole matrices. Autograd through a softmax would be the wrong yardstick: where a row sees one key, for
example, it gives exactly 0, and no kernel that recomputes the weights from lse can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4.cpu.modifier import Indices, modify, score_gradient
from fa4.modifier import MaskMod, Modifiers, ScoreMod
from fa4.problem import WindowSize, normalise_window
from fa4.testing.modifier import bound


def torch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float = 0.0,
    score_mod: ScoreMod | str | None = None,
    mask_mod: MaskMod | str | None = None,
    aux: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` with weights, out and gradients rounded to the input dtype; differentiable; N x N scores are materialised.

    q ``(B, Sq, Hq, D)``, k ``(B, Sk, Hkv, D)``, v ``(B, Sk, Hkv, Dv)``; out ``(B, Sq, Hq, Dv)`` in the same dtype, lse
    ``(B, Hq, Sq)`` float32. Scores and softmax are float32, as in a kernel that accumulates in float32.
    """
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = normalise_window(window_size, causal)
    key = torch.arange(k.shape[1], device=q.device)
    diagonal = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    hidden = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    if left is not None:
        hidden |= key < diagonal - left
    if right is not None:
        hidden |= key > diagonal + right
    rule = _Rule(hidden, float(scale), float(softcap), bound(score_mod, mask_mod, aux))
    differentiable: Callable[..., tuple[Tensor, Tensor]] = _TorchAttention.apply
    return differentiable(q, k, v, rule)


@dataclass(frozen=True)
class _Rule:
    """How scores come from products; ``hidden`` (Sq, Sk)."""

    hidden: Tensor
    scale: float
    softcap: float
    modifiers: Modifiers | None

    @staticmethod
    def indices(scores: Tensor) -> Indices:
        """What functions on scores (B, H, Sq, Sk) are told."""
        ranges = (torch.arange(size, device=scores.device) for size in scores.shape)
        return Indices(*(each.view([-1 if i == axis else 1 for i in range(4)]) for axis, each in enumerate(ranges)))


class _TorchAttention(torch.autograd.Function):
    """Attention with equal head counts and a mask, and its backward from out and lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rule: _Rule) -> tuple[Tensor, Tensor]:
        weights, _, lse = _weights(q, k, rule, None)
        out = torch.einsum("bhij,bjhd->bihd", weights.to(v.dtype), v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rule = rule
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rule = ctx.rule
        weights, capped, _ = _weights(q, k, rule, lse)
        dweights = torch.einsum("bihd,bjhd->bhij", dout, v).float()
        delta = (out.float() * dout.float()).sum(3).transpose(1, 2) - dlse
        dscores = weights * (dweights - delta[..., None])
        if rule.modifiers is not None:
            dscores = score_gradient(dscores, capped, rule.indices(capped), rule.modifiers)
        if rule.softcap:
            dscores = dscores * (1 - (capped / rule.softcap) ** 2)
        dscores = (dscores * rule.scale).to(q.dtype)
        dq = torch.einsum("bhij,bjhd->bihd", dscores, k)
        dk = torch.einsum("bhij,bihd->bjhd", dscores, q)
        dv = torch.einsum("bhij,bihd->bjhd", weights.to(v.dtype), dout)
        return dq, dk, dv, None


def _weights(q: Tensor, k: Tensor, rule: _Rule, lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 softmax weights, scaled and capped scores, and lse, which is computed where it is not given."""
    capped = torch.einsum("bihd,bjhd->bhij", q.float() * rule.scale, k.float())
    if rule.softcap:
        capped = torch.tanh(capped / rule.softcap) * rule.softcap
    scores = capped
    if rule.modifiers is not None:
        scores = modify(capped.clone(), rule.indices(capped), rule.modifiers)
    scores = scores.masked_fill(rule.hidden, -torch.inf)
    if lse is None:
        # The sum is over weights as the product with v sees them, rounded to the input dtype.
        top = torch.amax(scores, dim=3, keepdim=True) if scores.shape[3] else scores.new_full((*scores.shape[:3], 1), -torch.inf)
        top = top.masked_fill(top == -torch.inf, 0.0)
        lse = top[..., 0] + torch.exp(scores - top).to(q.dtype).float().sum(dim=3).log()
    finite = lse.masked_fill(lse == -torch.inf, 0.0)  # -inf - 0 gives weight 0 where a row sees nothing; -inf - -inf is NaN
    return torch.exp(scores - finite[..., None]), capped, lse
