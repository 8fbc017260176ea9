# ruff: noqa: E501 -- kernels and rows of tables in one line
"""mbarriers: what a phase counts, who waits for it, and every misuse."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_text import run

from fa4.vgpu import BarrierError, DeadlockError, Gpu, OutOfBoundsError, PendingCopyError, UninitializedError, UnsupportedInstructionError

SCHEDULES = [("round_robin", 0), ("random", 0), ("random", 1), ("priority", 0), ("priority", 1)]
INIT = """
.shared .align 8 .b64 bars[4];
setp.eq.u32 %p19, %r0, 0;
@%p19 mbarrier.init.shared::cta.b64 [bars], {count};
fence.mbarrier_init.release.cluster;
bar.sync 0;
"""


def init(count):
    return INIT.replace("{count}", str(count))


# Warps 0 and 1 write, warps 2 and 3 read, for four rounds over one buffer; mbarrier 0 says that it is full, mbarrier 1 that it is empty.
PIPELINE = """
@%p19 mbarrier.init.shared::cta.b64 [bars+8], 64;
bar.sync 0;
shl.b32 %r1, %r0, 2;
mov.u32 %r2, dynamic;
add.u32 %r1, %r1, %r2;
mov.u32 %r3, 0;
setp.ge.u32 %p1, %r0, 64;
@%p1 bra READER;
WRITER:
and.b32 %r4, %r3, 1;
xor.b32 %r4, %r4, 1;
EMPTY:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [bars+8], %r4, 1000;
@!%p2 bra EMPTY;
mad.lo.u32 %r5, %r3, 1000, %r0;
st.shared.u32 [%r1], %r5;
mbarrier.arrive.shared::cta.b64 _, [bars];
add.u32 %r3, %r3, 1;
setp.lt.u32 %p3, %r3, 4;
@%p3 bra WRITER;
bra DONE;
READER:
and.b32 %r4, %r3, 1;
FULL:
mbarrier.{wait}.parity.acquire.cta.shared::cta.b64 %p2, [bars], %r4;
@!%p2 bra FULL;
ld.shared.u32 %r5, [%r1+-256];
mbarrier.arrive.shared::cta.b64 _, [bars+8];
mad.wide.u32 %d3, %r3, 256, %d12;
st.global.u32 [%d3], %r5;
add.u32 %r3, %r3, 1;
setp.lt.u32 %p3, %r3, 4;
@%p3 bra READER;
DONE:
"""


def pipeline(body=PIPELINE, wait="try_wait", **options):
    return run(init(64) + body.replace("{wait}", wait), threads=128, shared=1024, gpu=Gpu("sm_90a", **options))[1][64:320].reshape(4, 64)


@pytest.mark.parametrize("wait", ["try_wait", "test_wait"])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_pipeline(schedule, seed, wait):
    out = pipeline(wait=wait, schedule=schedule, seed=seed)
    assert np.array_equal(out, np.arange(4)[:, None] * 1000 + np.arange(64))


@pytest.mark.parametrize("label", ["EMPTY", "FULL"])
def test_a_wait_that_is_not_repeated_shows(label):
    """A try_wait may return before its phase is complete; removing the loop is a mistake that some schedule must show."""
    body = PIPELINE.replace(f"@!%p2 bra {label};", "")
    expected = np.arange(4)[:, None] * 1000 + np.arange(64)
    wrong = 0
    for seed in range(16):
        try:
            wrong += not np.array_equal(pipeline(body, schedule="priority", seed=seed), expected)
        except (BarrierError, DeadlockError, UninitializedError):
            wrong += 1
    assert wrong


def one(body, count=1, **options):
    """Run a body in one thread behind the initialisation of ``bars``; its ``%r10`` to ``%r15``, and ``%d20``."""
    clear = "\n".join([*(f"mov.u32 %r{i}, 0;" for i in range(10, 16)), "mov.u64 %d20, 0;"])
    store = "\n".join(f"st.global.u32 [%d1+{4 * (i - 10)}], %r{i};" for i in range(10, 16)) + "\nst.global.u64 [%d1+24], %d20;"
    return run("\n".join((init(count), clear, body, store)), threads=1, gpu=Gpu("sm_90a", **options))[1][:8].tolist()


def look(register, parity):
    return f"mbarrier.test_wait.parity.shared::cta.b64 %p1, [bars], {parity};\nselp.u32 %r{register}, 1, 0, %p1;\n"


def test_a_fresh_barrier_passes_odd_parity():
    assert one(look(10, 0) + look(11, 1))[:2] == [0, 1]


def test_a_phase_is_complete_when_everyone_arrived():
    body = look(10, 0) + "mbarrier.arrive.shared::cta.b64 %d3, [bars], 2;\n" + look(11, 0)
    body += "mbarrier.arrive.release.cta.shared.b64 _, [bars];\n" + look(12, 0) + look(13, 1)
    assert one(body, 3)[:4] == [0, 0, 1, 0]


def test_bytes_may_come_before_they_are_expected():
    steps = [
        "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bars], 64;",
        "mbarrier.arrive.shared::cta.b64 _, [bars];",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bars], 64;",
    ]
    body = "\n".join(step + "\n" + look(10 + i, 0) for i, step in enumerate(steps))
    assert one(body)[:3] == [0, 0, 1]


def test_arrive_expect_tx_counts_bytes_first():
    body = "mbarrier.arrive.expect_tx.release.cluster.shared::cta.b64 _, [bars], 128;\n" + look(10, 0)
    body += "mbarrier.complete_tx.shared::cluster.b64 [bars], 100;\n" + look(11, 0) + "mbarrier.complete_tx.b64 [%d4], 28;\n" + look(12, 0)
    body = "mov.u64 %d4, bars;\ncvta.shared.u64 %d4, %d4;\n" + body
    assert one(body)[:3] == [0, 0, 1]


@pytest.mark.parametrize("wait", ["test_wait", "try_wait"])
def test_tokens_and_pending_counts(wait):
    body = f"""
    mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %d3, [bars], 2;
    mbarrier.pending_count.b64 %r10, %d3;
    mbarrier.arrive.shared::cta.b64 %d4, [bars];
    mbarrier.pending_count.b64 %r11, %d4;
    mbarrier.test_wait.shared::cta.b64 %p1, [bars], %d4;
    selp.u32 %r12, 1, 0, %p1;
    mbarrier.arrive.shared::cta.b64 %d5, [bars];
    mbarrier.{wait}.shared::cta.b64 %p1, [bars], %d5;
    selp.u32 %r13, 1, 0, %p1;
    """
    assert one(body, 4)[:4] == [4, 2, 0, 1]


def test_dropped_arrivals_are_not_expected_again():
    body = "mbarrier.arrive_drop.shared::cta.b64 _, [bars];\nmbarrier.arrive.shared::cta.b64 _, [bars];\n" + look(10, 0)
    body += "mbarrier.arrive.shared::cta.b64 _, [bars];\n" + look(11, 1)
    assert one(body, 2)[:2] == [1, 1]


def test_a_barrier_can_be_used_again_after_inval():
    body = "mbarrier.arrive.shared::cta.b64 _, [bars];\nmbarrier.inval.shared::cta.b64 [bars];\nmbarrier.init.shared::cta.b64 [bars], 2;\n"
    assert one(body + look(10, 0) + look(11, 1))[:2] == [0, 1]


REMOTE = """
mov.u32 %r1, bars;
mapa.shared::cluster.u32 %r2, %r1, 0;
mov.u32 %r3, %cluster_ctarank;
min.u32 %r4, %r3, {most};
add.u32 %r4, %r4, 1;
@%p19 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2], %r4;
setp.ne.u32 %p1, %r3, 0;
@%p1 bra DONE;
W:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [bars], 0;
@!%p2 bra W;
st.global.u32 [%d12], 7;
DONE:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_arrivals_from_other_ctas(schedule, seed):
    start = init(10).replace("bar.sync 0;", "barrier.cluster.arrive;\nbarrier.cluster.wait;")

    def remote(most):
        gpu = Gpu("sm_90a", schedule=schedule, seed=seed)
        return run(start + REMOTE.replace("{most}", str(most)), gpu=gpu, grid=4, cluster=(4,))[1][:32].tolist()

    assert remote(3) == [7] * 32
    with pytest.raises(DeadlockError, match=r"1 of 10 arrivals and 0 bytes are missing; came: .* by CTA"):
        remote(2)


