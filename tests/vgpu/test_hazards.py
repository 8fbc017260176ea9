"""Happens-before and proxy fences: every planted fault is found whatever the schedule, and its clean twin passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_text import run

import fa4
from fa4.testing import AttentionShape, make_inputs
from fa4.vgpu import Gpu, PendingCopyError, VgpuError
from fa4.vgpu.errors import DataRaceError, LaunchError, ProxyFenceError

pytestmark = pytest.mark.vgpu

SCHEDULES = [("round_robin", 0), ("random", 0), ("priority", 0), ("priority", 1)]

NEIGHBOUR = """
mov.u32 %r1, dynamic;
mad.lo.u32 %r2, %r0, 4, %r1;
xor.b32 %r3, %r0, 32;
mad.lo.u32 %r3, %r3, 4, %r1;
st.shared.u32 [%r2], %r0;
@SYNC
ld.shared.u32 %r4, [%r3];
st.global.u32 [%d11], %r4;
"""
REUSE = NEIGHBOUR.replace("@SYNC", "bar.sync 0;") + "@SYNC\nst.shared.u32 [%r2], 7;\n"
BY_MBARRIER = """
.shared .align 8 .b64 bar;
mov.u32 %r1, dynamic;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra MADE;
mbarrier.init.shared.b64 [bar], 32;
MADE:
@INIT
setp.lt.u32 %p2, %r0, 32;
@!%p2 bra READER;
mad.lo.u32 %r2, %r0, 4, %r1;
st.shared.u32 [%r2], %r0;
mbarrier.arrive@HOW.shared.b64 _, [bar];
bra END;
READER:
@WAIT
mad.lo.u32 %r2, %r0, 4, %r1;
ld.shared.u32 %r4, [%r2+-128];
st.global.u32 [%d11], %r4;
END:
"""
WAIT = "AGAIN:\nmbarrier.try_wait.parity.shared.b64 %p3, [bar], 0;\n@!%p3 bra AGAIN;"


def mbarrier(init="bar.sync 0;", how="", wait=WAIT):
    return BY_MBARRIER.replace("@INIT", init).replace("@HOW", how).replace("@WAIT", wait)


# (name, clean body, body with the fault, threads, error, part of the message)
FAULTS = [
    ("write then read", NEIGHBOUR.replace("@SYNC", "bar.sync 0;"), NEIGHBOUR.replace("@SYNC", ""), "nothing orders this behind"),
    ("read then write", REUSE.replace("@SYNC", "bar.sync 0;"), REUSE.replace("@SYNC", ""), "nothing orders this behind"),
    (
        "barriers apart",
        NEIGHBOUR.replace("@SYNC", "bar.sync 1, 64;"),
        NEIGHBOUR.replace("@SYNC", "bar.arrive 1, 64;"),
        "nothing orders this behind",
    ),
    ("mbarrier", mbarrier(), mbarrier(wait=""), "nothing orders this behind"),
    ("relaxed arrival", mbarrier(how=".release.cta"), mbarrier(how=".relaxed.cta"), "nothing orders this behind"),
    (
        "fence before relaxed arrival",
        mbarrier(how=".relaxed.cta").replace("mbarrier.arrive", "fence.acq_rel.cta;\nmbarrier.arrive"),
        mbarrier(how=".relaxed.cta"),
        "nothing orders this behind",
    ),
    ("mbarrier not ready", mbarrier(), mbarrier(init="bar.warp.sync -1;"), "mbarrier"),
]


def outcome(body, schedule, seed, arch="sm_90a", **options):
    return run(body, gpu=Gpu(arch, schedule=schedule, seed=seed, checks="hazards", unwritten="nan"), threads=64, shared=4096, **options)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize(("clean", "faulty", "message"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_races_in_shared_memory(clean, faulty, message, schedule, seed):
    outcome(clean, schedule, seed)
    with pytest.raises(VgpuError) as caught:
        outcome(faulty, schedule, seed)
    assert type(caught.value) is DataRaceError or "no mbarrier was initialised" in str(caught.value)
    assert message in str(caught.value)


def test_both_accesses_are_named():
    with pytest.raises(DataRaceError) as caught:
        outcome(NEIGHBOUR.replace("@SYNC", ""), "round_robin", 0)
    error = caught.value
    assert "the write by warp 1 of CTA (0, 0, 0) at PTX line" in error.message
    assert "st.shared.u32 [%r2], %r0;" in error.message
    assert error.place.warp == 0
    assert error.place.ptx_text == "ld.shared.u32 %r4, [%r3];"


def test_other_checks_do_not_look_at_order():
    run(NEIGHBOUR.replace("@SYNC", ""), gpu=Gpu(checks="basic"), threads=64, shared=4096)


def test_unknown_checks():
    with pytest.raises(LaunchError, match="checks='all': must be one of basic, hazards, isa"):
        Gpu(checks="all")


def test_neighbours_in_one_word_do_not_conflict():
    """Stores of 16 bits by two warps into halves of the same words."""
    body = """
    mov.u32 %r1, dynamic;
    and.b32 %r2, %r0, 31;
    shr.u32 %r3, %r0, 5;
    shl.b32 %r2, %r2, 2;
    mad.lo.u32 %r2, %r3, 2, %r2;
    add.u32 %r2, %r2, %r1;
    cvt.u16.u32 %h1, %r0;
    st.shared.b16 [%r2], %h1;
    """
    outcome(body, "round_robin", 0)
    with pytest.raises(DataRaceError):
        outcome(body.replace("mad.lo.u32 %r2, %r3, 2, %r2;", ""), "round_robin", 0)


def test_atomics_do_not_race_with_each_other():
    body = """
    mov.u32 %r1, dynamic;
    st.shared.u32 [%r1], 0;
    bar.sync 0;
    atom.shared.add.u32 %r2, [%r1], 1;
    """
    body = body.replace("st.shared", "setp.eq.u32 %p1, %r0, 0;\n@%p1 st.shared")
    outcome(body, "random", 0)
    with pytest.raises(DataRaceError):
        outcome(body.replace("bar.sync 0;", ""), "random", 0)


STORE = """
mov.u32 %r1, dynamic;
mad.lo.u32 %r2, %r0, 4, %r1;
st.shared.u32 [%r2], %r0;
@FENCE
bar.sync 0;
@LATE
setp.ne.u32 %p1, %r0, 0;
@%p1 bra END;
cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 256;
cp.async.bulk.commit_group;
@WAIT
END:
@REUSE
"""


def bulk_store(fence="fence.proxy.async.shared::cta;", late="", wait="cp.async.bulk.wait_group.read 0;", reuse=""):
    return STORE.replace("@FENCE", fence).replace("@LATE", late).replace("@WAIT", wait).replace("@REUSE", reuse)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_generic_writes_need_a_proxy_fence_of_the_writer(schedule, seed):
    a, _, _ = outcome(bulk_store(), schedule, seed)
    assert (a[:64] == np.arange(64)).all()
    fences = {"none": "", "of another proxy": "fence.proxy.async.global;", "of memory": "fence.acq_rel.cta;"}
    for fence in fences.values():
        with pytest.raises(ProxyFenceError, match=r"no fence.proxy.async follows the write by warp [01] of CTA \(0, 0, 0\) at PTX line"):
            outcome(bulk_store(fence), schedule, seed)
    with pytest.raises(ProxyFenceError, match="warp 1"):  # warp 0 fences when it is too late for the other
        outcome(bulk_store("setp.lt.u32 %p2, %r0, 32;\n@%p2 fence.proxy.async.shared::cta;"), schedule, seed)
    with pytest.raises(ProxyFenceError):  # behind what orders the write and the store
        outcome(bulk_store("", "fence.proxy.async.shared::cta;"), schedule, seed)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_source_is_not_overwritten_before_it_is_read(schedule, seed):
    reuse = "bar.sync 0;\nst.shared.u32 [%r2], 1;"
    outcome(bulk_store(reuse=reuse), schedule, seed)
    with pytest.raises(
        (DataRaceError, PendingCopyError), match=r"the read by bulk stores of warp 0|behind the write by|before a bulk copy has read"
    ):
        outcome(bulk_store(wait="", reuse=reuse), schedule, seed)
    with pytest.raises((DataRaceError, ProxyFenceError)):  # unfenced, where the store is issued last
        outcome(bulk_store(reuse="st.shared.u32 [%r2], 1;"), schedule, seed)


REFILL = """
.shared .align 8 .b64 bar;
mov.u32 %r1, dynamic;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [bar], 1;
@FENCE
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], 256, [bar];
A:
mbarrier.try_wait.parity.shared.b64 %p2, [bar], 0;
@!%p2 bra A;
mad.lo.u32 %r2, %r0, 4, %r1;
ld.shared.u32 %r3, [%r2];
@SYNC
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0+256], 256, [bar];
B:
mbarrier.try_wait.parity.shared.b64 %p2, [bar], 1;
@!%p2 bra B;
"""


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_buffer_is_not_refilled_while_it_is_read(schedule, seed):
    """By a bulk load, whose mbarrier must be ready for it."""
    body = REFILL.replace("@FENCE", "fence.mbarrier_init.release.cluster;")
    outcome(body.replace("@SYNC", "bar.sync 0;"), schedule, seed)
    with pytest.raises(VgpuError, match=r"nothing orders this behind the read by warp 1|asynchronous copy to it|no warp can run"):
        outcome(body.replace("@SYNC", ""), schedule, seed)
    for fence in ("", "fence.acq_rel.cta;"):
        with pytest.raises(ProxyFenceError, match=r"no fence.mbarrier_init or fence.proxy.async follows its initialisation"):
            outcome(REFILL.replace("@FENCE", fence).replace("@SYNC", "bar.sync 0;"), schedule, seed)


LEAVING = """
mov.u32 %r1, dynamic;
mov.u32 %r5, %cluster_ctarank;
st.shared.u32 [%r1], 1;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
setp.eq.u32 %p1, %r5, 0;
mapa.shared::cluster.u32 %r9, %r1, 1;
@%p1 ld.shared::cluster.u32 %r7, [%r9];
@SYNC
"""


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_cta_stays_while_others_use_its_memory(schedule, seed):
    """A relaxed barrier is enough: it orders execution."""
    options = {"grid": 2, "cluster": (2,)}
    body = LEAVING.replace("st.shared.u32 [%r1], 1;", "setp.eq.u32 %p2, %r0, 0;\n@%p2 st.shared.u32 [%r1], 1;")
    outcome(body.replace("@SYNC", "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;"), schedule, seed, **options)
    with pytest.raises(VgpuError, match=r"may end before an access to its memory by warp \d of CTA \(0, 0, 0\)|which has ended"):
        outcome(body.replace("@SYNC", ""), schedule, seed, **options)


MULTICAST = """
.shared .align 8 .b64 bar;
mov.u32 %r5, %cluster_ctarank;
mov.u32 %r8, bar;
or.b32 %r6, %r5, %r0;
setp.ne.u32 %p1, %r0, 0;
setp.eq.u32 %p2, %r6, 0;
@%p1 bra MADE;
mbarrier.init.shared.b64 [bar], 1;
fence.mbarrier_init.release.cluster;
MADE:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mov.b16 %h1, 3;
@%p2 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r8], %h1;
@WAIT
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""
ARRIVED = "AGAIN:\nmbarrier.try_wait.parity.shared.b64 %p3, [bar], 0;\n@!%p3 bra AGAIN;"


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_cta_stays_until_commits_of_its_pair_have_arrived(schedule, seed):
    """That the leader waits for its own copy of the arrival does not help; what GPUs are not known to punish only ``isa`` refuses."""
    options = {"schedule": schedule, "seed": seed, "unwritten": "nan"}
    leader_only = f"setp.ne.u32 %p4, %r5, 0;\n@%p4 bra OVER;\n{ARRIVED}\nOVER:"
    for wait, checks in ((ARRIVED, "isa"), (leader_only, "hazards")):
        run(MULTICAST.replace("@WAIT", wait), gpu=Gpu("sm_100a", checks=checks, **options), shared=64, grid=2, cluster=(2,))
    for wait in (leader_only, ""):
        with pytest.raises(DataRaceError, match=r"CTA \(1, 0, 0\) may end before (a commit arrives|an access .* by tcgen05 of)"):
            run(MULTICAST.replace("@WAIT", wait), gpu=Gpu("sm_100a", checks="isa", **options), shared=64, grid=2, cluster=(2,))


