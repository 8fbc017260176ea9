"""Clusters: places, addresses in other CTAs, the barrier of all threads, and what goes wrong with them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ptx_text import A, kernel, run

from fa4.vgpu import BarrierError, DeadlockError, DivergenceError, Gpu, LaunchError, OutOfBoundsError, Program, UninitializedError

SCHEDULES = [("round_robin", 0), ("random", 0), ("random", 1), ("priority", 0), ("priority", 1)]
WITHOUT = "mov.u32 %r90, 0;"

# Every thread of a CTA writes a word, and reads that of the next CTA of its cluster.
EXCHANGE = """
mov.u32 %r1, dynamic;
shl.b32 %r2, %r0, 2;
add.u32 %r1, %r1, %r2;
mov.u32 %r3, %ctaid.x;
mad.lo.u32 %r4, %r3, 1000, %r0;
st.shared.u32 [%r1], %r4;
mov.u32 %r5, %cluster_ctarank;
mov.u32 %r6, %cluster_nctarank;
add.u32 %r5, %r5, 1;
rem.u32 %r5, %r5, %r6;
@ARRIVE
barrier.cluster.wait.acquire.aligned;
@READ
mad.lo.u32 %r8, %r3, 128, %r2;
cvt.u64.u32 %d3, %r8;
add.u64 %d3, %d3, %d1;
st.global.u32 [%d3], %r7;
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.aligned;
"""
ARRIVE = "barrier.cluster.arrive.release.aligned;"
READS = {
    "ld.shared::cluster": "mapa.shared::cluster.u32 %r9, %r1, %r5;\nld.shared::cluster.u32 %r7, [%r9];",
    "generic": "cvt.u64.u32 %d4, %r1;\ncvta.shared.u64 %d4, %d4;\nmapa.u64 %d4, %d4, %r5;\nld.u32 %r7, [%d4];",
    "atom": "mapa.shared::cluster.u32 %r9, %r1, %r5;\natom.relaxed.cluster.shared::cluster.add.u32 %r7, [%r9], 5;",
}


def exchange(read="ld.shared::cluster", arrive=ARRIVE):
    return EXCHANGE.replace("@READ", READS[read]).replace("@ARRIVE", arrive)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ctas_read_each_others_memory(read, size, schedule, seed):
    gpu = Gpu("sm_90a", schedule=schedule, seed=seed)
    _, out, _ = run(exchange(read), gpu=gpu, grid=8, cluster=(size,), shared=128)
    cta = np.arange(8)
    other = cta // size * size + (cta % size + 1) % size
    assert np.array_equal(out[:256].reshape(8, 32), other[:, None] * 1000 + np.arange(32))


def test_a_missing_arrival_before_the_wait_is_an_error():
    with pytest.raises(BarrierError, match=r"wait without barrier\.cluster\.arrive"):
        run(exchange(arrive=WITHOUT), gpu=Gpu("sm_90a"), grid=2, cluster=(2,), shared=128)


def test_a_missing_barrier_shows():
    body = exchange(arrive=WITHOUT).replace("barrier.cluster.wait.acquire.aligned;", "", 1)
    with pytest.raises(UninitializedError, match="never written"):
        run(body, gpu=Gpu("sm_90a", schedule="priority"), grid=2, cluster=(2,), shared=128)


def test_a_second_arrival_is_an_error():
    with pytest.raises(BarrierError, match="arrive again without"):
        run(exchange(arrive=ARRIVE + ARRIVE), gpu=Gpu("sm_90a"), grid=2, cluster=(2,), shared=128)


def test_an_aligned_barrier_by_some_lanes_is_an_error():
    half = "setp.lt.u32 %p1, %r0, 16;\n@%p1 barrier.cluster.arrive{};\n@!%p1 barrier.cluster.arrive{};\n"
    run(exchange(arrive=half.replace("{}", "")), gpu=Gpu("sm_90a"), grid=2, cluster=(2,), shared=128)
    with pytest.raises(DivergenceError, match=r"lanes \[16, "):
        run(exchange(arrive=half.replace("{}", ".aligned")), gpu=Gpu("sm_90a"), grid=2, cluster=(2,), shared=128)


def test_a_cta_that_does_not_come_is_a_deadlock_and_one_that_exited_counts():
    body = """
    mov.u32 %r1, %cluster_ctarank;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra L;
    @
    L:
    barrier.cluster.arrive;
    barrier.cluster.wait;
    """
    run(body.replace("    @\n", "exit;\n"), gpu=Gpu("sm_90a"), threads=64, grid=2, cluster=(2,))
    with pytest.raises(DeadlockError, match=r"the barrier of cluster \(0, 0, 0\): warps \[0, 1\] of CTA \(1, 0, 0\) did not arrive"):
        run(body.replace("    @\n", "shr.u32 %r2, %r0, 5;\nbar.sync %r2, 64;\n"), gpu=Gpu("sm_90a"), threads=64, grid=2, cluster=(2,))


def test_places_of_ctas():
    names = [f"%{name}.{axis}" for name in ("ctaid", "clusterid", "cluster_ctaid", "nclusterid", "cluster_nctaid") for axis in "xyz"]
    names += ["%cluster_ctarank", "%cluster_nctarank"]
    loads = "\n".join(f"mov.u32 %r{10 + i}, {name};" for i, name in enumerate(names))
    stores = "\n".join(f"st.global.u32 [%d3+{4 * i}], %r{10 + i};" for i in range(len(names)))
    rank = "mad.lo.u32 %r1, %r12, 4, %r11;\nmad.lo.u32 %r1, %r1, 6, %r10;"
    text = kernel(f"{loads}\n{rank}\nmul.wide.u32 %d3, %r1, 68;\nadd.u64 %d3, %d3, %d0;\n{stores}")
    out = np.zeros(17 * 48, np.uint32)
    gpu = Gpu("sm_90a", resident=5)
    gpu.register_buffer(A, out, "out")
    gpu.launch(Program.parse(text), "k", (6, 4, 2), (1,), 0, [A.to_bytes(8, "little")] * 3, (3, 2, 1))
    for row, (z, y, x) in zip(out.reshape(48, 17).tolist(), itertools.product(range(2), range(4), range(6)), strict=True):
        assert row == [x, y, z, x // 3, y // 2, z, x % 3, y % 2, 0, 2, 2, 2, 3, 2, 1, x % 3 + 3 * (y % 2), 6]


def test_ranks_of_addresses_and_windows():
    body = """
    mov.u32 %r1, dynamic;
    getctarank.shared::cluster.u32 %r2, %r1;
    mapa.shared::cluster.u32 %r3, %r1, 1;
    getctarank.shared::cluster.u32 %r4, %r3;
    cvt.u64.u32 %d3, %r3;
    cvta.shared::cluster.u64 %d3, %d3;
    getctarank.u64 %r5, %d3;
    isspacep.shared::cta %p1, %d3;
    isspacep.shared::cluster %p2, %d3;
    selp.u32 %r6, 1, 0, %p1;
    selp.u32 %r7, 1, 0, %p2;
    mov.u32 %r8, %ctaid.x;
    mad.wide.u32 %d4, %r8, 20, %d1;
    st.global.u32 [%d4], %r2;
    st.global.u32 [%d4+4], %r4;
    st.global.u32 [%d4+8], %r5;
    st.global.u32 [%d4+12], %r6;
    st.global.u32 [%d4+16], %r7;
    """
    _, out, _ = run(body, gpu=Gpu("sm_90a"), threads=1, grid=2, cluster=(2,), shared=64)
    assert out[:10].tolist() == [0, 1, 1, 0, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("body", "clean", "message"),
    [
        ("mapa.shared::cluster.u32 %r3, %r1, @;", ("2", "1"), "CTA 2 of a cluster of 2"),
        ("mapa.shared::cluster.u32 %r3, %r1, @;\nst.shared::cta.u32 [%r3], %r0;", ("1", "%r5"), "not of this CTA"),
        ("add.u32 %r3, %r1, @;\nst.shared::cluster.u32 [%r3], %r0;", ("0x2000000", "0"), "CTA [23] of a cluster of 2"),
        ("mapa.shared::cluster.u32 %r3, %r1, 0;\nst.shared::cluster.u32 [%r3+@], %r0;", ("64", "60"), "shared address"),
    ],
)
def test_addresses_that_are_nowhere(body, clean, message):
    head = "mov.u32 %r1, dynamic;\nmov.u32 %r5, %cluster_ctarank;\n"
    options = {"threads": 1, "grid": 2, "cluster": (2,), "shared": 64}
    run(head + body.replace("@", clean[1]), gpu=Gpu("sm_90a"), **options)
    with pytest.raises(OutOfBoundsError, match=message):
        run(head + body.replace("@", clean[0]), gpu=Gpu("sm_90a"), **options)


@pytest.mark.parametrize(
    ("arch", "grid", "cluster", "message"),
    [("sm_80", 2, (2,), "sm_80 has no clusters"), ("sm_90a", 3, (2,), "not a multiple"), ("sm_90a", 32, (32,), "at most 16")],
)
def test_clusters_that_do_not_fit(arch, grid, cluster, message):
    with pytest.raises(LaunchError, match=message):
        run("mov.u32 %r1, 0;", gpu=Gpu(arch), grid=grid, cluster=cluster)


def test_a_kernel_may_require_its_cluster():
    text = kernel("mov.u32 %r1, 0;").replace("\n{", "\n.reqnctapercluster 2, 1, 1\n{", 1)
    gpu = Gpu("sm_90a")
    gpu.launch(Program.parse(text), "k", (2,), (32,), 0, bytes(24), (2, 1, 1))
    with pytest.raises(LaunchError, match=r"the kernel requires \(2, 1, 1\)"):
        gpu.launch(Program.parse(text), "k", (2,), (32,), 0, bytes(24))


@pytest.mark.parametrize("use", ["ld.shared::cluster.u32 %r7, [%r9];", "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r10];"])
def test_a_cta_that_has_ended_has_no_memory(use):
    body = """
    .shared .align 8 .b64 bar;
    mov.u32 %r1, dynamic;
    mov.u32 %r5, %cluster_ctarank;
    st.shared.u32 [%r1], 1;
    setp.eq.u32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared::cta.b64 [bar], 32;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    setp.eq.u32 %p2, %r5, 0;
    @%p2 bra STAY;
    mapa.shared::cluster.u32 %r9, %r1, 0;
    mov.u32 %r8, bar;
    mapa.shared::cluster.u32 %r10, %r8, 0;
    bar.sync 0;
    @USE
    STAY:
    @END
    """.replace("@USE", use)
    for schedule, seed in SCHEDULES:
        end = "barrier.cluster.arrive;\nbarrier.cluster.wait;"
        run(body.replace("@END", end), gpu=Gpu("sm_90a", schedule=schedule, seed=seed), grid=2, cluster=(2,), shared=64)
    with pytest.raises(OutOfBoundsError, match="of CTA 0 of the cluster, which has ended"):
        run(body.replace("@END", "mov.u32 %r1, 0;"), gpu=Gpu("sm_90a"), grid=2, cluster=(2,), shared=64)
