"""A virtual GPU: PTX executed on the CPU with numpy, and checked while it runs.

    program = Program.parse(ptx)
    gpu = Gpu("sm_80", schedule="random", seed=1)
    gpu.register_buffer(0x1000, array, "x")
    gpu.launch(program, "kernel", grid=(1,), block=(128,), params=[struct.pack("<Q", 0x1000)])

or, for functions of CuTe-DSL and tensors of torch or numpy, ``with attach("sm_80") as gpu:`` around their compilation and call.

Every fault is a ``VgpuError`` that says in which lane, at which line of PTX and of the kernel's source.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fa4.vgpu.choices import Minimal, minimise
from fa4.vgpu.errors import (
    BarrierError,
    DataRaceError,
    DeadlockError,
    DivergenceError,
    LaunchControlError,
    LaunchError,
    MatrixDescriptorError,
    MemoryFaultError,
    MisalignedError,
    OutOfBoundsError,
    PendingCopyError,
    PendingMultiplyError,
    Place,
    ProxyFenceError,
    PtxSyntaxError,
    SharedGlobalError,
    TensorFenceError,
    TensorMapError,
    TensorMemoryError,
    TrapError,
    UninitializedError,
    UnsupportedInstructionError,
    VgpuError,
    WorkerError,
)
from fa4.vgpu.machine import Gpu
from fa4.vgpu.observe import Observer
from fa4.vgpu.profile import Profile, ProfileReport
from fa4.vgpu.program import Program
from fa4.vgpu.report import Report

if TYPE_CHECKING:
    from fa4.runtime.attach import attach as attach
    from fa4.runtime.torch_cuda import torch_cuda as torch_cuda

__all__ = [
    "BarrierError",
    "DataRaceError",
    "DeadlockError",
    "DivergenceError",
    "Gpu",
    "LaunchControlError",
    "LaunchError",
    "MatrixDescriptorError",
    "MemoryFaultError",
    "Minimal",
    "MisalignedError",
    "Observer",
    "OutOfBoundsError",
    "PendingCopyError",
    "PendingMultiplyError",
    "Place",
    "Profile",
    "ProfileReport",
    "Program",
    "ProxyFenceError",
    "PtxSyntaxError",
    "Report",
    "SharedGlobalError",
    "TensorFenceError",
    "TensorMapError",
    "TensorMemoryError",
    "TrapError",
    "UninitializedError",
    "UnsupportedInstructionError",
    "VgpuError",
    "WorkerError",
    "attach",
    "minimise",
    "torch_cuda",
]


def __getattr__(name: str) -> Any:
    """``attach`` and ``torch_cuda`` need torch and cutlass, and this package works without: they are imported on first use."""
    if name not in ("attach", "torch_cuda"):
        raise AttributeError(f"module 'fa4.vgpu' has no attribute {name!r}")
    return getattr(import_module(f"fa4.runtime.{name}"), name)
