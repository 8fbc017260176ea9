"""Autocast: attention runs in the autocast dtype, as torch's scaled_dot_product_attention does."""

from __future__ import annotations

import torch
from torch import Tensor


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the autocast dtype of their device where autocast is on there; float64 is left alone, as in torch."""
    if not torch._C._is_any_autocast_enabled():  # at once: this is asked on every call
        return q, k, v
    device_type = q.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v
