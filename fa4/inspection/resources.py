"""What one block of a kernel takes from its SM, and how many blocks fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fa4.arch import Arch
from fa4.compiler.artifact import Kernel

_WARP = 32
# CUDA occupancy API (cuda_occupancy.h): how compute capability 8.0 and later allocate.
_REGISTER_UNIT = 256  # registers, per warp
_SUB_PARTITIONS = 4  # of an SM, each with a quarter of its registers
_SHARED_UNIT = 128  # bytes
_RESERVED_SHARED = 1024  # bytes per block that the system keeps


@dataclass(frozen=True)
class Resources:
    """What a kernel needs; sizes in bytes.

    ``registers`` are per thread, as allocated at launch. ``stack`` is the local memory of a thread; ``spill_stores`` and
    ``spill_loads`` are what ptxas says it moves there and back, per thread and counted once per instruction, None where it said nothing.
    ``static_shared`` and ``dynamic_shared`` are per block, ``static_shared`` with the kilobyte that the system keeps from sm_90 on.
    ``threads`` are of a block. What the host decides at run time is None.

    ``blocks_per_sm`` is how many blocks an SM holds at a time by the arithmetic of CUDA's occupancy API, and ``limited_by`` what
    stops more: "registers", "shared memory", "threads" or "blocks". Tensor Memory, which a kernel allocates as it runs, is not counted.
    """

    registers: int
    stack: int
    spill_stores: int | None
    spill_loads: int | None
    static_shared: int
    dynamic_shared: int | None
    threads: int | None
    blocks_per_sm: int | None
    limited_by: str | None


def resources(kernel: Kernel, arch: Arch) -> Resources:
    """The resources of a compiled kernel on an architecture."""
    used, launch = kernel.resources, kernel.launch
    threads = math.prod(launch.block) if launch.block else None
    blocks, limit = None, None
    if threads is not None and launch.dynamic_shared is not None:
        shared = used.static_shared + launch.dynamic_shared + (_RESERVED_SHARED if arch.capability < (9, 0) else 0)
        limits = block_limits(arch, threads, used.registers, shared)
        limit = min(limits, key=limits.__getitem__)
        blocks = limits[limit]
    return Resources(
        registers=used.registers,
        stack=used.stack,
        spill_stores=used.spill_stores,
        spill_loads=used.spill_loads,
        static_shared=used.static_shared,
        dynamic_shared=launch.dynamic_shared,
        threads=threads,
        blocks_per_sm=blocks,
        limited_by=limit,
    )


def block_limits(arch: Arch, threads: int, registers: int, shared: int) -> dict[str, int]:
    """How many blocks each resource of an SM allows; ``registers`` per thread, ``shared`` bytes per block with what the system keeps."""
    warps = -(-threads // _WARP)
    registers_per_warp = _round_up(max(registers, 1) * _WARP, _REGISTER_UNIT)
    warps_by_registers = int(arch.registers_per_sm) // _SUB_PARTITIONS // registers_per_warp * _SUB_PARTITIONS
    return {
        "registers": warps_by_registers // warps,
        "shared memory": int(arch.smem_per_sm) // _round_up(max(shared, 1), _SHARED_UNIT),
        "threads": int(arch.threads_per_sm) // (warps * _WARP),
        "blocks": int(arch.blocks_per_sm),
    }


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
