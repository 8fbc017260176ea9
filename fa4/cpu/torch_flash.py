"""torch's CPU flash attention, for the requests where it is right, fast and small.

``aten::_scaled_dot_product_flash_attention_for_cpu`` knows no window, no softcap, no user function and one head dimension; its
causal mask is aligned top-left, so only square causal problems fit; it scales masked scores, -inf by then, so the scale must be
positive; and its rounding depends on what else is in the batch, so deterministic requests are not for it.

16-bit types are computed in float32 where that is better: its float16 products are emulated where the CPU has none (no AVX512-FP16), and
its backward adds up gradients in the type of the inputs, one rounding per block of rows, which leaves this project's error bound. Grouped
heads are for torch 2.9 and newer: before, the kernel read past the end of k and v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fa4.cpu.tiles import Band, Gradients, Needed, Pairs, Saved, blocks, by_row
from fa4.problem import AttentionOptions

# Temporaries of one call into torch. Its own tiles, about 1 MB per thread, come on top.
EXTRA_BYTES = 32 << 20

# Below this many keys its maximum of a row of NaN is not NaN, and such a row comes out as 0.
MIN_KEYS = 16

_GROUPS = torch.__version__ >= "2.9"  # compares as versions do, not as text

# Older releases cannot tell what the CPU has.
_FLOAT16_PRODUCTS = bool(torch.cpu.get_capabilities().get("avx512_fp16")) if hasattr(torch.cpu, "get_capabilities") else False

_flash: Any = torch._scaled_dot_product_flash_attention_for_cpu  # the binding: a call through torch.ops costs more
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def fits_forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    """Whether ``forward`` serves the request within its memory."""
    return _fits(q, k, v, options) and (_forward_bytes(q, k) <= EXTRA_BYTES or _whole_forward(q, k, v))


def fits_backward(saved: Saved, options: AttentionOptions, needed: Needed) -> bool:
    """Whether ``backward`` serves the request within its memory, and with as much work at a time as torch has threads."""
    q, k = saved.q, saved.k
    if saved.dlse is not None or not _fits(q, k, saved.v, options):
        return False
    if _in_one_call(q, k, saved.v):
        unwanted = sum(_bytes(x) for x, need in zip((q, k, saved.v), needed, strict=True) if not need)
        return unwanted + (0 if saved.dout.is_contiguous() else _bytes(saved.dout)) <= EXTRA_BYTES
    return EXTRA_BYTES // _backward_bytes(q, k) >= min(torch.get_num_threads(), k.shape[0] * k.shape[2])


def _fits(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    (_, _, heads_q, head_dim), (_, seqlen_k, heads_k, _) = q.shape, k.shape
    return (
        v.shape[3] == head_dim
        and q.numel() > 0
        and seqlen_k >= MIN_KEYS
        and _is_causal(q, k, options) is not None
        and not options.softcap
        and options.modifiers is None
        and not options.deterministic
        and options.softmax_scale > 0
        and (_GROUPS or heads_q == heads_k)
        # Its matrix products read rows of a unit stride that do not overlap.
        and all(last == 1 and row >= head_dim for _, row, _, last in (q.stride(), k.stride(), v.stride()))
    )


def _is_causal(q: Tensor, k: Tensor, options: AttentionOptions) -> bool | None:
    """What torch calls ``is_causal`` for the request's band; None where it has another form."""
    if options.window_left is None and (options.window_right is None or (options.window_right == 0 and q.shape[1] == k.shape[1])):
        return options.window_right == 0  # at once: short requests notice the time a Band takes
    band = Band.of(q.shape[1], k.shape[1], options)
    return False if band.full else True if band.square_causal else None


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _forward_bytes(q: Tensor, k: Tensor) -> int:
    """Temporaries per (batch, key head): out and lse; float32 copies of float16; k and v reordered for 16-bit products."""
    (rows, dim), keys, group = (q.shape[1], q.shape[3]), k.shape[1], q.shape[2] // k.shape[2]
    if _in_float32(q):
        return 4 * dim * (2 * group * rows + 2 * keys) + 4 * group * rows
    packed = 2 * keys if q.dtype != torch.float32 else 0
    return q.element_size() * group * dim * (rows + packed) + 4 * group * rows


def _in_float32(q: Tensor) -> bool:
    """Whether the forward computes in float32 copies."""
    return q.dtype == torch.float16 and not _FLOAT16_PRODUCTS


