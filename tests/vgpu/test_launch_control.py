# ruff: noqa: E501 -- rows of tables in one line
"""Cluster launch control: clusters that do the work of others instead of their launch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ptx_text import kernel, run

from fa4.vgpu import (
    DataRaceError,
    DeadlockError,
    Gpu,
    LaunchControlError,
    MisalignedError,
    PendingCopyError,
    Program,
    PtxSyntaxError,
    UninitializedError,
    UnsupportedInstructionError,
    VgpuError,
)

SCHEDULES = [("round_robin", 0), ("random", 0), ("random", 1), ("priority", 0), ("priority", 1), ("priority", 2)]

ASK = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [answer], [full];"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 16;"
WAIT = "W:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [full], %r2;\n@!%p2 bra W;"
HANDLE = "{{\n.reg .b128 %handle;\nmov.b128 %handle, {{%d4, %d5}};\n{}\n}}\n"
CANCELED = "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %handle;"
FIRST = "@%p3 clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r1, %handle;"

# Two warps; thread 0 asks for the next CTA while all work on this one: every thread counts once in the word of the CTA.
STAY = f"""
.shared .align 16 .b8 answer[32];
.shared .align 8 .b64 full;
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, 0;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared::cta.b64 [full], 1;
@%p1 fence.mbarrier_init.release.cluster;
SYNC
LOOP:
@%p1 {EXPECT}
@%p1 {ASK}
mul.wide.u32 %d3, %r1, 4;
add.u64 %d3, %d3, %d1;
red.global.add.u32 [%d3], 1;
{WAIT}
ld.shared.v2.b64 {{%d4, %d5}}, [answer];
{HANDLE.format(CANCELED)}
{HANDLE.format(FIRST)}
fence.proxy.async.shared::cta;
SYNC
xor.b32 %r2, %r2, 1;
@%p3 bra LOOP;
"""
SYNC = {1: "bar.sync 0;", 2: "barrier.cluster.arrive;\nbarrier.cluster.wait;"}
PLACE = "setp.eq.u32 %p1, %r0, 0;"
PAIR = (
    STAY.replace(PLACE, f"{PLACE}\nmov.u32 %r3, %cluster_ctarank;\nor.b32 %r4, %r3, %r0;\nsetp.eq.u32 %p4, %r4, 0;")
    .replace(f"@%p1 {ASK}", f"@%p4 {ASK}".replace("bytes.b128", "bytes.multicast::cluster::all.b128"))
    .replace("fence.proxy", "@%p3 add.u32 %r1, %r1, %r3;\nfence.proxy")
)
"""The leader asks for both; an answer names the first CTA of a cluster, which is the leader's."""


def on(schedule="round_robin", seed=0, **options):
    return Gpu("sm_100a", schedule=schedule, seed=seed, **options)


def stay(body=STAY, *, gpu=None, grid=11, cluster=None):
    gpu = gpu or on()
    _, out, _ = run(body.replace("SYNC", SYNC[2 if cluster else 1]), gpu=gpu, threads=64, grid=grid, cluster=cluster)
    return out, gpu.reports[0]