ARRIVE_MANY = "mbarrier.arrive.shared::cta.b64 _, [bars], @;"


@pytest.mark.parametrize(
    ("body", "faulty", "clean", "error", "message"),
    [
        ("mbarrier.arrive.shared::cta.b64 _, [bars+@];", "8", "0", BarrierError, "no mbarrier was initialised at shared address 0x408 .*; there are: 0x400"),
        ("mbarrier.try_wait.parity.shared::cta.b64 %p1, [bars+@], 1;", "16", "0", BarrierError, "no mbarrier was initialised at shared address 0x410"),
        (ARRIVE_MANY, "5", "4", BarrierError, r"5 arrivals by CTA \(0, 0, 0\) warp 0 .* too many or too few: .* 4 of 4 arrivals"),
        (ARRIVE_MANY, "0", "1", BarrierError, "0 arrivals"),
        (ARRIVE_MANY.replace("@", "3") + ARRIVE_MANY, "2", "1", BarrierError, r"2 arrivals by .*: 1 of 4 arrivals .* came: 3 by CTA"),
        ("mbarrier.expect_tx.shared::cta.b64 [bars], @;", "1048576", "1048575", BarrierError, "1048576 bytes expected by CTA"),
        ("mbarrier.complete_tx.shared::cta.b64 [bars], @;", "1048576", "1048575", BarrierError, "1048576 bytes completed by CTA"),
        ("mbarrier.arrive.noComplete.shared::cta.b64 %d3, [bars], @;", "4", "3", BarrierError, "noComplete by .* would complete"),
        ("mbarrier.init.shared::cta.b64 [bars+@], 1;", "0", "8", BarrierError, "0x400 of CTA .* is initialised again without mbarrier.inval"),
        ("mbarrier.init.shared::cta.b64 [bars+@], 1;", "12", "16", BarrierError, "0x40c, which is not a multiple of 8"),
        ("mbarrier.init.shared::cta.b64 [bars+8], @;", "1048576", "1048575", BarrierError, "with 1048576 arrivals"),
        ("mbarrier.init.shared::cta.b64 [bars+8], @;", "0", "1", BarrierError, "with 0 arrivals"),
        ("mbarrier.inval.shared::cta.b64 [bars+@];", "8", "0", BarrierError, "no mbarrier was initialised"),
        ("mbarrier.inval.shared::cta.b64 [bars];\n@", "mbarrier.arrive.shared::cta.b64 _, [bars];", "", BarrierError, "there are: none"),
        ("mov.u64 %d3, 0x@00000000000000;\nadd.u64 %d3, %d3, 1024;\nmbarrier.arrive.b64 _, [%d3];", "02", "01", OutOfBoundsError, "is not in shared memory"),
        ("mbarrier.arrive.shared::cta.b64 %d3, [bars], 4;\nmbarrier.arrive.shared::cta.b64 %d4, [bars], @;\nmbarrier.test_wait.shared::cta.b64 %p1, [bars], %d3;", "4", "3", BarrierError, "a token of phase 0"),
        ("mbarrier.arrive.shared::cluster.b64 @, [bars];", "%d3", "_", UnsupportedInstructionError, "operands"),
        ("mbarrier.try_wait.parity.shared::@.b64 %p1, [bars], 1;", "cluster", "cta", UnsupportedInstructionError, "space shared::cluster"),
    ],
)  # fmt: skip
def test_misuse(body, faulty, clean, error, message):
    one(body.replace("@", clean), 4)
    with pytest.raises(error, match=message) as caught:
        one(body.replace("@", faulty), 4)
    assert caught.value.place.ptx_text.startswith("mbarrier.")


