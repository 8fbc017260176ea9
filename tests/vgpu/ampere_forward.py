"""The Ampere forward kernel on the virtual GPU, its parameters packed by hand from the launcher's layout rule."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
import torch

from fa4 import tuning
from fa4.arch import get_arch
from fa4.compiler import lookup
from fa4.problem import AttentionProblem
from fa4.vgpu import Gpu, Program

LOG2_E = math.log2(math.e)
_programs: dict[str, Program] = {}


@dataclass(frozen=True)
class Options:
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0

    def keywords(self):
        return {"softmax_scale": self.softmax_scale, "causal": self.causal, "window_size": self.window_size, "softcap": self.softcap}


PLAIN = Options()


def divisor(d: int) -> list[bytes]:
    """FastDivmodDivisor {divisor, multiplier, shifts}, then the divisor alone."""
    log = max(d - 1, 0).bit_length()
    multiplier = (2**32 * (2**log - d) // d + 1) % 2**32
    return [struct.pack("<IIBBxx", d, multiplier, min(log, 1), max(log - 1, 0)), struct.pack("<i", d)]


def tensor(address: int, shape, strides) -> bytes:
    """Pointer, dynamic shape (i32), dynamic strides (i64) with natural alignment."""
    head = struct.pack("<Q", address) + struct.pack(f"<{len(shape)}i", *shape)
    head += b"\0" * (-len(head) % 8)
    return head + struct.pack(f"<{len(strides)}q", *strides)


def _limits(seqlen_q: int, seqlen_k: int, options: Options) -> list[bytes]:
    left, right = options.window_size
    if options.causal:
        right = 0 if right is None else min(right, 0)
    values = []
    if left is not None:
        values.append(seqlen_k - seqlen_q - min(max(left, -seqlen_q), seqlen_k))
    if right is not None:
        values.append(seqlen_k - seqlen_q + min(max(right, -seqlen_k), seqlen_q) + 1)
    return [struct.pack("<i", v) for v in values]


def _scalars(scale: float, softcap: float) -> list[bytes]:
    if softcap:
        return [struct.pack("<f", softcap * 2 * LOG2_E), struct.pack("<f", scale / softcap * 2 * LOG2_E)]
    flip = 0x80008000 if scale < 0 else 0
    return [struct.pack("<f", max(abs(scale) * LOG2_E, 2.0**-126)), struct.pack("<I", flip)]


class Memory:
    """Tensors as buffers, each at an address of its own with a gap behind it."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.next = gpu, 1 << 32

    def add(self, data: np.ndarray, name: str, writable: bool) -> int:
        address = self.next
        self.gpu.register_buffer(address, data, name, writable)
        self.next = (address + data.nbytes + 4096) // 4096 * 4096 + 4096
        return address


def bits(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().view(torch.int16).numpy()


def problem_of(q: torch.Tensor, v: torch.Tensor, options: Options) -> AttentionProblem:
    right_bound = options.window_size[1] is not None
    return AttentionProblem(
        "forward",
        str(q.dtype).removeprefix("torch."),
        q.shape[3],
        v.shape[3],
        causal=options.causal,
        window=(options.window_size[0] is not None, right_bound),
        softcap=bool(options.softcap),
    )


def compiled(problem: AttentionProblem, config, line_info: bool = False):
    """(program, kernel name, dynamic shared memory), from the compile cache."""
    ptx, name, shared = source(problem, config, line_info)
    if ptx not in _programs:
        _programs[ptx] = Program.parse(ptx)
    return _programs[ptx], name, shared


def source(problem: AttentionProblem, config, line_info: bool = False):
    """(PTX, kernel name, dynamic shared memory), from the compile cache."""
    artifact = lookup.get(problem, config, "sm_80", line_info)
    (kernel,) = artifact.kernels
    return artifact.ptx, kernel.name, kernel.launch.dynamic_shared


def attention(gpu: Gpu, q, k, v, options: Options = PLAIN, config=None, kernel=None):
    """(out, lse) of contiguous CPU tensors in the layout (B, S, H, D); ``kernel`` is what ``compiled`` gives, or a changed form of it."""
    problem = problem_of(q, v, options)
    config = config or tuning.config(problem, get_arch("sm_80"))
    program, name, shared = kernel or compiled(problem, config)
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    scale = head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    out = np.full((batch, seqlen_q, heads_q, v.shape[3]), -1, np.int16)  # NaN
    lse = np.full((batch, heads_q, seqlen_q), np.nan, np.float32)
    memory = Memory(gpu)
    params = []
    for data, name_, writable in ((bits(q), "q", False), (bits(k), "k", False), (bits(v), "v", False), (out, "out", True)):
        shape = data.shape
        strides = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3])
        address = memory.add(data, name_, writable)
        params.append(tensor(address, shape[:3], strides))
    params.append(tensor(memory.add(lse, "lse", True), lse.shape, (heads_q * seqlen_q, seqlen_q)))
    params += _scalars(scale, options.softcap) + _limits(seqlen_q, seqlen_k, options)
    tiles = -(-seqlen_q // config.tile_m)
    params += divisor(tiles) + divisor(heads_q) + divisor(heads_q // heads_kv)
    gpu.launch(program, name, (tiles * heads_q * batch,), (config.threads,), shared, params)
    return torch.from_numpy(out).view(q.dtype), torch.from_numpy(lse)
