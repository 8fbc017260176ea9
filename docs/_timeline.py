"""The figure of ``docs/kernels/blackwell-forward.md``: the forward kernel on the virtual GPU, warp by warp."""

from __future__ import annotations

import torch

from fa4 import tuning
from fa4.arch import get_arch
from fa4.compiler import get
from fa4.problem import AttentionProblem
from fa4.runtime import virtual
from fa4.testing import AttentionShape, make_inputs
from fa4.vgpu import Gpu
from fa4.vgpu.timeline import Timeline, picture

ARCH = "sm_100a"
AGENTS = ["softmax 0"] * 4 + ["softmax 1"] * 4 + ["correction"] * 4 + ["MMA", "load", "epilogue", ""]
"""Agents by warp; the last one has no role."""


def blackwell_forward() -> str:
    """One CTA of 256 queries and 640 keys, causal, D 128."""
    problem = AttentionProblem("forward", "bfloat16", 128, 128, causal=True)
    artifact = get(problem, tuning.config(problem, get_arch(ARCH)), ARCH)
    inputs = make_inputs(AttentionShape(1, 256, 640, 1, 1, 128), torch.bfloat16)
    gpu = Gpu(ARCH, delay="early")
    timeline = Timeline(virtual.parsed(artifact.ptx).kernel(artifact.kernels[0].name), AGENTS)
    gpu.observer = timeline
    out, lse = torch.empty_like(inputs.q), torch.empty(1, 1, 256)
    virtual.run(gpu, artifact, (inputs.q, inputs.k, inputs.v), (out, lse), (128**-0.5, None, None, None))
    return picture(timeline.events, timeline.rows)
