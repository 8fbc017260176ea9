"""The occupancy arithmetic against figures that NVIDIA's occupancy calculator gives."""

from __future__ import annotations

import pytest

from fa4.arch import get_arch
from fa4.compiler.artifact import Kernel, Launch
from fa4.compiler.cubin import Resources as Used
from fa4.inspection.resources import block_limits, resources


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "expected"),
    [
        ("sm_80", 128, 255, 1024, {"registers": 2, "shared memory": 164, "threads": 16, "blocks": 32}),
        ("sm_80", 128, 128, 1024, {"registers": 4, "shared memory": 164, "threads": 16, "blocks": 32}),
        ("sm_80", 256, 32, 65536 + 1024, {"registers": 8, "shared memory": 2, "threads": 8, "blocks": 32}),
        ("sm_86", 32, 16, 1024, {"registers": 128, "shared memory": 100, "threads": 48, "blocks": 16}),
        ("sm_90a", 384, 168, 227 * 1024 + 1024, {"registers": 1, "shared memory": 1, "threads": 5, "blocks": 32}),
        # 33 registers are allocated as 40; 100 threads as 4 warps.
        ("sm_80", 100, 33, 1, {"registers": 12, "shared memory": 1312, "threads": 16, "blocks": 32}),
        # A quarter of the registers holds 5 warps of 96 registers, so that the fifth block of 4 warps is the last.
        ("sm_80", 128, 96, 1024, {"registers": 5, "shared memory": 164, "threads": 16, "blocks": 32}),
    ],
)
def test_limits(arch, threads, registers, shared, expected):
    assert block_limits(get_arch(arch), threads, registers, shared) == expected


def kernel(**launch) -> Kernel:
    return Kernel("k", Launch(**launch), Used(registers=64, stack=0, static_shared=0, constant=0, spill_stores=0, spill_loads=0))


def test_the_reserved_kilobyte_counts_once():
    """163 KB fit once into the 164 KB of an sm_80; from sm_90 on a cubin's static size has the reserved kilobyte already."""
    assert resources(kernel(block=(128, 1, 1), dynamic_shared=163 * 1024), get_arch("sm_80")).blocks_per_sm == 1
    assert resources(kernel(block=(128, 1, 1), dynamic_shared=163 * 1024 + 1), get_arch("sm_80")).blocks_per_sm == 0
    hopper = resources(kernel(block=(128, 1, 1), dynamic_shared=228 * 1024), get_arch("sm_90a"))
    assert (hopper.blocks_per_sm, hopper.limited_by) == (1, "shared memory")


def test_what_the_host_decides_is_unknown():
    found = resources(kernel(), get_arch("sm_80"))
    assert (found.threads, found.dynamic_shared, found.blocks_per_sm, found.limited_by) == (None,) * 4
