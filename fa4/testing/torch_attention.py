"""Plain torch attention in the dtype of its inputs: its error against float64 sets the scale of what a kernel may deviate.

Its backward is the one that every attention kernel computes, from the saved out and lse (FlashAttention-2, arXiv 2307.08691, Algorithm
2), written with whole matrices. Autograd through a softmax would be the wrong yardstick: where a row sees one key, for
example, it gives exactly 0, and no kernel that recomputes the weights from lse can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa4.problem import WindowSize, normalise_window


def torch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float = 0.0,
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
    differentiable: Callable[..., tuple[Tensor, Tensor]] = _TorchAttention.apply
    return differentiable(q, k, v, hidden, float(scale), float(softcap))


class _TorchAttention(torch.autograd.Function):
    """Attention with equal head counts and a mask, and its backward from out and lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
        weights, _, lse = _weights(q, k, hidden, scale, softcap, None)
        out = torch.einsum("bhij,bjhd->bihd", weights.to(v.dtype), v)
        ctx.save_for_backward(q, k, v, hidden, out, lse)
        ctx.scale, ctx.softcap = scale, softcap
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, hidden, out, lse = ctx.saved_tensors
        weights, slope, _ = _weights(q, k, hidden, ctx.scale, ctx.softcap, lse)
        dweights = torch.einsum("bihd,bjhd->bhij", dout, v).float()
        delta = (out.float() * dout.float()).sum(3).transpose(1, 2) - dlse
        dscores = (weights * (dweights - delta[..., None]) * slope * ctx.scale).to(q.dtype)
        dq = torch.einsum("bhij,bjhd->bihd", dscores, k)
        dk = torch.einsum("bhij,bihd->bjhd", dscores, q)
        dv = torch.einsum("bhij,bihd->bjhd", weights.to(v.dtype), dout)
        return dq, dk, dv, None, None, None


def _weights(
    q: Tensor, k: Tensor, hidden: Tensor, scale: float, softcap: float, lse: Tensor | None
) -> tuple[Tensor, Tensor | float, Tensor]:
    """Float32 softmax weights, the slope of the softcap, and lse, which is computed where it is not given."""
    scores = torch.einsum("bihd,bjhd->bhij", q.float() * scale, k.float())
    slope: Tensor | float = 1.0
    if softcap:
        scores = torch.tanh(scores / softcap)
        slope = 1 - scores**2
        scores = scores * softcap
    scores = scores.masked_fill(hidden, -torch.inf)
    if lse is None:
        # The sum is over weights as the product with v sees them, rounded to the input dtype.
        top = torch.amax(scores, dim=3, keepdim=True) if scores.shape[3] else scores.new_full((*scores.shape[:3], 1), -torch.inf)
        top = top.masked_fill(top == -torch.inf, 0.0)
        lse = top[..., 0] + torch.exp(scores - top).to(q.dtype).float().sum(dim=3).log()
    finite = lse.masked_fill(lse == -torch.inf, 0.0)  # -inf - 0 gives weight 0 where a row sees nothing; -inf - -inf is NaN
    return torch.exp(scores - finite[..., None]), slope, lse