def _backward_bytes(q: Tensor, k: Tensor) -> int:
    """Temporaries per (batch, key head), in float32: q, dout, out, dq; k, v, dk, dv."""
    return 16 * q.shape[3] * (q.shape[2] // k.shape[2] * q.shape[1] + k.shape[1])


def _whole_forward(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether one call returns the result itself; its lse has other strides and is copied."""
    return _in_one_call(q, k, v) and 4 * q.numel() // q.shape[3] <= EXTRA_BYTES


def _in_one_call(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the tensors that torch returns for all pairs are the results themselves.

    They have the order of strides of q, k and v, so that must be the order of a contiguous (B, S, H, D).
    """
    return q.dtype == torch.float32 and all(x.stride(0) >= x.stride(1) >= x.stride(2) for x in (q, k, v))


def _blocks(q: Tensor, k: Tensor, each: int) -> list[Pairs]:
    """The calls to make, ``each`` being the bytes of temporaries that a pair needs."""
    (batch, heads), most = (k.shape[0], k.shape[2]), max(1, EXTRA_BYTES // each)
    return list(blocks(batch, heads, q.shape[2] // heads, (max(1, most // heads), most)))


def _heads_first(pairs: Pairs, x: Tensor) -> Tensor:
    """The block's part of (B, S, H, D) as torch's (B, H, S, D), a view."""
    return x[pairs.batches, :, pairs.heads.start * pairs.group : pairs.heads.stop * pairs.group].transpose(1, 2)


def _at_once(q: Tensor, k: Tensor, each: int) -> bool:
    """Whether one call may serve all pairs, ``each`` being the bytes of temporaries that a pair needs."""
    return k.shape[0] * k.shape[2] * each <= EXTRA_BYTES


def _serves_at_once(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return not _in_float32(q) and (_at_once(q, k, _forward_bytes(q, k)) or _whole_forward(q, k, v))


def fits_at_once(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    """Whether ``at_once`` serves the request within its memory."""
    return fits_forward(q, k, v, options) and _serves_at_once(q, k, v)


def at_once(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """``forward`` in one call into torch."""
    out, lse = _flash(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse


def forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """``fa4.cpu.forward.attention_forward`` where ``fits_forward`` holds."""
    causal = _is_causal(q, k, options)
    if _serves_at_once(q, k, v):
        return at_once(q, k, v, causal is True, options.softmax_scale)
    each = _forward_bytes(q, k)
    dtype = torch.float32 if _in_float32(q) else q.dtype
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[0], q.shape[2], q.shape[1])
    for pairs in _blocks(q, k, each):
        operands = (_heads_first(side, x).to(dtype) for side, x in ((pairs, q), (pairs.keys, k), (pairs.keys, v)))
        out_part, lse_part = _flash(*operands, 0.0, causal, scale=options.softmax_scale)
        _heads_first(pairs, out).copy_(out_part)
        _heads_first(pairs, by_row(lse)).squeeze(3).copy_(lse_part)
        del out_part, lse_part  # before the next call allocates its own
    return out, lse


def backward_fits_at_once(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether ``backward_at_once`` serves what ``fits_at_once``, whichever gradients are needed."""
    return _in_one_call(q, k, v) and sum(map(_bytes, (q, k, v))) <= EXTRA_BYTES


def backward_at_once(dout: Tensor, saved: Sequence[Tensor], causal: bool, softmax_scale: float) -> tuple[Tensor, ...]:
    """``backward`` in one call into torch, dout contiguous; ``saved`` are q, k, v, out, and lse as ``at_once`` returned it."""
    q, k, v, out, lse = saved
    tensors = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    return tuple(part.transpose(1, 2) for part in _flash_backward(*tensors, lse, 0.0, causal, scale=softmax_scale))


def backward(saved: Saved, options: AttentionOptions, needed: Needed) -> Gradients:
    """``fa4.cpu.backward.attention_backward`` where ``fits_backward`` holds."""
    q, k, v = saved.q, saved.k, saved.v
    each = _backward_bytes(q, k)
    if _in_one_call(q, k, v) or _at_once(q, k, each):
        everything = Pairs(slice(0, k.shape[0]), slice(0, k.shape[2]), q.shape[2] // k.shape[2])
        parts = _backward_call(everything, saved, options)
        dq, dk, dv = (part.transpose(1, 2).to(q.dtype).contiguous() if need else None for part, need in zip(parts, needed, strict=True))
        return dq, dk, dv
    results = [torch.empty(x.shape, dtype=x.dtype) if need else None for x, need in zip((q, k, v), needed, strict=True)]
    for pairs in _blocks(q, k, each):
        for side, result, part in zip((pairs, pairs.keys, pairs.keys), results, _backward_call(pairs, saved, options), strict=True):
            if result is not None:
                _heads_first(side, result).copy_(part)
            del part  # before the next call allocates its own
    dq, dk, dv = results
    return dq, dk, dv


def _backward_call(pairs: Pairs, saved: Saved, options: AttentionOptions) -> tuple[Tensor, ...]:
    """Float32 dq, dk, dv of a block as torch returns them, (B, H, S, D)."""
    q, dout, out, lse = (_heads_first(pairs, x).float() for x in (saved.q, saved.dout, saved.out, by_row(saved.lse)))
    k, v = (_heads_first(pairs.keys, x).float() for x in (saved.k, saved.v))
    causal = _is_causal(saved.q, saved.k, options)
    return tuple(_flash_backward(dout, q, k, v, out, lse.squeeze(3), 0.0, causal, scale=options.softmax_scale))
