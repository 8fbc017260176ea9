# ruff: noqa: E501 -- kernels and rows of tables in one line
"""setmaxnreg and its pool, fences, dependent launches, reductions of floats across a warp."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_text import kernel, run

from fa4.vgpu import BarrierError, DeadlockError, DivergenceError, Gpu, Program, UnsupportedInstructionError

ROLES = """
setp.ge.u32 %p1, %r0, 128;
@%p1 bra CONSUMER;
setmaxnreg.dec.sync.aligned.u32 {small};
bra DONE;
CONSUMER:
setmaxnreg.inc.sync.aligned.u32 {large};
DONE:
st.global.u32 [%d12], 1;
"""


@pytest.mark.parametrize("schedule", ["round_robin", "random", "priority"])
def test_registers_move_from_producer_to_consumers(schedule):
    """384 threads have 168 each: 24 for one warpgroup leave 240 for two others, and not one step more."""
    gpu = Gpu("sm_90a", schedule=schedule)
    assert (run(ROLES.format(small=24, large=240), threads=384, gpu=gpu)[1][:384] == 1).all()
    with pytest.raises(DeadlockError, match=r"248 registers per thread: it has 168, the pool .* for a warp at PTX line"):
        run(ROLES.format(small=24, large=248), threads=384, gpu=gpu)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (ROLES.format(small=176, large=176), BarrierError, "setmaxnreg.dec to 176 registers in warp 0, which has 168"),
        (ROLES.format(small=24, large=160), BarrierError, "setmaxnreg.inc to 160 registers in warp [4-9]|1[01], which has 168"),
        (ROLES.format(small=20, large=240), UnsupportedInstructionError, "20 registers: must be a multiple of 8"),
        (ROLES.format(small=24, large=264), UnsupportedInstructionError, "264 registers"),
        (ROLES.format(small=24, large=176).replace("%r0, 128", "%r0, 160"), DivergenceError, "warp . executes setmaxnreg.(inc|dec) and warp . (inc|dec), in one warpgroup"),
        (ROLES.format(small=24, large=176).replace("%r0, 128", "%r0, 144"), DivergenceError, "all lanes of the warp"),
    ],
)  # fmt: skip
def test_misuse_of_setmaxnreg(body, error, message):
    run(ROLES.format(small=24, large=176), threads=384, gpu=Gpu("sm_90a"))
    with pytest.raises(error, match=message):
        run(body, threads=384, gpu=Gpu("sm_90a"))


def test_the_pool_is_what_the_kernel_says():
    text = kernel(ROLES.format(small=24, large=104)).replace("\n{", "\n.maxnreg 64\n{", 1)
    gpu = Gpu("sm_90a")
    for address, name in ((0x10000, "a"), (0x20000, "b"), (0x30000, "c")):
        gpu.register_buffer(address, 4096, name)
    params = [a.to_bytes(8, "little") for a in (0x10000, 0x20000, 0x30000)]
    gpu.launch(Program.parse(text), "k", (1,), (256,), 0, params)
    with pytest.raises(DeadlockError, match="112 registers per thread: it has 64"):
        gpu.launch(Program.parse(text.replace(" 104;", " 112;")), "k", (1,), (256,), 0, params)


FENCES = """
membar.cta; membar.gl; membar.sys;
fence.sc.gpu; fence.acq_rel.cluster; fence.acquire.sys; fence.release.cta;
fence.mbarrier_init.release.cluster;
fence.proxy.async; fence.proxy.async.global; fence.proxy.async.shared::cta; fence.proxy.async.shared::cluster; fence.proxy.alias;
fence.proxy.tensormap::generic.release.gpu;
fence.proxy.tensormap::generic.acquire.gpu [%d0], 128;
fence.acquire.sync_restrict::shared::cluster.cluster;
griddepcontrol.wait;
griddepcontrol.launch_dependents;
"""


class Recorder:
    def __init__(self):
        self.events = []

    def launch(self, launch, program):
        self.ops = launch.kernel.ops

    def block(self, cta, warp, block, lanes):
        pass

    def event(self, cta, warp, op, lanes, values):
        self.events.append(self.ops[op].opcode)


def test_fences_are_known_and_those_of_proxies_observed():
    recorder = Recorder()
    gpu = Gpu("sm_90a")
    gpu.observer = recorder
    run(FENCES, gpu=gpu)
    proxies = [".".join(opcode.split(".")[:3]) for opcode in recorder.events if "proxy" in opcode]
    assert proxies == ["fence.proxy.async"] * 4 + ["fence.proxy.alias"] + ["fence.proxy.tensormap::generic"] * 2
    for text in ("fence.proxy.texture;", "griddepcontrol.stop;"):
        with pytest.raises(UnsupportedInstructionError):
            run(text, gpu=Gpu("sm_90a"))


VALUES = np.array([*range(-10, 20), 0.0, -0.0], np.float32)


@pytest.mark.parametrize("nans", [0, 1, 32])
@pytest.mark.parametrize("lanes", [32, 7])
@pytest.mark.parametrize("modifiers", ["", ".NaN", ".abs", ".abs.NaN"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_redux_of_floats(name, modifiers, lanes, nans):
    values = np.random.default_rng(3).permutation(VALUES)
    values[:nans] = np.nan
    mask = hex(2**lanes - 1)
    body = f"ld.global.f32 %r1, [%d11];\nsetp.ge.u32 %p1, %r0, {lanes};\n@%p1 bra DONE;\nredux.sync.{name}{modifiers}.f32 %r2, %r1, {mask};\nst.global.u32 [%d12], %r2;\nDONE:\n"
    source = np.zeros(4096, np.float32)
    source[:32] = values
    out = run(body, arrays=(source.view(np.uint32), None, None), gpu=Gpu("sm_100a"))[1][:lanes]
    x = np.abs(values[:lanes]) if "abs" in modifiers else values[:lanes]
    keep = x if "NaN" in modifiers else x[~np.isnan(x)]
    expected = np.float32(np.nan) if not keep.size or np.isnan(keep).any() else getattr(keep, name)()
    if np.isnan(expected):
        assert (out == 0x7FFFFFFF).all()
    else:
        assert (out.view(np.float32) == expected).all()
