"""GEMM tiles that CuTe-DSL compiled for sm_90a and sm_100a, executed on the virtual GPU and compared with float64."""

from __future__ import annotations

import functools
import re
import struct
import tempfile

import ml_dtypes
import numpy as np
import pytest

from fa4.vgpu import Gpu, Program

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}
SHARED = 160 * 1024


@functools.cache
def program(arch, **tile):
    import gemm_kernels

    kernel = gemm_kernels.HopperGemm if arch == "sm_90a" else gemm_kernels.BlackwellGemm
    with tempfile.TemporaryDirectory() as folder:
        return Program.parse(gemm_kernels.ptx(kernel(gemm_kernels.Tile(**tile)), arch, folder))


def operand(rng, rows, columns, dtype, transposed):
    """(values as float64, memory)."""
    values = rng.standard_normal((rows, columns)).astype(DTYPES[dtype])
    if dtype == "float32":  # what tf32 can hold
        values = (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return values.astype(np.float64), np.ascontiguousarray(values.T if transposed else values)


def check(arch, *, schedule="round_robin", seed=0, **tile):
    """Run one tile; every element must be within the error of float32 sums."""
    rng = np.random.default_rng(tile["m"] + tile["k"])
    code = program(arch, **tile)
    dtype, ctas = tile.get("dtype", "bfloat16"), tile.get("ctas", 1)
    A, a = operand(rng, tile["m"], tile["k"], dtype, tile.get("a_transposed", False))
    B, b = operand(rng, tile["n"], tile["k"], dtype, tile.get("b_transposed", False))
    d = np.full((tile["m"], tile["n"]), np.nan, np.float32)
    gpu = Gpu(arch, schedule=schedule, seed=seed)
    addresses = [1 << 20, 2 << 20, 3 << 20]
    for address, array, name in zip(addresses, (a, b, d), ("A", "B", "D"), strict=True):
        gpu.register_buffer(address, array, name, writable=name == "D")
    (name,) = code.kernels
    cluster = (ctas, 1, 1) if ctas > 1 else None
    gpu.launch(code, name, (ctas, 1, 1), (128, 1, 1), SHARED, [struct.pack("<Q", x) for x in addresses], cluster)
    bound = tile["k"] * 2.0**-24 * (np.abs(A) @ np.abs(B).T)
    assert (np.abs(d - A @ B.T) <= bound).all()
    return gpu.report().by_opcode


HOPPER = [
    {"m": 64, "n": 64, "k": 64},
    {"m": 64, "n": 128, "k": 128, "b_transposed": True},
    {"m": 64, "n": 96, "k": 64, "a_transposed": True, "dtype": "float16"},
    {"m": 64, "n": 64, "k": 32, "a_source": "registers"},
    {"m": 64, "n": 64, "k": 128, "dtype": "float8_e4m3fn"},
]


@pytest.mark.parametrize("tile", HOPPER, ids=str)
def test_hopper(tile):
    opcodes = check("sm_90a", **tile)
    form = re.compile(rf"wgmma\.mma_async.*n{tile['n']}")
    assert sum(bool(form.match(o)) for o in opcodes) == 1


@pytest.mark.parametrize(("schedule", "seed"), [("random", 0), ("priority", 0), ("priority", 1)])
def test_hopper_in_other_schedules(schedule, seed):
    check("sm_90a", schedule=schedule, seed=seed, **HOPPER[0])


BLACKWELL = [
    {"m": 128, "n": 64, "k": 64},
    {"m": 128, "n": 128, "k": 128, "b_transposed": True},
    {"m": 64, "n": 64, "k": 64, "a_transposed": True, "dtype": "float16", "load": "16x256b"},
    {"m": 64, "n": 64, "k": 32, "load": "16x64b"},
    {"m": 128, "n": 64, "k": 32, "load": "16x128b"},
    {"m": 128, "n": 64, "k": 32, "dtype": "float32"},
    {"m": 128, "n": 64, "k": 128, "dtype": "float8_e4m3fn"},
    {"m": 128, "n": 64, "k": 64, "a_source": "tensor"},
    {"m": 256, "n": 64, "k": 64, "ctas": 2},
    {"m": 256, "n": 128, "k": 64, "ctas": 2, "a_transposed": True, "b_transposed": True},
    {"m": 128, "n": 64, "k": 64, "ctas": 2},
    {"m": 256, "n": 64, "k": 64, "ctas": 2, "a_source": "tensor"},
]


@pytest.mark.parametrize("tile", BLACKWELL, ids=str)
def test_blackwell(tile):
    opcodes = check("sm_100a", **tile)
    assert any(re.match(rf"tcgen05\.mma\.cta_group::{tile.get('ctas', 1)}", o) for o in opcodes)


@pytest.mark.parametrize(("schedule", "seed"), [("random", 0), ("priority", 0), ("priority", 1)])
@pytest.mark.parametrize("tile", [BLACKWELL[0], BLACKWELL[6]], ids=str)
def test_blackwell_in_other_schedules(tile, schedule, seed):
    check("sm_100a", schedule=schedule, seed=seed, **tile)