@pytest.mark.parametrize("resident", [1, 3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("delay", ["late", "early"])
@pytest.mark.parametrize("checks", [pytest.param("basic", marks=pytest.mark.slow), "isa"])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_every_cta_is_done_once(schedule, seed, checks, delay, resident):
    out, report = stay(gpu=on(schedule, seed, checks=checks, delay=delay, resident=resident))
    assert out[:12].tolist() == [64] * 11 + [0]
    started = report.by_opcode["ret"] // 2
    assert report.by_opcode["red.global.add.u32"] == 2 * 11
    assert min(11, resident) <= started <= 11
    if resident == 1 and schedule == "round_robin":  # in the others requests may fail for no reason
        assert started == 1
        assert report.by_opcode[ASK.split(maxsplit=1)[0]] == 22  # by both warps, of which one has a lane that asks; the last is in vain


@pytest.mark.parametrize("resident", [2, 4])
@pytest.mark.parametrize("delay", ["late", "early"])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_both_ctas_of_a_pair_hear_the_answer(schedule, seed, delay, resident):
    out, _ = stay(PAIR, gpu=on(schedule, seed, checks="isa", delay=delay, resident=resident), grid=12, cluster=(2,))
    assert out[:13].tolist() == [64] * 12 + [0]


def test_a_pair_whose_other_cta_does_not_hear_waits_for_ever():
    with pytest.raises(DeadlockError, match=r"CTA \(1, 0, 0\) warp 0: waits for"):
        stay(PAIR.replace(".multicast::cluster::all", ""), grid=4, cluster=(2,))


def test_several_processes_do_what_one_does():
    (one, first), (two, second) = (stay(gpu=on(processes=count, resident=2)) for count in (1, 2))
    assert np.array_equal(one, two)
    assert replace(first, seconds=0.0) == replace(second, seconds=0.0)


def test_coordinates_of_a_grid():
    """The number of the next CTA, from single coordinates and from a vector, which must agree."""
    number = "mad.lo.u32 %r{to}, %r{z}, 3, %r{y};\nmad.lo.u32 %r{to}, %r{to}, 4, %r{x};\n"
    texts = [HANDLE.format(FIRST.replace("%r1,", f"%r{10 + i},").replace("::x", f"::{axis}")) for i, axis in enumerate("xyz")]
    vector = "@%p3 clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r13, %r14, %r15, %r16}, %handle;"
    texts.append(HANDLE.format(vector))
    texts.append(number.format(to=1, x=10, y=11, z=12) + number.format(to=17, x=13, y=14, z=15))
    texts.append("setp.ne.and.u32 %p6, %r1, %r17, %p3;\n@%p6 trap;")
    first = "".join(f"mov.u32 %r{10 + i}, %ctaid.{axis};\nmov.u32 %r{13 + i}, 0;\n" for i, axis in enumerate("xyz"))
    body = STAY.replace(HANDLE.format(FIRST), "\n".join(texts)).replace("SYNC", SYNC[1])
    body = body.replace("mov.u32 %r1, %ctaid.x;", first + number.format(to=1, x=10, y=11, z=12))
    gpu, out = on(resident=6), np.zeros(64, np.uint32)
    gpu.register_buffer(0x40000, out, "out")
    gpu.launch(Program.parse(kernel(body)), "k", (4, 3, 2), (64,), 0, [p.to_bytes(8, "little") for p in (0x10000, 0x40000, 0x80000)])
    assert out[:25].tolist() == [64] * 24 + [0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ((WAIT, ""), (PendingCopyError, DataRaceError, UninitializedError), "before the asynchronous copy to it has been waited for|never written|nothing orders this behind the write"),
        (("@%p3 bra LOOP;", f"@%p3 bra LOOP;\n@%p1 {EXPECT}\n@%p1 {ASK}"), LaunchControlError, "a request after the CTA has seen one fail"),
        (("@%p3 clusterlaunchcontrol", "clusterlaunchcontrol"), LaunchControlError, "the first CTA of a request that failed"),
        (("mov.b128 %handle, {%d4, %d5};", "mov.b128 %handle, {%d5, %d4};"), LaunchControlError, "is no answer of clusterlaunchcontrol"),
        ((f"{ASK}", f"{ASK}".replace("[answer]", "[answer+8]")), MisalignedError, "the answer's shared address"),
        ((f"@%p1 {EXPECT}\n", ""), DeadlockError, "1 of 1 arrivals and -16 bytes are missing"),
        ((f"{WAIT}\nld", "exit;\nld"), (PendingCopyError, DataRaceError), "ends before the answer to a request is in its shared memory|may end before an access to its memory by launch control"),
    ],
)  # fmt: skip
def test_misuse(change, error, message):
    """The kernel without the change passes in ``test_every_cta_is_done_once``."""
    old, new = change
    assert STAY.count(old) >= 1
    for schedule, seed in SCHEDULES:
        with pytest.raises(error, match=message):
            stay(STAY.replace(old, new), gpu=on(schedule, seed, checks="isa", resident=2))


def test_an_answer_must_not_be_overwritten_while_a_warp_reads():
    """Thread 0 asks again as soon as it has read the answer itself; a second mbarrier and barrier keep everything else in step."""
    early = STAY.replace("fence.proxy.async.shared::cta;\nSYNC", f"@%p1 {EXPECT}\n@%p1 {ASK}\nfence.proxy.async.shared::cta;\nSYNC")
    early = early.replace(f"@%p1 {EXPECT}\n@%p1 {ASK}\nmul", "mul").replace("SYNC\nLOOP:", f"SYNC\n@%p1 {EXPECT}\n@%p1 {ASK}\nLOOP:")
    early = early.replace(f"@%p1 {EXPECT}\n@%p1 {ASK}\nfence.proxy", f"and.pred %p6, %p1, %p3;\n@%p6 {EXPECT}\n@%p6 {ASK}\nfence.proxy")
    clean = early.replace("and.pred %p6", "SYNC\nand.pred %p6")
    found = set()
    for schedule, seed in SCHEDULES:
        out, _ = stay(clean, gpu=on(schedule, seed, checks="isa", resident=2))
        assert out[:12].tolist() == [64] * 11 + [0]
        with pytest.raises(VgpuError) as caught:
            stay(early, gpu=on(schedule, seed, checks="isa", resident=2))
        found.add(caught.type)
    assert DataRaceError in found <= {DataRaceError, PendingCopyError, DeadlockError}  # deadlock: a phase overrun


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_without_a_barrier_warps_read_different_answers(schedule, seed):
    """A race, or, where a warp sleeps through a phase, CTAs that only the other one has done."""
    body = STAY.replace("fence.proxy.async.shared::cta;\nSYNC", "fence.proxy.async.shared::cta;")
    try:
        out, _ = stay(body, gpu=on(schedule, seed, checks="isa", resident=2))
    except (PendingCopyError, DataRaceError, DeadlockError):
        return
    assert out[:11].min() == 32


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (".reg .b128 %q;\nst.shared.b128 [%r1], %q;", PtxSyntaxError),
        (".reg .b128 %q;\nadd.u64 %d1, %q, %d1;", PtxSyntaxError),
        (".reg .b128 %q;\nmov.b128 %q, %d1;", UnsupportedInstructionError),
        ("clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %d1;", UnsupportedInstructionError),
        (ASK.replace("[answer], [full]", "[%r1], [%r2]").replace(".async", ""), UnsupportedInstructionError),
    ],
)
def test_other_uses_of_128_bits_are_refused(text, error):
    with pytest.raises(error):
        run(text, gpu=on(unwritten="nan"))
