"""Random inputs of attention, reproducible by seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["contiguous", "heads_first", "padded"]


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention problem; ``head_dim_v`` 0 means the same as ``head_dim``."""

    batch: int = 1
    seqlen_q: int = 64
    seqlen_k: int = 64
    heads_q: int = 1
    heads_kv: int = 1
    head_dim: int = 64
    head_dim_v: int = 0

    @property
    def dim_v(self) -> int:
        """The head dimension of v and out."""
        return self.head_dim_v or self.head_dim


@dataclass(frozen=True)
class AttentionInputs:
    """q ``(B, Sq, Hq, D)``, k ``(B, Sk, Hkv, D)``, v ``(B, Sk, Hkv, Dv)``, dout ``(B, Sq, Hq, Dv)``, dlse ``(B, Hq, Sq)`` float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor

    def scaled(self, factor: float) -> AttentionInputs:
        """The same inputs with q multiplied by ``factor``: larger logits."""
        return replace(self, q=self.q * factor)

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as fresh leaves that require grad, strides kept."""
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        return q, k, v


def make_inputs(
    shape: AttentionShape, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0, layout: Layout = "contiguous", device: str = "cpu"
) -> AttentionInputs:
    """Standard normal inputs, drawn in float32 on the CPU and rounded to ``dtype``.

    ``layout``: "heads_first" stores (B, H, S, D) and returns the transposed view; "padded" is a view into rows that are 8 elements
    longer, with NaN in the padding.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(seqlen: int, heads: int, dim: int) -> Tensor:
        size = (shape.batch, seqlen, heads, dim)
        x = torch.randn(size, generator=generator).to(dtype).to(device)
        if layout == "heads_first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "padded":
            padded = torch.full((*size[:3], dim + 8), float("nan"), dtype=dtype, device=device)
            padded[..., :dim] = x
            return padded[..., :dim]
        return x

    return AttentionInputs(
        q=draw(shape.seqlen_q, shape.heads_q, shape.head_dim),
        k=draw(shape.seqlen_k, shape.heads_kv, shape.head_dim),
        v=draw(shape.seqlen_k, shape.heads_kv, shape.dim_v),
        dout=draw(shape.seqlen_q, shape.heads_q, shape.dim_v),
        dlse=torch.randn((shape.batch, shape.heads_q, shape.seqlen_q), generator=generator).to(device),
    )
