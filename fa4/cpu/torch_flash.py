"""torch's CPU flash attention, for the requests where it is right, fast and small.

``aten::_scaled_dot_product_flash_attention_for_cpu`` knows no window, no softcap and one head dimension; its causal mask is aligned
top-left, so only square causal problems fit; it scales masked scores, -inf by then, so the scale must be positive; and its rounding
depends on what else is in the batch, so deterministic requests are not for it.

16-bit types are computed in float32 where that is better: its float16 products are emulated on most CPUs, and its backward adds up
gradients in the type of the inputs, one rounding per block of rows, which leaves this project's error bound. Query heads that share
a key head see it through a stride of 0: nothing is repeated in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa4.cpu.tiles import Band, Gradients, Needed, Pairs, Saved, blocks, by_row
from fa4.problem import AttentionOptions

# Temporaries of one call into torch. Its own tiles, about 1 MB per thread, come on top.
EXTRA_BYTES = 32 << 20

# Below this many keys its maximum of a row of NaN is not NaN, and such a row comes out as 0.
MIN_KEYS = 16

_aten = torch.ops.aten


def fits_forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    """Whether ``forward`` serves the request within its memory."""
    return _fits(q, k, v, options) and (_whole_forward(q, k, v) or _forward_bytes(q, k) <= EXTRA_BYTES)


def fits_backward(saved: Saved, options: AttentionOptions, needed: Needed) -> bool:
    """Whether ``backward`` serves the request within its memory and with work for every thread."""
    q, k = saved.q, saved.k
    if saved.dlse is not None or not _fits(q, k, saved.v, options):
        return False
    if _in_one_call(q, k, saved.v):
        unwanted = sum(_bytes(x) for x, need in zip((q, k, saved.v), needed, strict=True) if not need)
        return unwanted + (0 if saved.dout.is_contiguous() else _bytes(saved.dout)) <= EXTRA_BYTES
    busy = min(k.shape[0] * k.shape[2], EXTRA_BYTES // _backward_bytes(q, k)) * (q.shape[2] // k.shape[2])
    return busy >= min(torch.get_num_threads(), q.shape[0] * q.shape[2])


def _fits(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    band = Band.of(q.shape[1], k.shape[1], options)
    return (
        q.shape[3] == v.shape[3]
        and q.numel() > 0
        and k.shape[1] >= MIN_KEYS
        and (band.full or band.square_causal)
        and not options.softcap
        and not options.deterministic
        and options.softmax_scale > 0
        # Its matrix products read rows of a unit stride that do not overlap.
        and all(x.stride(3) == 1 and x.stride(1) >= x.shape[3] for x in (q, k, v))
    )


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _forward_bytes(q: Tensor, k: Tensor) -> int:
    """Temporaries per (batch, key head): out and lse; float32 copies for float16; k and v reordered for bfloat16 products."""
    (rows, dim), keys, group = (q.shape[1], q.shape[3]), k.shape[1], q.shape[2] // k.shape[2]
    if q.dtype == torch.float16:
        return 4 * dim * (2 * group * rows + 2 * keys) + 4 * group * rows
    packed = 2 * keys if q.dtype == torch.bfloat16 else 0
    return q.element_size() * group * dim * (rows + packed) + 4 * group * rows


def _backward_bytes(q: Tensor, k: Tensor) -> int:
    """Temporaries per (batch, key head), in float32: q, dout, out, dq; k and v; dk and dv of every query head, and a sum of them."""
    group = q.shape[2] // k.shape[2]
    return 4 * q.shape[3] * (4 * group * q.shape[1] + (2 * group + 3) * k.shape[1])


def _whole_forward(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether one call returns the result itself; its lse has other strides and is copied."""
    return _in_one_call(q, k, v) and 4 * q.numel() // q.shape[3] <= EXTRA_BYTES


