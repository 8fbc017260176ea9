"""Compiling the probe kernel and running it on the virtual GPU; cutlass is imported only where something is compiled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fa4 import compiler, dispatch
from fa4.problem import AttentionProblem
from fa4.runtime import virtual
from fa4.vgpu import Gpu

# A direction of its own: no real request is affected.
dispatch.IMPLEMENTATIONS["exp2", "ampere"] = "exp2_probe:Exp2Probe"

BLOCK = 512


@dataclass(frozen=True)
class ProbeConfig:
    degree: int = 3
    form: str = "fast"
    pair: bool = True
    continuous: bool = False


def probe(config: ProbeConfig, arch: str):
    """The compiled probe kernel."""
    return compiler.get(AttentionProblem("exp2", "float32", 8, 8), config, arch)


def on_virtual_gpu(x, config: ProbeConfig, arch: str):
    """``x``, any float32 vector, through the device code."""
    padded = np.zeros(-(-len(x) // BLOCK) * BLOCK, np.float32)
    padded[: len(x)] = x
    out = torch.empty(len(padded))
    virtual.run(Gpu(arch), probe(config, arch), [torch.from_numpy(padded)], [out], [])
    return out.numpy()[: len(x)]