def test_lanes_that_initialise_together():
    run(init(1).replace("@%p19 ", ""), gpu=Gpu("sm_90a"))
    with pytest.raises(BarrierError, match=r"lanes initialise the mbarrier at 0x400 with different counts: \[1, 2, 3"):
        run(init("%r1").replace("@%p19 ", "add.u32 %r1, %r0, 1;\n"), gpu=Gpu("sm_90a"))
    with pytest.raises(BarrierError, match="is initialised again"):
        run(init(1).replace("@%p19 ", ""), threads=64, gpu=Gpu("sm_90a"))


def test_a_wait_for_a_phase_that_never_ends_is_a_table():
    body = "W:\nmbarrier.try_wait.parity.shared::cta.b64 %p1, [bars], 0;\n@!%p1 bra W;\n"
    for schedule, seed in SCHEDULES:
        with pytest.raises(
            DeadlockError,
            match=r"waits for mbarrier 0x400 of CTA \(0, 0, 0\) in phase 0: 4 of 4 arrivals .* came: none, for the phase of parity 0 at PTX line",
        ):
            one(body, 4, schedule=schedule, seed=seed)


def test_a_try_wait_ends_where_nothing_else_can_run():
    """A single try_wait may look, and the warp does what others wait for afterwards."""
    body = "mbarrier.try_wait.parity.shared::cta.b64 %p1, [bars], 0;\nselp.u32 %r10, 1, 0, %p1;\nmbarrier.arrive.shared::cta.b64 _, [bars];\nW:\nmbarrier.try_wait.parity.shared::cta.b64 %p1, [bars], 0;\n@!%p1 bra W;\n"
    for schedule, seed in SCHEDULES:
        assert one(body, 1, schedule=schedule, seed=seed)[0] == 0


