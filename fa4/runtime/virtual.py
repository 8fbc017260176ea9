"""Execution on the virtual GPU: the compiled host code runs unchanged, and its launches go to ``fa4.vgpu`` instead of a device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
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
from fa4.runtime import backward, forward
from fa4.runtime.backward import Saved
from fa4.runtime.forward import Scalar
from fa4.runtime.tensors import HostTensor, extent
from fa4.vgpu import Gpu, Program
from fa4.vgpu.driver import Driver, LaunchRequest
from fa4.vgpu.sums import Sums

_STREAM = 0
_sums: ContextVar[list[Sums] | None] = ContextVar("fa4_sums", default=None)


def gpu_from_settings(arch: str) -> Gpu:
    """A virtual GPU as the settings say."""
    settings = _settings.current()
    how: dict[str, Any] = {"schedule": settings.vgpu_schedule, "delay": settings.vgpu_delay, "checks": settings.vgpu_checks}
    gpu = Gpu(arch, seed=settings.vgpu_seed, processes=settings.vgpu_processes, execution=settings.vgpu_execution, **how)
    gpu.sums = _sums.get()
    return gpu


@contextmanager
def recorded_sums() -> Iterator[list[Sums]]:
    """In the block, what every launch of ``fa4.attention`` adds up in global memory, see ``fa4.vgpu.sums``; ``about`` is a ``Launched``."""
    sums: list[Sums] = []
    token = _sums.set(sums)
    try:
        yield sums
    finally:
        _sums.reset(token)


@dataclass(frozen=True)
class Launched:
    """What was launched, and the shapes of the tensors it was given, in order."""

    artifact: Artifact
    shapes: tuple[tuple[int, ...], ...]


def attention_forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, gpu: Gpu) -> tuple[Tensor, Tensor]:
    """``fa4.runtime.forward.attention_forward`` of CPU tensors, executed on ``gpu``.

    Raises:
        VgpuError: what is wrong with the kernel, and where.
    """
    return forward.attention_forward(q, k, v, options, gpu.arch, partial(run, gpu))


def attention_backward(saved: Saved, options: AttentionOptions, gpu: Gpu) -> tuple[Tensor | None, ...]:
    """``fa4.runtime.backward.attention_backward`` of CPU tensors, executed on ``gpu``.

    Raises:
        VgpuError: what is wrong with a kernel, and where.
    """
    return backward.attention_backward(saved, options, gpu.arch, partial(run, gpu))


def run(
    gpu: Gpu,
    artifact: Artifact,
    inputs: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
    scalars: Sequence[Scalar],
    aux: Sequence[Tensor] = (),
    *,
    updated: Sequence[Tensor | None] = (),
) -> None:
    """Call the host code of ``artifact`` with tensors of host memory; ``inputs`` and ``aux`` are read-only, ``outputs`` start as NaN.

    ``updated`` tensors, which a kernel adds to, stand between the two in the call. A tensor may be absent, None.

    Raises:
        VgpuError: what is wrong with the kernel, and where.
    """
    import tvm_ffi

    driver = Driver(partial(launch, gpu, parsed(artifact.ptx, artifact.cubin)), int(get_arch(artifact.arch).smem_per_block))
    function = load_function(artifact, driver.resolve)
    for tensor in outputs:
        if tensor is not None:
            tensor.fill_(torch.nan)  # what the kernel leaves out shows
    tensors = [None if tensor is None else tensor.detach() for tensor in (*inputs, *updated, *outputs, *aux)]
    count, last = len(inputs), len(tensors) - len(aux)
    regions = [
        region(tensor.__dlpack__(), f"{'output' if count <= i < last else 'input'} {i}", count <= i < last)
        for i, tensor in enumerate(tensors)
        if tensor is not None
    ]
    operands = [None if tensor is None else tvm_ffi.from_dlpack(HostTensor(tensor)) for tensor in tensors]
    with registered(gpu, regions), driver.raising():
        function(*operands[:last], *scalars, _STREAM, *operands[last:])
    for sums in gpu.sums or ():
        sums.about = sums.about or Launched(artifact, tuple(() if x is None else tuple(x.shape) for x in tensors))


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
