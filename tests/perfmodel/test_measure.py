"""Microbenchmarks: right results on the virtual GPU, right numbers from known clocks, a clear error without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cutlass.cute.runtime import from_dlpack

from fa4.arch import get_arch
from fa4.cli import main
from fa4.errors import DeviceError
from fa4.perfmodel import Recorder, preset, replay, sass_schedule
from fa4.perfmodel import microbenchmarks as kernels
from fa4.perfmodel.measure import benchmarks, measure, numbers, rows
from fa4.vgpu import attach

BY_NAME = {m.name: m for m in kernels.MICROBENCHMARKS}
QUICK = ("special_rate", "product_many")
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BY_NAME]


def executed(name, count, arch="sm_100a"):
    """(results, trace) on the virtual GPU."""
    x, y, clocks = kernels.inputs(), np.full(BY_NAME[name].threads, np.nan, np.float32), np.zeros(1, np.int64)
    with attach(arch) as gpu:
        gpu.observer = recorder = Recorder()
        kernels.launch(*map(from_dlpack, (x, y, clocks)), count, BY_NAME[name].work)
    return y, recorder.traces[-1]


@pytest.mark.compile
@pytest.mark.vgpu
@pytest.mark.parametrize("name", EVERY)
def test_right_results(name):
    for count in (1, 3):
        found, _ = executed(name, count)
        wanted = BY_NAME[name].result(count, BY_NAME[name].threads)
        assert found == pytest.approx(np.asarray(wanted, np.float64), rel=1e-4)


def known_clocks(machine):
    """Clocks of a trip on a machine of these numbers."""
    m, value = kernels, {name: p.value for name, p in machine.parameters()}
    half = value["arrive"] + value["wake"]
    wake = half * 2 / 3

    def tensor(name, columns):
        return columns * 128 / value[f"tmem_{name}"] + value[f"tmem_{name}_latency"]

    product = 2 * 128 * m.N * m.K_STEP / value["tcgen05"]
    return value, {
        "special_latency": m.OPS * value["mufu_latency"],
        "special_rate": m.OPS * value["mufu"],
        "fma_latency": m.OPS * value["fma_latency"],
        "shared_rate": m.OPS * 128 * 16 / value["smem"],
        "shared_latency": m.OPS * value["lds_latency"],
        "global_latency": value["global_latency"],
        "barrier": m.OPS * value["barrier"],
        "hand_over": 2 * half,
        "copy_small": value["tma_latency"] + 2048 / value["tma"] + wake,
        "copy_large": value["tma_latency"] + 32768 / value["tma"] + wake,
        **{f"tensor_{n}_{size}": tensor(n, columns) for n in ("load", "store") for size, columns in (("small", 8), ("large", 64))},
        "product_few": product + value["tcgen05_done"] + wake,
        "product_many": m.OPS * product + value["tcgen05_done"] + wake,
    }


def test_numbers_of_known_clocks():
    machine = preset("sm_100a")
    value, clocks = known_clocks(machine)
    assert set(clocks) == set(BY_NAME)
    found = numbers(clocks)
    assert found == pytest.approx({name: value[name] for name in found}, rel=1e-6)
    table = rows(machine, found)
    assert len(table) == len(found)
    assert all(row["inside"] for row in table)
    assert not rows(machine, numbers({**clocks, "special_latency": 2000}))[0]["inside"]


def test_what_an_architecture_can_run():
    names = {arch: {m.name for m in benchmarks(get_arch(arch))} for arch in ("sm_80", "sm_90a", "sm_100a")}
    assert names["sm_80"] < names["sm_90a"] < names["sm_100a"] == set(BY_NAME)
    _, clocks = known_clocks(preset("sm_100a"))
    for arch, known in names.items():
        found = numbers({name: clocks[name] for name in known})
        assert set(found) <= {name for name, _ in preset(arch).parameters()}


@pytest.mark.compile
@pytest.mark.vgpu
def test_the_model_reproduces_its_own_number():
    """The kernel is made so that what it measures limits it: replayed, it takes what the machine says of that."""
    machine = preset("sm_100a").changed(jitter=0)
    cycles = []
    for count in (2, 4):
        _, trace = executed("product_many", count)
        cycles.append(replay(trace, sass_schedule(trace), machine).cycles)
    least = kernels.OPS * 2 * 128 * kernels.N * kernels.K_STEP / machine.tcgen05.value
    assert least < (cycles[1] - cycles[0]) / 2 < 1.15 * least


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    with pytest.raises(DeviceError, match="there are 0 CUDA devices"):
        measure()
    assert main(["model", "--measure"]) == 2
    assert "there are 0 CUDA devices" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.compile
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu():
    """Results are right, and what is not a guess is met: the special functions of a warp, and the clock."""
    arch, timings = measure()
    found = numbers({name: timing.clocks for name, timing in timings.items()})
    assert found["mufu"] == pytest.approx(preset(arch).mufu.value, rel=0.1)
    assert all(value > 0 for value in found.values())
    for timing in timings.values():
        assert 0.2e9 < timing.clocks / timing.seconds < 4e9
