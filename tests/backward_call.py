"""The main kernel of a backward pass on a virtual GPU of the test's choice; what goes before and after it is numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from forward_call import PLAIN, Options, scalars

from fa4 import tuning
from fa4.arch import get_arch
from fa4.compiler import lookup
from fa4.compiler.artifact import Artifact
from fa4.config import Needed, padded_head_dim
from fa4.kernels.common.dq_layout import dq_offset
from fa4.problem import AttentionProblem, normalise_window
from fa4.reference import standard_attention, standard_attention_backward
from fa4.runtime import virtual
from fa4.testing import AttentionInputs, compare, torch_attention
from fa4.vgpu import Gpu

TILE = 128
ARCH = "sm_100a"
ALL = Needed()


def problem_of(inputs: AttentionInputs, options: Options = PLAIN, deterministic: bool = False) -> AttentionProblem:
    bounds = normalise_window(options.window_size, options.causal)
    dims = inputs.q.shape[3], inputs.v.shape[3]
    return AttentionProblem.of("backward", inputs.q.dtype, dims, bounds, options.softcap, deterministic)


def compiled(problem: AttentionProblem, config=None, arch: str = ARCH) -> Artifact:
    """From the compile cache; without ``config`` as tuned."""
    return lookup.get(problem, config or tuning.config(problem, get_arch(arch)), arch)


def rows_of(inputs: AttentionInputs, options: Options, dlse: bool):
    """(lse in log2 units, delta), float32 (B, Hq, Sq rounded up), as the preprocess makes them."""
    reference = standard_attention(*[x.double().numpy() for x in (inputs.q, inputs.k, inputs.v)], **options.keywords())
    batch, seqlen, heads, _ = inputs.q.shape
    rounded = -(-seqlen // TILE) * TILE
    lse = torch.full((batch, heads, rounded), math.inf)
    delta = torch.zeros(batch, heads, rounded)
    found = torch.from_numpy(reference.lse).float() * math.log2(math.e)
    lse[..., :seqlen] = torch.where(found == -math.inf, math.inf, found)
    out = torch.from_numpy(reference.out).to(inputs.q.dtype)
    delta[..., :seqlen] = (out.float() * inputs.dout.float()).sum(3).transpose(1, 2) - (inputs.dlse if dlse else 0.0)
    return lse, delta


def dq_of(accumulator, scale, shape, dtype):
    """The postprocess: dQ (B, Sq, Hq, D) of the accumulator."""
    batch, heads, rounded, columns = accumulator.shape
    row, column = np.arange(rounded)[:, None], np.arange(columns)[None]
    where = torch.from_numpy(dq_offset(row, column, columns))
    dq = accumulator.reshape(batch, heads, -1)[:, :, where.reshape(-1)].reshape(accumulator.shape)
    return (dq * scale).to(dtype)[:, :, : shape[1], : shape[3]].transpose(1, 2)


@dataclass(frozen=True)
class Buffers:
    """What the kernel is given beside the inputs; ``deterministic`` adds the semaphores. None for what is not needed."""

    lse: torch.Tensor
    delta: torch.Tensor
    dq: torch.Tensor | None
    semaphore: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None


def buffers(inputs, options, deterministic=False, dlse=False, needed=ALL):
    lse, delta = rows_of(inputs, options, dlse)
    batch, heads, rounded = lse.shape
    dq = torch.zeros(batch, heads, rounded, padded_head_dim(inputs.q.shape[3])) if needed.dq else None
    semaphore = torch.zeros(batch, heads, rounded // 32, dtype=torch.int32) if deterministic and needed.dq else None
    wanted = (inputs.k, needed.dk), (inputs.v, needed.dv)
    dk, dv = (torch.full(x.shape, math.nan, dtype=x.dtype) if need else None for x, need in wanted)
    return Buffers(lse, delta, dq, semaphore, dk, dv)


def run(gpu: Gpu, artifact: Artifact, inputs: AttentionInputs, b: Buffers, numbers) -> None:
    statistics = torch.stack([x.unflatten(2, (-1, TILE)) for x in (b.lse, b.delta)], 3).flatten(2)  # of a tile lse, then delta
    read = inputs.q, inputs.k, inputs.v, inputs.dout, statistics
    virtual.run(gpu, artifact, read, (b.dk, b.dv), numbers, updated=(b.dq, b.semaphore))


def gradients(gpu, inputs, options=PLAIN, config=None, artifact=None, *, deterministic=False, dlse=False):
    """(dq, dk, dv) of CPU tensors in the layout (B, S, H, D); None for what ``config`` does not need."""
    artifact = artifact or compiled(problem_of(inputs, options, deterministic), config, gpu.arch)
    b = buffers(inputs, options, deterministic, dlse, config.needed if config else ALL)
    numbers = scalars(options, inputs.q.shape[3])
    run(gpu, artifact, inputs, b, numbers)
    return None if b.dq is None else dq_of(b.dq, numbers[0], inputs.q.shape, inputs.q.dtype), b.dk, b.dv


def comparisons(results, inputs, options, dlse=False):
    arrays = [x.double().numpy() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
    found = standard_attention_backward(*arrays, inputs.dlse.double().numpy() if dlse else None, **options.keywords())
    leaves = inputs.leaves()
    out, lse = torch_attention(*leaves, **options.keywords())
    upstream = [inputs.dout] + ([inputs.dlse] if dlse else [])
    baseline = torch.autograd.grad([out, lse][: len(upstream)], leaves, upstream)
    expected = zip(("dq", "dk", "dv"), results, (found.dq, found.dk, found.dv), baseline, strict=True)
    return [compare(name, actual, reference, base) for name, actual, reference, base in expected]
