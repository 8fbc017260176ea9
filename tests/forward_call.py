"""A forward kernel on a virtual GPU of the test's choice, in a configuration of its choice, also with changed PTX."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fa4 import tuning
from fa4.arch import get_arch
from fa4.compiler import lookup
from fa4.compiler.artifact import Artifact
from fa4.problem import AttentionProblem, normalise_window
from fa4.runtime import virtual
from fa4.vgpu import Gpu


@dataclass(frozen=True)
class Options:
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0

    def keywords(self):
        return {"softmax_scale": self.softmax_scale, "causal": self.causal, "window_size": self.window_size, "softcap": self.softcap}


PLAIN = Options()


def compiled(q: torch.Tensor, v: torch.Tensor, options: Options = PLAIN, config=None, arch: str = "sm_80") -> Artifact:
    """From the compile cache; without ``config`` as tuned."""
    bounds = normalise_window(options.window_size, options.causal)
    problem = AttentionProblem.of("forward", q.dtype, (q.shape[3], v.shape[3]), bounds, options.softcap, deterministic=False)
    return lookup.get(problem, config or tuning.config(problem, get_arch(arch)), arch)


def scalars(options: Options, head_dim: int) -> tuple[float | int | None, ...]:
    """The numbers of a call, in the order of the kernel's arguments."""
    left, right = normalise_window(options.window_size, options.causal)
    scale = head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    return scale, options.softcap or None, left, right or None  # a right bound of 0 is compiled in


def attention(gpu: Gpu, q, k, v, options: Options = PLAIN, config=None, artifact: Artifact | None = None, outputs=None):
    """(out, lse) of CPU tensors in the layout (B, S, H, D), in ``outputs`` where given; ``artifact`` is from ``compiled``, or changed."""
    batch, seqlen_q, heads_q, head_dim = q.shape
    sizes = (batch, seqlen_q, heads_q, v.shape[3]), (batch, heads_q, seqlen_q)
    out, lse = outputs or (q.new_empty(sizes[0]), q.new_empty(sizes[1], dtype=torch.float32))
    artifact = artifact or compiled(q, v, options, config, gpu.arch)
    virtual.run(gpu, artifact, (q, k, v), (out, lse), scalars(options, head_dim))
    return out, lse
