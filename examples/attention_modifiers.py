"""Functions on scores for ``fa4.attention``: ALiBi, attention within documents, and a prefix that everybody sees.

``python examples/attention_modifiers.py`` runs them, with gradients, on the CPU backend and, as parts of the Blackwell kernels, on the
virtual GPU.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32
from torch import Tensor

import fa4


# ALiBi (arXiv 2108.12409): a penalty that grows with the distance between query and key, by a slope for each head.
@cute.jit
def _alibi_on_device(score: Float32, batch: Int32, head: Int32, q_index: Int32, k_index: Int32, slopes: cute.Tensor) -> Float32:
    distance = q_index - k_index
    if distance < 0:
        distance = -distance
    return score - slopes[head] * Float32(distance)


def _alibi(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor, slopes: Tensor) -> Tensor:
    return score - slopes[head] * (q_index - k_index).abs()


# What backward kernels need: a gradient carried back through the function. A bias adds the same to every score, so it goes through.
def _alibi_gradient(
    dscore: Float32, score: Float32, batch: Int32, head: Int32, q_index: Int32, k_index: Int32, slopes: cute.Tensor
) -> Float32:
    return dscore


alibi = fa4.score_mod("alibi", device=_alibi_on_device, torch=_alibi, grad=_alibi_gradient, aux={"slopes": "float32[Hq]"})


def alibi_slopes(heads: int) -> Tensor:
    """The slopes of the paper for a power of two of heads, float32 (heads,): 2^(-8 / heads), 2^(-16 / heads), ..."""
    return torch.exp2(torch.arange(1, heads + 1) * (-8.0 / heads))


# Sequences packed into one: a query sees keys of its own document only. Two tensors say which document a token belongs to.
@cute.jit
def _same_document_on_device(
    batch: Int32, head: Int32, q_index: Int32, k_index: Int32, q_document: cute.Tensor, k_document: cute.Tensor
) -> Boolean:
    return q_document[batch, q_index] == k_document[batch, k_index]


def _same_document(batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor, q_document: Tensor, k_document: Tensor) -> Tensor:
    return q_document[batch, q_index] == k_document[batch, k_index]


same_document = fa4.mask_mod(
    "same_document",
    device=_same_document_on_device,
    torch=_same_document,
    aux={"q_document": "int32[B, Sq]", "k_document": "int32[B, Sk]"},
)


# Causal, but for a prefix that every query sees. One function does for both forms: it uses nothing that tensors and numbers do not share.
def _prefix(batch: Any, head: Any, q_index: Any, k_index: Any, prefix: Any) -> Any:
    return (k_index <= q_index) | (k_index < prefix[batch])


prefix = fa4.mask_mod("prefix", device=_prefix, torch=_prefix, aux={"prefix": "int32[B]"})


def main() -> None:
    """Both backends over a short packed sequence; the largest differences of their results and gradients."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 150, heads, 64, generator=generator).to(torch.bfloat16).requires_grad_() for heads in (4, 2, 2))
    dout = torch.randn(1, 150, 4, 64, generator=generator).to(torch.bfloat16)
    document = (torch.arange(150) // 60).to(torch.int32)[None]
    options: dict[str, Any] = {
        "causal": True,
        "score_mod": alibi,
        "mask_mod": same_document,
        "aux": {"slopes": alibi_slopes(4), "q_document": document, "k_document": document},
    }
    results: list[list[Tensor]] = []
    for everything in (options, options | {"backend": "vgpu", "arch": "sm_100a"}):
        out = fa4.attention(q, k, v, **everything)
        results.append([out, *torch.autograd.grad(out, (q, k, v), dout)])
    for name, on_cpu, on_virtual_gpu in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        print(f"largest difference of {name}:", (on_cpu.float() - on_virtual_gpu.float()).abs().max().item())


if __name__ == "__main__":
    main()
