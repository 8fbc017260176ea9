"""Backward attention on CPU tensors: torch's own flash kernel where the request fits it, tiles elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fa4._settings import current
from fa4.cpu import torch_flash
from fa4.cpu.modifier import Indices, modify, outside_of_ops, score_gradient
from fa4.cpu.tiles import Band, Gradients, Needed, Pairs, Plan, Saved, by_row, hide, scores, split
from fa4.problem import AttentionOptions

# Float32 elements of dk and dv that are summed at a time: 8 MB.
SUM_ELEMENTS = 1 << 21


def attention_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    *,
    needed: Needed = (True, True, True),
) -> Gradients:
    """Gradients of ``sum(out * dout) + sum(lse * dlse)`` with respect to q, k, v, in their dtypes; None where not needed.

    q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), dout and out (B, Sq, Hq, Dv), dlse and lse (B, Hq, Sq) float32; any
    strides; out and lse are those of ``attention_forward``; an absent dout or dlse is zero. Rows that see no key contribute
    nothing, whatever dout and dlse hold there. Uses at most 64 MB above inputs and outputs.

    Arguments are validated by the caller; nothing is raised for them here. Algorithm: arXiv 2307.08691, Algorithm 2.
    """
    if dout is None:
        dout = q.new_zeros(()).expand_as(out)
    saved = Saved(q, k, v, out, lse, dout, dlse)
    if current().cpu_path == "auto" and torch_flash.fits_backward(saved, options, needed):
        return torch_flash.backward(saved, options, needed)
    if options.modifiers is not None and options.modifiers.score is not None:
        return outside_of_ops(tiled_backward, saved, options, needed)
    return tiled_backward(saved, options, needed)


@dataclass(frozen=True)
class _KeyBlock:
    """A range of keys and the float32 sums of their gradients (pairs, keys, D or Dv)."""

    keys: range
    dk: Tensor | None
    dv: Tensor | None

    def part(self, total: Tensor, keys: range) -> Tensor:
        """The rows of a sum that belong to ``keys``."""
        return total[:, keys.start - self.keys.start : keys.stop - self.keys.start]


def tiled_backward(saved: Saved, options: AttentionOptions, needed: Needed) -> Gradients:
    """``attention_backward`` for every request, in float32 tiles.

    For a block of keys, all rows that see it are visited once: dk and dv of the block are summed in float32, and dq is a float32
    sum within the block that is added to its place in the result, once per block.
    """
    q, k, v = saved.q, saved.k, saved.v
    band = Band.of(q.shape[1], k.shape[1], options)
    dq = q.new_zeros(q.shape) if needed[0] else None
    dk, dv = (x.new_empty(x.shape) if need else None for x, need in zip((k, v), needed[1:], strict=True))
    plan = Plan.of(q, k, v, options.deterministic)
    for pairs in plan.pairs:
        count = pairs.count
        step = max(plan.key_step, SUM_ELEMENTS // (count * max(1, q.shape[3] + v.shape[3])))
        for keys in split(range(k.shape[1]), step):
            sums = (torch.zeros(count, len(keys), x.shape[3]) if need else None for x, need in zip((k, v), needed[1:], strict=True))
            block = _KeyBlock(keys, *sums)
            for at in split(band.seeing(keys), plan.row_step):
                dq_tile = _differentiate(pairs, at, block, saved, (band, plan.key_step, options, needed[0]))
                if dq is not None and dq_tile is not None:
                    pairs.add(dq, at, dq_tile)
            for result, total in ((dk, block.dk), (dv, block.dv)):
                if result is not None and total is not None:
                    pairs.keys.store(result, keys, total)
    return dq, dk, dv


def _differentiate(
    pairs: Pairs, at: range, block: _KeyBlock, saved: Saved, work: tuple[Band, int, AttentionOptions, bool]
) -> Tensor | None:
    """Add one tile of rows to the block's dk and dv; returns its share of dq in float32 (pairs, rows, D) where that is needed."""
    band, key_step, options, need_dq = work
    q, dout = pairs.load(saved.q, at), pairs.load(saved.dout, at)
    lse = pairs.load(by_row(saved.lse), at)
    modifiers = options.modifiers
    if modifiers is not None:  # rows of the band that a user's function hides
        hidden = lse == -torch.inf
        lse.masked_fill_(hidden, torch.inf)
        dout.masked_fill_(hidden, 0.0)
    delta = pairs.load(saved.out, at).mul_(dout).sum(2, keepdim=True)
    if saved.dlse is not None:
        delta.sub_(pairs.load(by_row(saved.dlse), at))
    if modifiers is not None:
        delta.masked_fill_(hidden, 0.0)
    dq = torch.zeros_like(q) if need_dq else None
    visible = band.visible(at)
    for keys in split(range(max(visible.start, block.keys.start), min(visible.stop, block.keys.stop)), key_step):
        k = pairs.keys.load(saved.k, keys)
        s = scores(q, k, options)
        # d tanh(x) = 1 - tanh(x)^2, from the capped scores before they turn into P.
        slope = s.div(options.softcap).square_().neg_().add_(1) if options.softcap else None
        if modifiers is not None:
            indices, before = Indices.of(pairs, at, keys), s
            s = modify(s.clone(), indices, modifiers)
        p = s.sub_(lse).exp_()
        hide(p, band.hidden(at, keys), 0.0)
        if block.dv is not None:
            block.part(block.dv, keys).baddbmm_(p.transpose(1, 2), dout)
        if dq is None and block.dk is None:
            continue
        ds = torch.bmm(dout, pairs.keys.load(saved.v, keys).transpose(1, 2)).sub_(delta).mul_(p)
        if modifiers is not None:
            ds = score_gradient(ds, before, indices, modifiers)
        if slope is not None:
            ds.mul_(slope)
        if dq is not None:
            dq.baddbmm_(ds, k, alpha=options.softmax_scale)
        if block.dk is not None:
            block.part(block.dk, keys).baddbmm_(ds.transpose(1, 2), q, alpha=options.softmax_scale)
    return dq
