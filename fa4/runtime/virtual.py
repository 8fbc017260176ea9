"""Execution on the virtual GPU: the compiled host code runs unchanged, and its launches go to ``fa4.vgpu`` instead of a device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fa4 import _settings
from fa4.arch import get_arch
from fa4.compiler.artifact import Artifact
from fa4.compiler.load import load_function
from fa4.problem import AttentionOptions
from fa4.runtime import forward
from fa4.runtime.forward import Scalar
from fa4.runtime.tensors import HostTensor, extent
from fa4.vgpu import Gpu, Program
from fa4.vgpu.driver import Driver, LaunchRequest

_STREAM = 0


def gpu_from_settings(arch: str) -> Gpu:
    """A virtual GPU with the seed, the schedule, the delay, the checks and the number of processes that the settings say."""
    settings = _settings.current()
    how: dict[str, Any] = {"schedule": settings.vgpu_schedule, "delay": settings.vgpu_delay, "checks": settings.vgpu_checks}
    return Gpu(arch, seed=settings.vgpu_seed, processes=settings.vgpu_processes, **how)


def attention_forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, gpu: Gpu) -> tuple[Tensor, Tensor]:
    """``fa4.runtime.forward.attention_forward`` of CPU tensors, executed on ``gpu``.

    Raises:
        VgpuError: what is wrong with the kernel, and where.
    """
    return forward.attention_forward(q, k, v, options, gpu.arch, partial(run, gpu))


def run(
    gpu: Gpu,
    artifact: Artifact,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    scalars: Sequence[Scalar],
    aux: Sequence[Tensor] = (),
) -> None:
    """Call the host code of ``artifact`` with tensors of host memory; ``inputs`` and ``aux`` are read-only, ``outputs`` start as NaN.

    Raises:
        VgpuError: what is wrong with the kernel, and where.
    """
    import tvm_ffi

    driver = Driver(partial(launch, gpu, parsed(artifact.ptx, artifact.cubin)), int(get_arch(artifact.arch).smem_per_block))
    function = load_function(artifact, driver.resolve)
    for tensor in outputs:
        tensor.fill_(torch.nan)  # what the kernel leaves out shows
    regions = [region(tensor.detach().__dlpack__(), "inputs", False) for tensor in (*inputs, *aux)]
    regions += [region(tensor.detach().__dlpack__(), "outputs", True) for tensor in outputs]
    operands, more = ([tvm_ffi.from_dlpack(HostTensor(x.detach())) for x in tensors] for tensors in ((*inputs, *outputs), aux))
    with registered(gpu, regions), driver.raising():
        function(*operands, *scalars, _STREAM, *more)


def launch(gpu: Gpu, program: Program, request: LaunchRequest) -> None:
    """What the host code asked for."""
    sizes = [parameter.size for parameter in program.kernel(request.kernel).parameters]
    geometry = (request.grid, request.block, request.dynamic_shared, request.parameters(sizes), request.cluster)
    gpu.launch(program, request.kernel, *geometry)


@dataclass(frozen=True, order=True)
class Region:
    """Host memory that a kernel may use, from address ``begin`` up to ``end``."""

    begin: int
    end: int
    name: str
    writable: bool


def region(capsule: Any, name: str, writable: bool) -> Region:
    """The memory of a tensor given as a DLPack capsule."""
    where = extent(capsule)
    return Region(where.begin, where.end, name, writable)


@contextmanager
def registered(gpu: Gpu, regions: Iterable[Region]) -> Iterator[None]:
    """Make regions global memory for the time of the block; those that overlap (views of one tensor) as one, writable if all are."""
    merged: list[Region] = []
    for piece in sorted(piece for piece in regions if piece.begin < piece.end):
        if merged and piece.begin < merged[-1].end:
            last = merged.pop()
            merged.append(replace(last, end=max(last.end, piece.end), writable=last.writable and piece.writable))
        else:
            merged.append(piece)
    done = []
    try:
        for piece in merged:
            gpu.register_buffer(piece.begin, _memory(piece), piece.name, piece.writable)
            done.append(piece.begin)
        yield
    finally:
        for begin in done:
            gpu.remove_buffer(begin)


@lru_cache(maxsize=64)
def parsed(ptx: str, cubin: bytes = b"") -> Program:
    """The program of a text, which keeps the code that the virtual GPU generates for it."""
    return Program.parse(ptx, cubin)


def _memory(region: Region) -> npt.NDArray[np.uint8]:
    """The host's memory itself, as bytes."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * (region.end - region.begin)).from_address(region.begin))
