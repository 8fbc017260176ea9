"""Tensors inside larger ones whose other bytes are known, so that a write beside a tensor shows."""

from __future__ import annotations

import torch

SENTINEL = 0x5A


def embedded(shape, padding, dtype):
    """A tensor of ``shape`` inside a larger one whose bytes are all SENTINEL: ``padding`` elements before and after in each dimension."""
    size = [n + 2 * more for n, more in zip(shape, padding, strict=True)]
    memory = torch.empty(size, dtype=dtype)
    memory.view(torch.uint8).fill_(SENTINEL)
    inside = memory[tuple(slice(more, more + n) for n, more in zip(shape, padding, strict=True))]
    return memory, inside


def changed_canaries(memory, inside):
    """Bytes outside of ``inside`` that are no longer SENTINEL; what is inside is overwritten."""
    inside.view(torch.uint8).fill_(SENTINEL)
    return int((memory.view(torch.uint8) != SENTINEL).sum())
