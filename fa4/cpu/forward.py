"""Forward attention on CPU tensors: torch's own flash kernel where the request fits it, tiles with an online softmax elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from fa4._settings import current
from fa4.cpu import torch_flash
from fa4.cpu.modifier import Indices, modify
from fa4.cpu.tiles import Band, Pairs, Plan, by_row, hide, scores, split
from fa4.problem import AttentionOptions


def attention_forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Attention of q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv): float16, bfloat16 or float32, any strides.

    Returns ``out`` (B, Sq, Hq, Dv) in the dtype of q and ``lse`` (B, Hq, Sq) float32, the natural logarithm of each row's sum of
    exponentials, of any strides. Rows that see no key have out 0 and lse -inf. Uses at most 64 MB above inputs and outputs and what
    the torch twins of ``options.modifiers`` take for a tile of 2**20 scores.

    Arguments are validated by the caller; nothing is raised for them here. Algorithm: arXiv 2307.08691, Algorithm 1.
    """
    if current().cpu_path == "auto" and torch_flash.fits_forward(q, k, v, options):
        return torch_flash.forward(q, k, v, options)
    return tiled_forward(q, k, v, options)


def tiled_forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """``attention_forward`` for every request, in float32 tiles."""
    batch, rows, heads, _ = q.shape
    band = Band.of(rows, k.shape[1], options)
    out = q.new_empty(batch, rows, heads, v.shape[3])
    lse = torch.empty(batch, heads, rows)
    for dead in (slice(0, band.live.start), slice(band.live.stop, None)):
        out[:, dead] = 0
        lse[:, :, dead] = -torch.inf
    plan = Plan.of(q, k, v, options.deterministic)
    for pairs in plan.pairs:
        for at in split(band.live, plan.row_step):
            acc, total = _attend(pairs, at, (q, k, v), (band, plan.key_step, options))
            pairs.store(out, at, acc)
            pairs.store(by_row(lse), at, total)
    return out, lse


def _attend(
    pairs: Pairs, at: range, inputs: tuple[Tensor, Tensor, Tensor], work: tuple[Band, int, AttentionOptions]
) -> tuple[Tensor, Tensor]:
    """Float32 out (pairs, rows, Dv) and lse (pairs, rows, 1) of one tile of rows."""
    q, k, v = inputs
    band, key_step, options = work
    q_tile = pairs.load(q, at)
    # The maximum starts finite: a row whose keys so far are all hidden then gets exp(-inf - finite) = 0, not NaN.
    top = torch.full((*q_tile.shape[:2], 1), torch.finfo(torch.float32).min)
    total = torch.zeros_like(top)
    acc = torch.zeros(*q_tile.shape[:2], v.shape[3])
    for keys in split(band.visible(at), key_step):
        s = scores(q_tile, pairs.keys.load(k, keys), options)
        if options.modifiers is not None:
            s = modify(s, Indices.of(pairs, at, keys), options.modifiers)
        hide(s, band.hidden(at, keys), -torch.inf)
        new = torch.maximum(top, s.amax(2, keepdim=True))
        fade = top.sub_(new).exp_()
        s.sub_(new).exp_()
        total.mul_(fade).add_(s.sum(2, keepdim=True))
        acc.mul_(fade).baddbmm_(s, pairs.keys.load(v, keys))
        top = new
    acc.div_(total)
    if options.modifiers is not None:
        acc.masked_fill_(total == 0, 0.0)  # rows of the band that a user's function hides
    return acc, total.log_().add_(top)
