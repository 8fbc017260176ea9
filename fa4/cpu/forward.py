"""Forward attention on CPU tensors."""
from __future__ import annotations

import torch
from torch import Tensor

from fa4.cpu.tiles import TILE_KEYS, TILE_ROWS, Band, Pairs, pairs_of, scores, split
from fa4.problem import AttentionOptions


def tiled_forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    band = Band.of(rows, k.shape[1], options)
    out = q.new_empty(batch, rows, heads, v.shape[3])
    lse = torch.empty(batch, heads, rows)
    for dead in (slice(0, band.live.start), slice(band.live.stop, None)):
        out[:, dead] = 0
        lse[:, :, dead] = float("-inf")
    group = heads // k.shape[2]
    row_step = max(1, TILE_ROWS // group)
    r = min(row_step, rows) * group
    t = min(TILE_KEYS, k.shape[1])
    width = max(q.shape[3], v.shape[3])
    elements = max(r * t, r * width, t * width)
    for pairs in pairs_of(q, k, max(elements, 1), options.deterministic):
        for at in split(band.live, row_step):
            _rows(pairs, at, band, (q, k, v), options, out, lse)
    return out, lse


def _rows(pairs: Pairs, at: range, band: Band, qkv, options, out, lse) -> None:
    q, k, v = qkv
    qt = pairs.load(q, at)
    total = top = acc = None
    for keys in split(band.visible(at), TILE_KEYS):
        s = scores(qt, pairs.load_keys(k, keys), band.hidden(at, keys), options)
        vt = pairs.load_keys(v, keys)
        # A row whose keys of this tile are all hidden keeps a finite maximum, hence no NaN.
        new = s.amax(2, keepdim=True)
        if acc is None:
            new.clamp_(min=torch.finfo(torch.float32).min)
            s.sub_(new).exp_()
            total = s.sum(2, keepdim=True)
            acc = torch.bmm(s, vt)
        else:
            torch.maximum(new, top, out=new)
            fade = top.sub_(new).exp_()
            s.sub_(new).exp_()
            total.mul_(fade).add_(s.sum(2, keepdim=True))
            acc.mul_(fade).baddbmm_(s, vt)
        top = new
    pairs.store(out, at, acc.div_(total))
    pairs.store(lse.transpose(1, 2).unsqueeze(3), at, total.log_().add_(top))
