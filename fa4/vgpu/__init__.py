"""A virtual GPU: PTX executed on the CPU with numpy, and checked while it runs.

    program = Program.parse(ptx)
    gpu = Gpu("sm_80", schedule="random", seed=1)
    gpu.register_buffer(0x1000, array, "x")
    gpu.launch(program, "kernel", grid=(1,), block=(128,), params=[struct.pack("<Q", 0x1000)])

Every fault is a ``VgpuError`` that says in which lane, at which line of PTX and of the kernel's source.
"""

from fa4.vgpu.errors import (
    BarrierError,
    DeadlockError,
    DivergenceError,
    LaunchError,
    MatrixDescriptorError,
    MemoryFaultError,
    MisalignedError,
    OutOfBoundsError,
    PendingCopyError,
    PendingMultiplyError,
    Place,
    PtxSyntaxError,
    TensorMapError,
    TensorMemoryError,
    TrapError,
    UninitializedError,
    UnsupportedInstructionError,
    VgpuError,
)
from fa4.vgpu.machine import Gpu
from fa4.vgpu.program import Program
from fa4.vgpu.report import Observer, Report

__all__ = [
    "BarrierError",
    "DeadlockError",
    "DivergenceError",
    "Gpu",
    "LaunchError",
    "MatrixDescriptorError",
    "MemoryFaultError",
    "MisalignedError",
    "Observer",
    "OutOfBoundsError",
    "PendingCopyError",
    "PendingMultiplyError",
    "Place",
    "Program",
    "PtxSyntaxError",
    "Report",
    "TensorMapError",
    "TensorMemoryError",
    "TrapError",
    "UninitializedError",
    "UnsupportedInstructionError",
    "VgpuError",
]
