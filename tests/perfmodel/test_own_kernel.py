"""Any CuTe-DSL function: recorded under ``attach``, replayed, shown as a timeline."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cutlass.cute.runtime import from_dlpack
from sum_kernel import THREADS, exponentials

from fa4.perfmodel import Recorder, preset, ptx_schedule, replay, sass_schedule, write_timeline
from fa4.vgpu import attach

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]


def test_own_kernel(tmp_path):
    x, y = np.ones(4 * THREADS, np.float32), np.zeros(4 * THREADS, np.float32)
    with attach("sm_90a") as gpu:
        gpu.observer = recorder = Recorder()
        exponentials(from_dlpack(x), from_dlpack(y))
    assert (y == 2**8 - 1).all()
    (trace,) = recorder.traces
    assert (trace.arch, trace.grid, len(trace.ctas)) == ("sm_90a", (4, 1, 1), 4)
    machine = preset("sm_90a").changed(jitter=0)
    reports = {}
    for make in (sass_schedule, ptx_schedule):
        schedule = make(trace)
        reports[make] = replay(trace, schedule, machine, clusters=[0], timeline=True)
    reasons = set(sass_schedule(trace).unaligned.values())
    assert reasons == {"the path has 1 special functions, the PTX 8"}  # nothing in the loop says how often it goes round
    assert reports[sass_schedule].busy == reports[ptx_schedule].busy
    report = reports[sass_schedule]
    assert report.busy["mufu"] * report.cycles * 4 == pytest.approx(2 * 8 * machine.mufu.value)  # two warps, eight each
    assert report.cycles > machine.launch.value + machine.global_latency.value
    assert any(stall.place.endswith(f"sum_kernel.py:{line}") for stall in report.stalls for line in range(15, 25))
    write_timeline(tmp_path / "t.json", report, sass_schedule(trace))
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    together = replay(trace, sass_schedule(trace), machine, resident=4)
    assert together.cycles < 4 * report.cycles