SENDING = """
.shared .align 8 .b64 bar;
mov.u32 %r1, dynamic;
mad.lo.u32 %r2, %r0, 4, %r1;
mov.u32 %r5, %cluster_ctarank;
mov.u32 %r8, bar;
or.b32 %r6, %r5, %r0;
setp.ne.u32 %p1, %r0, 0;
setp.eq.u32 %p2, %r6, 0;
st.shared.u32 [%r2], %r0;
fence.proxy.async;
@%p1 bra MADE;
mbarrier.init.shared.b64 [bar], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
MADE:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
add.u32 %r9, %r1, 128;
mapa.shared::cluster.u32 %r9, %r9, 1;
mapa.shared::cluster.u32 %r10, %r8, 1;
@%p2 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r9], [%r1], 128, [%r10];
setp.eq.u32 %p4, %r5, 0;
@%p4 bra SENT;
AGAIN:
mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0;
@!%p3 bra AGAIN;
SENT:
@END
"""
STAY = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_cta_keeps_what_it_sends_to_another(schedule, seed):
    """It neither ends nor writes there before the copy is known to have read it."""
    options = {"grid": 2, "cluster": (2,)}
    outcome(SENDING.replace("@END", f"{STAY}\nst.shared.u32 [%r2], %r5;"), schedule, seed, **options)
    with pytest.raises(DataRaceError, match=r"CTA \(0, 0, 0\) (may end|has ended) before an access to its memory by bulk load"):
        outcome(SENDING.replace("@END", ""), schedule, seed, **options)
    with pytest.raises(DataRaceError, match=r"behind the (read|write) by (bulk load|warp 0)"):
        outcome(SENDING.replace("@END", f"st.shared.u32 [%r2], %r5;\n{STAY}"), schedule, seed, **options)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_relaxed_cluster_barrier_orders_no_memory(schedule, seed):
    body = """
    mov.u32 %r1, dynamic;
    mov.u32 %r5, %cluster_ctarank;
    xor.b32 %r6, %r5, 1;
    setp.eq.u32 %p1, %r0, 0;
    @%p1 st.shared.u32 [%r1], %r5;
    barrier.cluster.arrive@HOW.aligned;
    barrier.cluster.wait.aligned;
    mapa.shared::cluster.u32 %r9, %r1, %r6;
    ld.shared::cluster.u32 %r7, [%r9];
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    """
    options = {"grid": 2, "cluster": (2,)}
    outcome(body.replace("@HOW", ".release"), schedule, seed, **options)
    with pytest.raises(DataRaceError, match="the write by warp 0 of CTA"):
        outcome(body.replace("@HOW", ".relaxed"), schedule, seed, **options)


