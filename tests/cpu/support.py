"""Calls the CPU backend's two paths as differentiable functions, each by name."""

from __future__ import annotations

import torch

from fa4.cpu import backward, forward, torch_flash
from fa4.cpu.tiles import Saved
from fa4.problem import AttentionOptions, normalise_window

ALL = (True, True, True)


def options_of(head_dim, *, softmax_scale=None, causal=False, window_size=(None, None), softcap=0.0, deterministic=False):
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    return AttentionOptions(scale, *normalise_window(window_size, causal), softcap, deterministic)


def attention_by(path, *, deterministic=False):
    """``attention(q, k, v, **options) -> (out, lse)`` with gradients, over "tiled", "flash" or, "chosen", what the backend takes."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, options):
            run = {"tiled": forward.tiled_forward, "flash": torch_flash.forward, "chosen": forward.attention_forward}[path]
            ctx.set_materialize_grads(False)
            if path == "flash":
                assert torch_flash.fits_forward(q, k, v, options)
            out, lse = run(q, k, v, options)
            ctx.options = options
            ctx.save_for_backward(q, k, v, out, lse)
            return out, lse

        @staticmethod
        def backward(ctx, dout, dlse):
            q, k, v, out, lse = ctx.saved_tensors
            if path == "chosen":
                return (*backward.attention_backward(dout, dlse, q, k, v, out, lse, ctx.options, needed=ALL), None)
            saved = Saved(q, k, v, out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
            if path == "flash":
                assert torch_flash.fits_backward(saved, ctx.options, ALL)
            run = torch_flash.backward if path == "flash" else backward.tiled_backward
            return (*run(saved, ctx.options, ALL), None)

    def attention(q, k, v, **options):
        return Attention.apply(q, k, v, options_of(q.shape[3], deterministic=deterministic, **options))

    return attention


def gradients(path, inputs, *, dlse=None, deterministic=False, **options):
    """out, lse, dq, dk, dv from ``inputs.dout`` and ``dlse``."""
    q, k, v = inputs.leaves()
    out, lse = attention_by(path, deterministic=deterministic)(q, k, v, **options)
    outputs, cotangents = ([out], [inputs.dout]) if dlse is None else ([out, lse], [inputs.dout, dlse])
    return out.detach(), lse.detach(), *torch.autograd.grad(outputs, (q, k, v), cotangents)
