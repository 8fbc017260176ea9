"""Execution on the virtual GPU: the compiled host code runs unchanged, and its launches go to ``fa4.vgpu`` instead of a device."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache, partial

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
from fa4.runtime.tensors import HostTensor
from fa4.vgpu import Gpu, Program
from fa4.vgpu.driver import Driver, LaunchRequest

_STREAM = 0


def gpu_from_settings(arch: str) -> Gpu:
    """A virtual GPU with the seed and the schedule that the settings say."""
    settings = _settings.current()
    return Gpu(arch, seed=settings.vgpu_seed, schedule=settings.vgpu_schedule)


def attention_forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, gpu: Gpu) -> tuple[Tensor, Tensor]:
    """``fa4.runtime.forward.attention_forward`` of CPU tensors, executed on ``gpu``.

    Raises:
        VgpuError: what is wrong with the kernel, and where.
    """
    return forward.attention_forward(q, k, v, options, gpu.arch, partial(run, gpu))


def run(gpu: Gpu, artifact: Artifact, inputs: Sequence[Tensor], outputs: Sequence[Tensor], scalars: Sequence[Scalar]) -> None:
    """Call the host code of ``artifact`` with tensors of host memory; ``inputs`` are read-only, ``outputs`` start as NaN.

    Raises:
        VgpuError: what is wrong with the kernel, and where.
    """
    import tvm_ffi

    program = _program(artifact.ptx)

    def launch(request: LaunchRequest) -> None:
        sizes = [parameter.size for parameter in program.kernel(request.kernel).parameters]
        geometry = (request.grid, request.block, request.dynamic_shared, request.parameters(sizes), request.cluster)
        gpu.launch(program, request.kernel, *geometry)

    driver = Driver(launch, int(get_arch(artifact.arch).smem_per_block))
    function = load_function(artifact, driver.resolve)
    for tensor in outputs:
        tensor.fill_(torch.nan)  # what the kernel leaves out shows
    registered = []
    try:
        for name, writable, tensors in (("inputs", False, inputs), ("outputs", True, outputs)):
            for begin, end in _spans(tensors):
                gpu.register_buffer(begin, _memory(begin, end), name, writable)
                registered.append(begin)
        hosts = [HostTensor(tensor) for tensor in (*inputs, *outputs)]
        function(*map(tvm_ffi.from_dlpack, hosts), *scalars, _STREAM)
    except Exception:
        if driver.error is not None:
            raise driver.error from None
        raise
    finally:
        for begin in registered:
            gpu.remove_buffer(begin)


@lru_cache(maxsize=64)
def _program(ptx: str) -> Program:
    return Program.parse(ptx)


def _spans(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """(begin, end) addresses of the memory that tensors span, those that overlap (views of one tensor) as one."""
    spans: list[tuple[int, int]] = []
    for tensor in sorted((tensor for tensor in tensors if tensor.numel()), key=Tensor.data_ptr):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin, end = tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
        if spans and begin < spans[-1][1]:
            begin, end = spans[-1][0], max(end, spans.pop()[1])
        spans.append((begin, end))
    return spans


def _memory(begin: int, end: int) -> npt.NDArray[np.uint8]:
    """The host's memory itself, as bytes."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * (end - begin)).from_address(begin))