def _in_one_call(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the tensors that torch returns for all pairs are the results themselves.

    They have the order of strides of q, k and v, so that must be the order of a contiguous (B, S, H, D).
    """
    ordered = all(x.stride(0) >= x.stride(1) >= x.stride(2) for x in (q, k, v))
    return q.dtype == torch.float32 and q.shape[2] == k.shape[2] and ordered


def _blocks(q: Tensor, k: Tensor, each: int) -> tuple[int, list[Pairs]]:
    """The calls to make, ``each`` being the bytes of temporaries that a pair needs, and the dimension that they drop.

    torch takes four dimensions and a block has five, (batches, key heads, group, S, D), so one of the first three has size 1.
    """
    (batch, heads), group = (k.shape[0], k.shape[2]), q.shape[2] // k.shape[2]
    most = max(1, EXTRA_BYTES // each)
    if group == 1:
        return 2, list(blocks(batch, heads, group, (max(1, most // heads), most)))
    return (1, list(blocks(batch, heads, group, (most, 1)))) if batch >= heads else (0, list(blocks(batch, heads, group, (1, most))))


def _everything(k: Tensor) -> Pairs:
    return Pairs(slice(0, k.shape[0]), slice(0, k.shape[2]), 1)


def _operand(pairs: Pairs, x: Tensor, call: tuple[int, int, torch.dtype]) -> Tensor:
    """The block's part of (B, S, H, D) as torch's (., ., S, D) in the call's dtype; a view where x has that dtype already."""
    group, drop, dtype = call
    return pairs.view(x).transpose(2, 3).to(dtype).expand(-1, -1, group, -1, -1).select(drop, 0)


def forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """``fa4.cpu.forward.attention_forward`` where ``fits_forward`` holds."""
    causal = not Band.of(q.shape[1], k.shape[1], options).full
    dtype = torch.float32 if q.dtype == torch.float16 else q.dtype
    if _whole_forward(q, k, v):
        views = (x.transpose(1, 2) for x in (q, k, v))
        out_part, lse_part = _aten._scaled_dot_product_flash_attention_for_cpu(*views, 0.0, causal, scale=options.softmax_scale)
        return out_part.transpose(1, 2).contiguous(), lse_part.contiguous()
    drop, calls = _blocks(q, k, _forward_bytes(q, k))
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[0], q.shape[2], q.shape[1])
    for pairs in calls:
        call = pairs.group, drop, dtype
        operands = (_operand(side, x, call) for side, x in ((pairs, q), (pairs.keys, k), (pairs.keys, v)))
        out_part, lse_part = _aten._scaled_dot_product_flash_attention_for_cpu(*operands, 0.0, causal, scale=options.softmax_scale)
        if pairs.group == 1 and len(calls) == 1:
            return out_part.transpose(1, 2).to(q.dtype).contiguous(), lse_part.contiguous()
        pairs.view(out).transpose(2, 3).select(drop, 0).copy_(out_part)
        pairs.view(by_row(lse)).squeeze(4).transpose(2, 3).select(drop, 0).copy_(lse_part)
        del out_part, lse_part  # before the next call allocates its own
    return out, lse


def backward(saved: Saved, options: AttentionOptions, needed: Needed) -> Gradients:
    """``fa4.cpu.backward.attention_backward`` where ``fits_backward`` holds."""
    q, k, v = saved.q, saved.k, saved.v
    if _in_one_call(q, k, v):
        gradients = (x.transpose(1, 2).contiguous() for x in _backward_call(_everything(k), saved, options, 2))
        dq, dk, dv = (x if need else None for x, need in zip(gradients, needed, strict=True))
        return dq, dk, dv
    results = [torch.empty(x.shape, dtype=x.dtype) if need else None for x, need in zip((q, k, v), needed, strict=True)]
    drop, calls = _blocks(q, k, _backward_bytes(q, k))
    for pairs in calls:
        _store(pairs, _backward_call(pairs, saved, options, drop), results)
    dq, dk, dv = results
    return dq, dk, dv


def _store(pairs: Pairs, parts: tuple[Tensor, ...], results: list[Tensor | None]) -> None:
    """Put a block's gradients in their places; the parts are gone before the next call allocates its own."""
    for side, result, part in zip((pairs, pairs.keys, pairs.keys), results, parts, strict=True):
        if result is not None:
            place = side.view(result).transpose(2, 3)
            # Query heads that share a key head add up in its gradient.
            total = part.sum(1) if side.group < pairs.group else part
            place.copy_(total.view(place.shape))


def _backward_call(pairs: Pairs, saved: Saved, options: AttentionOptions, drop: int) -> tuple[Tensor, ...]:
    """Float32 dq, dk, dv of a block as torch returns them, (., ., S, D), with a dk and dv for every query head."""
    causal = not Band.of(saved.q.shape[1], saved.k.shape[1], options).full
    call = pairs.group, drop, torch.float32
    q, dout, out, lse = (_operand(pairs, x, call) for x in (saved.q, saved.dout, saved.out, by_row(saved.lse)))
    k, v = (_operand(pairs.keys, x, call) for x in (saved.k, saved.v))
    return tuple(
        _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse.squeeze(3), 0.0, causal, scale=options.softmax_scale
        )
    )
