"""Functions on scores with derivatives that read the score, in both forms."""

from __future__ import annotations

import cutlass.cute as cute
import torch

import fa4


@cute.jit
def _bent(score, batch, head, q_index, k_index, weight):
    return score + 0.1 * weight[head, q_index % 3] * score * score


@cute.jit
def _bent_gradient(dscore, score, batch, head, q_index, k_index, weight):
    return dscore * (1.0 + 0.2 * weight[head, q_index % 3] * score)


def _bent_twin(score, batch, head, q_index, k_index, weight):
    return score + 0.1 * weight[head, q_index % 3] * score * score


def _other_twin(score, batch, head, q_index, k_index, weight):
    half = 0.05 * weight[head, q_index % 3] * score * score
    return score + half + half.detach()


@cute.jit
def _bounded(score, batch, head, q_index, k_index):
    return 5.0 * cute.math.tanh(score * 0.2, fastmath=False)


@cute.jit
def _bounded_gradient(dscore, score, batch, head, q_index, k_index):
    tanh = cute.math.tanh(score * 0.2, fastmath=False)
    return dscore * (1.0 - tanh * tanh)


def _bounded_twin(score, batch, head, q_index, k_index):
    return 5.0 * torch.tanh(score * 0.2)


# No number where a query is before the key.
@cute.jit
def _rooted(score, batch, head, q_index, k_index):
    distance = cute.Float32(q_index - k_index)
    return score * cute.math.sqrt(distance, fastmath=False)


@cute.jit
def _rooted_gradient(dscore, score, batch, head, q_index, k_index):
    distance = cute.Float32(q_index - k_index)
    return dscore * distance / cute.math.sqrt(distance, fastmath=False)


def _rooted_twin(score, batch, head, q_index, k_index):
    return score * (q_index - k_index).to(score.dtype).clamp(min=0).sqrt()


BENT = fa4.score_mod("kernel bent", device=_bent, torch=_bent_twin, grad=_bent_gradient, aux={"weight": "float32[Hq, 3]"})
OTHER_TWIN = fa4.score_mod("other twin", device=_bent, torch=_other_twin, grad=_bent_gradient, aux={"weight": "float32[Hq, 3]"})
BOUNDED = fa4.score_mod("kernel bounded", device=_bounded, torch=_bounded_twin, grad=_bounded_gradient)
ROOTED = fa4.score_mod("kernel rooted", device=_rooted, torch=_rooted_twin, grad=_rooted_gradient)
