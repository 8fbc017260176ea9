"""The order of instructions: a list schedule of PTX, and that of ptxas by alignment."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fa4.errors import ModelError
from fa4.perfmodel.align import anchor
from fa4.perfmodel.list_schedule import cost, order, ptx_schedule
from fa4.perfmodel.machine import preset
from fa4.perfmodel.machine_code import control, machine_code
from fa4.perfmodel.machine_schedule import sass_schedule
from fa4.perfmodel.simulation import replay
from fa4.perfmodel.trace import Event
from fa4.vgpu import Program

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]


def mufus(trace):
    """Special functions that each warp of a trace executes."""
    counts = []
    for warp in trace.ctas[0].warps:
        blocks = (trace.code.blocks[index] for index in warp.path)
        counts.append(sum(op.name in ("ex2", "lg2", "rcp") for block in blocks for op in block.all))
    return counts


def issued(schedule, pipe):
    return [sum(schedule.table[s].pipe == pipe for s in warp.steps) for _, warp in sorted(schedule.warps.items())]


def test_every_warp_is_aligned(trace):
    """No event decides which path is right but those that synchronise, so the special functions on it are an independent check."""
    schedule = sass_schedule(trace)
    assert schedule.unaligned == {}
    assert schedule.spills == 0
    assert issued(schedule, "mufu") == pytest.approx(mufus(trace), abs=1)  # a reciprocal whose result is not used
    assert max(issued(schedule, "mufu")) > 190
    for (cta, warp), found in schedule.warps.items():
        happened = [e.kind for e in trace.ctas[cta].warps[warp].events if e.kind in ("wait", "arrive", "mma", "commit", "load", "store")]
        assert [e.kind for e in found.events if e.kind in happened] == happened


def test_both_orders_lead_to_the_same_work(trace):
    machine = preset("sm_100a")
    reports = [replay(trace, make(trace), machine) for make in (ptx_schedule, sass_schedule)]
    assert reports[0].flop == reports[1].flop == 4 * 256 * 256 * 64
    assert reports[0].cycles == pytest.approx(reports[1].cycles, rel=0.15)
    assert "fa4/kernels/common/barrier.py" in reports[1].stalls[0].place  # all wait for the last warp before tensor memory is freed


def test_a_warp_that_does_not_fit_is_reported(trace):
    """A commit too many: the machine code has no such path, and the PTX's order takes its place."""
    (cta,) = trace.ctas
    warp = cta.warps[12]
    i = next(i for i, e in enumerate(warp.events) if e.kind == "commit")
    spoiled = replace(warp, events=(*warp.events[:i], Event("cluster_wait", warp.events[i].op, ()), *warp.events[i:]))
    with pytest.raises(ModelError, match="is not on the path of the warp"):
        sass_schedule(replace(trace, ctas=(replace(cta, warps=(*cta.warps[:12], spoiled, *cta.warps[13:])),)))
    fewer = replace(warp, events=tuple(e for e in warp.events if e.kind != "mma"))
    schedule = sass_schedule(replace(trace, ctas=(replace(cta, warps=(*cta.warps[:12], fewer, *cta.warps[13:])),)))
    assert list(schedule.unaligned) == [(0, 12)]
    assert "event" in schedule.unaligned[0, 12]


def test_machine_code_of_another_kernel_is_refused(trace):
    with pytest.raises(ModelError, match="has no kernel 'other'"):
        machine_code(trace.cubin, "other")
    with pytest.raises(ModelError, match="is no cubin"):
        sass_schedule(trace, b"nothing")
    strange = replace(trace, ctas=(replace(trace.ctas[0], warps=(replace(trace.ctas[0].warps[15], events=(Event("mma", 0, ()),)),)),))
    with pytest.raises(ModelError, match="does not fit the trace"):
        sass_schedule(strange)


def test_control_bits():
    assert control(0x0022A20008000100) == (1, 2, 1, (1,))
    assert control(7 << 49 | 7 << 46 | 5 << 41) == (5, None, None, ())


def test_stall_counts_make_sense(trace):
    """Latencies of the arithmetic that ptxas knows: a dependent FMNMX or FADD never comes before 4 clocks, unless something is between."""
    code = machine_code(trace.cubin, trace.kernel)
    found = []
    for first, then, how in zip(code.instructions, code.instructions[1:], code.controls, strict=False):
        result = first.operands.split(",")[0]
        if first.opcode in ("FADD", "FMUL", "FMNMX") and result in re.findall(r"\w+", then.operands.partition(",")[2]):
            found.append(how.stall)
    assert len(found) > 5
    assert min(found) >= 4


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("UTCHMMA", "mma"),
        ("UTCHMMA.2CTA", "mma"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT", "wait"),
        ("SYNCS.CCTL.IV", ""),
        ("UBLKCP.S.S", "copy"),
        ("UBLKCP.S.G", "load"),
        ("FFMA2", ""),
    ],
)
def test_anchors(opcode, kind):
    assert anchor(opcode) == kind


LOOP = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p0)
{
.reg .b32 %r<20>;
.reg .b64 %d<9>;
ld.param.u64 %d0, [p0];
ex2.approx.ftz.f32 %r1, %r0;
add.f32 %r2, %r1, %r1;
ex2.approx.ftz.f32 %r3, %r0;
mov.b32 %r5, %r3;
add.f32 %r4, %r5, %r5;
bar.sync 0;
st.global.u32 [%d0], %r2;
st.global.u32 [%d0+4], %r4;
ret;
}
"""


def test_a_list_schedule_keeps_dependencies_and_the_order_of_events():
    block = Program.parse(LOOP).kernels["k"].blocks[0]
    ops = block.all
    positions = {i: place for place, i in enumerate(order(block))}
    assert sorted(positions) == list(range(len(ops)))
    names = [ops[i].name for i in order(block)]
    assert names.index("add") > names.index("ex2") + 1  # both ex2 before the first that needs one
    written = {r: i for i, op in enumerate(ops) for r in op.written}
    assert all(positions[written[r]] < positions[i] for i, op in enumerate(ops) for r in op.read if r in written)
    assert [cost(op).pipe for op in ops if op.name in ("ex2", "mov")] == ["mufu", "mufu", "none"]
