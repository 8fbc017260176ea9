"""Traces hold what a kernel did, and nothing of when."""

from __future__ import annotations

from collections import Counter

import pytest

from fa4.errors import ModelError
from fa4.perfmodel import trace as module
from fa4.perfmodel.trace import Recorder, Trace
from fa4.vgpu import Gpu, Program

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]


def test_events_of_the_forward(trace):
    """Two query tiles of 128, two key blocks: the numbers follow from the kernel's roles."""
    (cta,) = trace.ctas
    assert sum(e.data[0] for e in cta.warps[0].events if e.kind == "tld") == 2 * 128  # columns of S
    assert Counter(event.kind for event in cta.warps[12].events)["mma"] == 2 * 2 * (4 + 8)  # K = 16: D 64 for S, 128 keys for O
    loads = [event for event in cta.warps[13].events if event.kind == "load"]
    assert sum(event.data[0] for event in loads) == 2 * 64 * (256 + 2 * 256)
    flop = sum(2 * e.data[1] * e.data[2] * e.data[3] for e in cta.warps[12].events if e.kind == "mma")
    assert flop == 4 * 256 * 256 * 64


@pytest.mark.parametrize("how", [{"schedule": "priority", "seed": 3}, {"schedule": "random", "seed": 1}, {"delay": "early"}], ids=str)
def test_a_trace_does_not_depend_on_the_schedule(record, trace, how):
    assert record(**how).data() == trace.data()


SPIN = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p0)
{
.reg .pred %p<9>;
.reg .b32 %r<9>;
.reg .b64 %d<9>;
.shared .align 8 .b64 bar;
ld.param.u64 %d0, [p0];
mov.u32 %r0, %tid.x;
setp.ge.u32 %p0, %r0, 32;
@%p0 bra WAIT;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [bar], 32;
bar.sync 0;
mbarrier.arrive.shared.b64 _, [bar];
bra SLOW0;
SLOW0: bra SLOW1;
SLOW1: bra SLOW2;
SLOW2: bra SLOW3;
SLOW3:
st.release.gpu.global.u32 [%d0], 1;
bra DONE;
WAIT:
bar.sync 0;
AGAIN:
mbarrier.test_wait.parity.shared.b64 %p2, [bar], 0;
mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0;
@!%p3 bra AGAIN;
LOOK:
ld.acquire.gpu.global.u32 %r1, [%d0];
setp.ne.u32 %p4, %r1, 1;
@%p4 bra LOOK;
DONE:
ret;
}
"""


def spun(seed):
    import numpy as np

    gpu = Gpu("sm_90a", schedule="random", seed=seed)
    gpu.register_buffer(0x1000, np.zeros(4, np.uint32), "flag")
    gpu.observer = recorder = Recorder()
    gpu.launch(Program.parse(SPIN), "k", (1,), (64,), 0, [(0x1000).to_bytes(8, "little")])
    return recorder.traces[0].ctas[0].warps[1]


def test_loops_that_look_for_something_are_one_event(monkeypatch):
    once = [spun(seed) for seed in range(8)]
    looks = [[e for e in warp.events if e.kind == "poll"] for warp in once]
    assert all(len(found) == 1 and found[0].data[1] == 1 for found in looks)
    monkeypatch.setattr(module, "_TRIED_AGAIN", ())
    assert any(len([e for e in spun(seed).events if e.kind == "poll"]) > 1 for seed in range(8))


def test_saved_and_loaded(trace, tmp_path):
    trace.save(tmp_path / "a.trace")
    loaded = Trace.load(tmp_path / "a.trace")
    assert loaded == trace
    assert loaded.cubin == trace.cubin != b""


def test_only_some_clusters(artifact):
    recorder = Recorder(clusters=1)
    gpu = Gpu("sm_90a")
    gpu.observer = recorder
    gpu.launch(Program.parse(".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry k() {\nret;\n}"), "k", (4,), (32,), 0, [])
    assert [cta.index for cta in recorder.traces[0].ctas] == [0]


def test_what_is_no_trace(trace, tmp_path):
    path = tmp_path / "a.trace"
    path.write_bytes(b"\x1f\x8bnonsense")
    with pytest.raises(ModelError, match="cannot be read"):
        Trace.load(path)
    with pytest.raises(ModelError, match="must have format 1"):
        Trace.from_data({"format": 99})
    data = trace.data()
    del data["grid"]
    with pytest.raises(ModelError, match="is damaged"):
        Trace.from_data(data)
