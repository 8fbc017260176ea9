"""Plain torch attention in the dtype of its inputs: its error against float64 sets the scale of what a kernel may deviate."""

from __future__ import annotations

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
    """``(out, lse)`` with every product rounded to the input dtype; differentiable; the N x N scores are materialised.

    q ``(B, Sq, Hq, D)``, k ``(B, Sk, Hkv, D)``, v ``(B, Sk, Hkv, Dv)``; out ``(B, Sq, Hq, Dv)`` in the same dtype, lse
    ``(B, Hq, Sq)`` float32. The softmax itself runs in float32, as torch's 16-bit softmax does.
    """
    group = q.shape[2] // max(k.shape[2], 1)
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q * scale, k)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    left, right = normalise_window(window_size, causal)
    key = torch.arange(k.shape[1], device=q.device)
    diagonal = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    if left is not None:
        visible &= key >= diagonal - left
    if right is not None:
        visible &= key <= diagonal + right
    empty = ~visible.any(dim=1, keepdim=True)
    scores = scores.float().masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores.masked_fill(empty, 0.0), dim=3).masked_fill(empty[:, 0], -torch.inf)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), dim=3).masked_fill(empty, 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights.to(v.dtype), v), lse