SEMAPHORE = """
mov.u32 %r5, %ctaid.x;
setp.ne.u32 %p1, %r5, 0;
setp.ne.u32 %p2, %r0, 0;
@%p1 bra SECOND;
st.global.u32 [%d11], %r0;
bar.sync 0;
@%p2 bra END;
@BEFORE
@RELEASE
bra END;
SECOND:
@%p2 bra WAITED;
AGAIN:
@ACQUIRE
setp.ne.u32 %p3, %r4, 1;
@%p3 bra AGAIN;
@AFTER
WAITED:
bar.sync 0;
ld.global.u32 %r6, [%d11];
add.u64 %d3, %d2, %d10;
st.global.u32 [%d3], %r6;
END:
"""
RELEASE, ACQUIRE = "red.release.gpu.global.add.u32 [%d1], 1;", "ld.acquire.gpu.global.u32 %r4, [%d1];"
RELAXED = "red.relaxed.gpu.global.add.u32 [%d1], 1;", "ld.relaxed.gpu.global.u32 %r4, [%d1];"
ORDERED = [(RELEASE, ACQUIRE, "", ""), (*RELAXED, "fence.acq_rel.gpu;", "fence.acq_rel.gpu;"), (RELEASE, RELAXED[1], "", "membar.gl;")]
UNORDERED = {
    "no release": (RELAXED[0], ACQUIRE, "", ""),
    "no acquire": (RELEASE, RELAXED[1], "", ""),
    "release in the CTA only": (RELEASE.replace("gpu", "cta"), ACQUIRE, "", ""),
    "acquire in the cluster only": (RELEASE, ACQUIRE.replace("gpu", "cluster"), "", ""),
    "no fence before": (*RELAXED, "", "fence.acq_rel.gpu;"),
    "no fence behind": (*RELAXED, "fence.acq_rel.gpu;", ""),
    "a weak store": ("st.global.u32 [%d1], 1;", ACQUIRE, "", ""),
}