COPY = """
shl.b32 %r1, %r0, 4;
cvt.u64.u32 %d3, %r1;
add.u64 %d3, %d0, %d3;
mov.u32 %r2, dynamic;
add.u32 %r1, %r1, %r2;
cp.async.cg.shared.global [%r1], [%d3], 16;
@ARRIVE
W:
@WAIT
ld.shared.u32 %r3, [%r1];
st.global.u32 [%d12], %r3;
"""
NOINC = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [bars];"
WAIT = "mbarrier.try_wait.parity.shared::cta.b64 %p2, [bars], 0;\n@!%p2 bra W;"


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("delay", ["late", "early"])
def test_copies_arrive(schedule, seed, delay):
    source = np.arange(4096, dtype=np.uint32)

    def copy(arrive, wait, count):
        gpu = Gpu(schedule=schedule, seed=seed, delay=delay)
        return run(
            init(count) + COPY.replace("@ARRIVE", arrive).replace("@WAIT", wait),
            threads=64,
            shared=1024,
            arrays=(source, None, None),
            gpu=gpu,
        )[1][:64]

    assert np.array_equal(copy(NOINC, WAIT, 64), 4 * np.arange(64))
    both = "cp.async.mbarrier.arrive.shared::cta.b64 [bars];\nmbarrier.arrive.shared::cta.b64 _, [bars];"
    assert np.array_equal(copy(both, WAIT, 64), 4 * np.arange(64))
    if delay == "late":
        with pytest.raises(PendingCopyError, match="before the asynchronous copy"):
            copy("mbarrier.arrive.shared::cta.b64 _, [bars];", WAIT, 64)
        with pytest.raises(DeadlockError, match="64 of 128 arrivals"):
            copy(NOINC, WAIT, 128)