def semaphore(release, acquire, before, after):
    body = SEMAPHORE.replace("@RELEASE", release).replace("@ACQUIRE", acquire).replace("@BEFORE", before).replace("@AFTER", after)
    return body.replace("[%d1]", "[%d4]").replace("mov.u32 %r5", "add.u64 %d4, %d1, 0;\nmov.u32 %r5", 1)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("how", ORDERED)
def test_a_semaphore_orders_global_memory(how, schedule, seed):
    _, _, c = outcome(semaphore(*how), schedule, seed, grid=2)
    assert (c[:64] == np.arange(64)).all()


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("how", UNORDERED.values(), ids=UNORDERED)
def test_a_semaphore_without_its_order(how, schedule, seed):
    with pytest.raises(DataRaceError, match=r"buffer '[ab]' at offset .* is (read|written), but nothing orders this behind the"):
        outcome(semaphore(*how), schedule, seed, grid=2)


def test_ctas_race_in_global_memory():
    body = "st.global.u32 [%d0], %r0;"
    with pytest.raises(DataRaceError):
        outcome(body, "round_robin", 0)
    outcome("red.global.add.u32 [%d0], 1;", "round_robin", 0, grid=3)
    outcome("mov.u32 %r5, %ctaid.x;\nmad.wide.u32 %d3, %r5, 256, %d11;\nst.global.u32 [%d3], %r0;", "round_robin", 0, grid=8)
    same = "setp.lt.u32 %p1, %r0, 32;\nmov.u32 %r5, 1;\n@%p1 st.global.u32 [%d11], %r5;"
    outcome(same, "round_robin", 0, grid=8)  # flash-attn-4 makes such writes
    with pytest.raises(DataRaceError, match=r"the write by a warp of cluster \d"):
        outcome(same.replace("%r5, 1", "%r5, %ctaid.x"), "round_robin", 0, grid=8)
    with pytest.raises(DataRaceError):
        run(same, gpu=Gpu(checks="isa"), threads=64, grid=8)


def no_hazards(arch, seeds, checks="isa"):
    # The kernels that other tests run too: bfloat16 with a mask, float16 without.
    full, causal = (make_inputs(AttentionShape(1, 200, 300, 1, 1, 64), dtype) for dtype in (torch.float16, torch.bfloat16))
    for schedule, seed in [("round_robin", 0), *(("priority", seed) for seed in seeds)]:
        with fa4.settings(vgpu_schedule=schedule, vgpu_seed=seed, vgpu_checks=checks):
            inputs = causal if seed % 2 else full
            fa4.attention(inputs.q, inputs.k, inputs.v, causal=inputs is causal, backend="vgpu", arch=arch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_the_forward_kernels_have_no_hazards(arch):
    no_hazards(arch, range(1, 2))


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_the_forward_kernels_have_no_hazards_in_many_schedules(arch):
    no_hazards(arch, range(20))
