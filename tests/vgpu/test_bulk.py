# ruff: noqa: E501 -- kernels and rows of tables in one line
"""Bulk copies and reductions without tensor maps, bulk groups, stores to other CTAs that tell an mbarrier, multicast."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
from ptx_text import run

from fa4.vgpu import (
    DeadlockError,
    Gpu,
    MisalignedError,
    OutOfBoundsError,
    PendingCopyError,
    Program,
    UninitializedError,
    UnsupportedInstructionError,
)
from fa4.vgpu.tensor_map import TensorMap
from fa4.vgpu.tma import reduced, reduction_fits

SCHEDULES = [("round_robin", 0), ("random", 0), ("random", 1), ("priority", 0), ("priority", 1)]
SOURCE = np.arange(4096, dtype=np.uint32)
HEAD = """
.shared .align 8 .b64 bar;
mov.u32 %r20, dynamic;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared::cta.b64 [bar], 1;
barrier.cluster.arrive;
barrier.cluster.wait;
mov.u32 %r21, %cluster_ctarank;
shl.b32 %r1, %r0, 2;
add.u32 %r2, %r20, %r1;
"""
WAIT = "W:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [bar], 0;\n@!%p2 bra W;\n"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {};\n"
KEEP = (
    "mad.lo.u32 %r3, %r21, 128, %r1;\ncvt.u64.u32 %d3, %r3;\nadd.u64 %d3, %d3, %d1;\nld.shared.u32 %r4, [%r2];\nst.global.u32 [%d3], %r4;\n"
)
STAY = "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"


def on(schedule, seed=0, **options):
    return Gpu("sm_90a", schedule=schedule, seed=seed, **options)


LOAD = "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r20], [%d0+{at}], {size}, [bar];\n"


@pytest.mark.parametrize("delay", ["late", "early"])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_load(schedule, seed, delay):
    body = HEAD + EXPECT.format(128) + LOAD.format(at=64, size=128) + WAIT + KEEP
    assert np.array_equal(run(body, gpu=on(schedule, seed, delay=delay), shared=256, arrays=(SOURCE, None, None))[1][:32], SOURCE[16:48])


@pytest.mark.parametrize(
    ("body", "faulty", "clean", "error", "message"),
    [
        (LOAD.format(at="@", size=128), "8", "16", MisalignedError, "source 0x10008 of a bulk copy is not a multiple of 16"),
        (LOAD.format(at="0", size="@"), "120", "128", MisalignedError, "size 0x78"),
        (LOAD.format(at="0", size="128").replace("[%r20]", "[%r20+@]"), "8", "16", MisalignedError, "destination 0x418"),
        (LOAD.format(at="@", size=128), "16272", "16256", OutOfBoundsError, "128 bytes at global address 0x13f90 are outside"),
        (LOAD.format(at="0", size=128).replace("[%r20]", "[%r20+@]"), "144", "128", OutOfBoundsError, "128 bytes at shared address 0x4a0, which has 0x510"),
        (LOAD.format(at="0", size=128) + "@", "ld.shared.u32 %r4, [%r2];", WAIT + "ld.shared.u32 %r4, [%r2];", PendingCopyError, "before the asynchronous copy"),
        (LOAD.format(at="0", size=128) + "@\nst.shared.u32 [%r2], %r0;", "", WAIT, PendingCopyError, "is written while an asynchronous copy"),
        (LOAD.format(at="0", size="@") + WAIT, "144", "128", DeadlockError, "0 of 1 arrivals and -16 bytes are missing"),
        (LOAD.format(at="0", size="@") + WAIT, "112", "128", DeadlockError, "0 of 1 arrivals and 16 bytes are missing"),
        (LOAD.format(at="0", size=128) + "@%p1 cp.async.bulk.prefetch.L2.global [%d0], @;\n", "16400", "16384", OutOfBoundsError, "outside every buffer"),
    ],
)  # fmt: skip
def test_misuse_of_loads(body, faulty, clean, error, message):
    head = HEAD.replace("dynamic;", "dynamic;\nand.b32 %r20, %r20, 0xfffffff0;") + EXPECT.format(128)

    def kernel(text):
        whole = re.sub("@(?![%!])", text, head + body)
        return whole if "W:" in whole else whole + WAIT

    run(kernel(clean), gpu=on("round_robin"), shared=256)
    with pytest.raises(error, match=message):
        run(kernel(faulty), gpu=on("round_robin"), shared=256)


STORE = """
st.shared.u32 [%r2], %r0;
fence.proxy.async.shared::cta;
bar.sync 0;
@!%p1 bra DONE;
cp{reduce}.async.bulk.global.shared::cta.bulk_group{op} [%d1], [%r20], 128;
cp.async.bulk.commit_group;
@
DONE:
"""


def store(wait, schedule="round_robin", seed=0, delay="late", reduce="", op="", target=None):
    body = HEAD + STORE.replace("{reduce}", reduce).replace("{op}", op).replace("@\nDONE", wait + "\nDONE")
    return run(body, gpu=on(schedule, seed, delay=delay), shared=128, arrays=(None, target, None))


@pytest.mark.parametrize("delay", ["late", "early"])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_store(schedule, seed, delay):
    for wait in ("cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"):
        assert np.array_equal(store(wait, schedule, seed, delay)[1][:32], np.arange(32)), "complete when the kernel has ended"
    if (schedule, delay) == ("round_robin", "late"):
        for wait in ("", "cp.async.bulk.wait_group 1;"):
            with pytest.raises(PendingCopyError, match="ends before a bulk copy has read its shared memory") as caught:
                store(wait, schedule, seed, delay)
            assert caught.value.place.ptx_text.startswith("cp.async.bulk.global")


def test_bytes_in_the_report():
    gpu = on("round_robin")
    run(HEAD + EXPECT.format(128) + LOAD.format(at=64, size=128) + WAIT, gpu=gpu, shared=256, grid=3)
    assert gpu.report().bytes["bulk load"] == 3 * 128
    gpu = on("round_robin")
    run(
        HEAD + STORE.replace("{reduce}", "").replace("{op}", "").replace("@\nDONE", "cp.async.bulk.wait_group 0;\nDONE"),
        gpu=gpu,
        shared=128,
    )
    assert gpu.report().bytes["bulk store"] == 128


def test_a_cta_that_ends_while_a_load_is_on_its_way():
    body = HEAD + EXPECT.format(128) + LOAD.format(at=64, size=128)
    run(body + WAIT, gpu=on("round_robin"), shared=256)
    with pytest.raises(PendingCopyError, match="ends before a bulk copy has written its shared memory"):
        run(body, gpu=on("round_robin"), shared=256)


def test_a_store_is_complete_no_earlier_than_waited_for():
    look = "ld.global.u32 %r5, [%d1+4];\nst.global.u32 [%d2], %r5;\ncp.async.bulk.wait_group 0;"
    seen = [
        store(wait + look)[2][0]
        for wait in ("", "cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group 1;", "cp.async.bulk.wait_group 0;")
    ]
    assert seen == [0, 0, 0, 1]


def test_a_source_changed_before_it_was_read_shows():
    change = "st.shared.u32 [%r20+4], 99;\ncp.async.bulk.wait_group 0;"
    results = [
        store(wait + change)[1][1]
        for wait in ("", "cp.async.bulk.wait_group.read 1;", "cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group 0;")
    ]
    assert results == [99, 99, 1, 1]


def test_an_uninitialised_source():
    with pytest.raises(UninitializedError, match="never written"):
        run(
            HEAD + STORE.replace("{reduce}", "").replace("{op}", "").replace("[%r20], 128", "[%r20+16], 128").replace("@\nDONE", "DONE"),
            gpu=on("round_robin"),
            shared=256,
        )


@pytest.mark.parametrize(
    ("op", "dtype", "function"),
    [
        (".add.u32", np.uint32, np.add),
        (".min.s32", np.int32, np.minimum),
        (".add.f32", np.float32, np.add),
        (".add.noftz.f16", np.float16, np.add),
        (".xor.b64", np.uint64, np.bitwise_xor),
    ],
)
def test_reduction(op, dtype, function):
    before = np.random.default_rng(0).integers(0, 1000, 4096).astype(np.float32 if dtype == np.float32 else np.uint32)
    target = before.copy()
    store("cp.async.bulk.wait_group.read 0;", reduce=".reduce", op=op, target=target.view(np.uint32))
    new, old = np.arange(32, dtype=np.uint32).view(dtype), before[:32].view(dtype)
    assert np.array_equal(target[:32].view(dtype), function(old, new))
    assert np.array_equal(target[32:], before[32:])


def test_a_reduction_that_does_not_exist():
    with pytest.raises(UnsupportedInstructionError, match=r"cp\.reduce"):
        store("", reduce=".reduce", op=".min.f32")


# Between CTAs

TO_NEXT = """
st.shared.u32 [%r2], %r22;
fence.proxy.async.shared::cta;
bar.sync 0;
xor.b32 %r5, %r21, 1;
add.u32 %r6, %r20, 128;
mapa.shared::cluster.u32 %r7, %r6, %r5;
mov.u32 %r8, bar;
mapa.shared::cluster.u32 %r9, %r8, %r5;
"""
COPY_NEXT = "@%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r7], [%r20], 128, [%r9];\n"
ASYNC = "add.u32 %r10, %r7, %r1;\nst.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r10], %r22, [%r9];\n"


@pytest.mark.parametrize("send", [COPY_NEXT, ASYNC], ids=["cp.async.bulk", "st.async"])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_to_another_cta(send, schedule, seed):
    body = (
        HEAD + "mad.lo.u32 %r22, %r21, 1000, %r0;\n" + TO_NEXT + EXPECT.format(128) + send + WAIT + "add.u32 %r2, %r2, 128;\n" + KEEP + STAY
    )
    out = run(body, gpu=on(schedule, seed), shared=256, grid=2, cluster=(2,))[1]
    assert np.array_equal(out[:64].reshape(2, 32), np.array([[1000], [0]]) + np.arange(32))
    with pytest.raises(PendingCopyError, match="waited for"):
        run(body.replace(WAIT, STAY), gpu=on("round_robin"), shared=256, grid=2, cluster=(2,))


def sent_to_next(send, words, type_):
    """What each CTA of a pair gets: a number of words a thread, of 1000 times the sender's rank plus 10 times the thread plus the word."""
    values = "".join(f"mad.lo.u32 %r{40 + i}, %r21, 1000, {i};\nmad.lo.u32 %r{40 + i}, %r0, 10, %r{40 + i};\n" for i in range(words))
    values += (
        "mov.b64 %d20, {%r40, %r41};\nmov.b64 %d21, {%r42, %r43};\n"
        if words == 4
        else "mov.b64 %d20, {%r40, %r41};\n"
        if words == 2
        else ""
    )
    size = 4 * words
    body = (
        HEAD
        + values
        + f"mul.lo.u32 %r5, %r0, {size};\nadd.u32 %r6, %r20, %r5;\nxor.b32 %r7, %r21, 1;\nmapa.shared::cluster.u32 %r10, %r6, %r7;\n"
        + "mov.u32 %r8, bar;\nmapa.shared::cluster.u32 %r9, %r8, %r7;\n"
        + EXPECT.format(32 * size)
        + STAY
        + f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{type_} [%r10], {send}, [%r9];\n"
        + WAIT
        + "".join(f"ld.shared.u32 %r{50 + i}, [%r6+{4 * i}];\n" for i in range(words))
        + f"mad.lo.u32 %r3, %r21, {32 * size}, %r5;\ncvt.u64.u32 %d3, %r3;\nadd.u64 %d3, %d3, %d1;\n"
        + "".join(f"st.global.u32 [%d3+{4 * i}], %r{50 + i};\n" for i in range(words))
        + STAY
    )
    return run(body, gpu=on("priority"), shared=512, grid=2, cluster=(2,))[1][: 64 * words].reshape(2, 32, words)


@pytest.mark.parametrize(
    ("send", "words", "type_"),
    [
        *(("%r40", 1, f".{kind}32") for kind in "busf"),
        *(("%d20", 2, f".{kind}64") for kind in "busf"),
        ("{%r40, %r41}", 2, ".v2.b32"),
        ("{%r40, %r41, %r42, %r43}", 4, ".v4.f32"),
        ("{%d20, %d21}", 4, ".v2.u64"),
    ],
)
def test_every_width_of_st_async(send, words, type_):
    expected = np.array([1000, 0])[:, None, None] + 10 * np.arange(32)[:, None] + np.arange(words)
    assert np.array_equal(sent_to_next(send, words, type_), expected)


ATOMS = {
    "add": lambda a, b: a + b,
    "min": min,
    "max": max,
    "inc": lambda a, b: 0 if a >= b else a + 1,
    "dec": lambda a, b: b if a == 0 or a > b else a - 1,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
REDUCED = [
    (op, type_)
    for op in ATOMS
    for type_ in ("u32", "s32", "b32", "u64", "s64", "b64", "f16", "bf16", "f32", "f64")
    if reduction_fits(op, type_)
]


def test_reductions_are_those_of_the_isa():
    """PTX ISA 9.7.9.25.4.2: integers add, min and max; inc and dec of u32; bits; additions of floats, min and max of halves."""
    fits = {op: {type_ for name, type_ in REDUCED if name == op} for op in ATOMS}
    integers = {"u32", "s32", "u64", "s64"}
    assert fits["add"] == integers | {"f16", "bf16", "f32", "f64"}
    assert fits["min"] == fits["max"] == integers | {"f16", "bf16"}
    assert fits["inc"] == fits["dec"] == {"u32"}
    assert fits["and"] == fits["or"] == fits["xor"] >= {"b32", "b64"}


@pytest.mark.parametrize(("op", "type_"), REDUCED)
def test_every_reduction(op, type_):
    """Each element by itself, against Python's numbers: small ones, which every type has exactly, and bits at both ends."""
    size = 2 if type_ in ("f16", "bf16") else int(type_[1:]) // 8
    generator = np.random.default_rng(0)
    if type_[0] in "usb" and type_ != "bf16":
        bits = 8 * size
        pairs = [(a, b) for a in (0, 1, 5, 2 ** (bits - 1), 2**bits - 1) for b in (0, 1, 5, 2 ** (bits - 1), 2**bits - 1)]
        old, new = (np.array(column, f"u{size}") for column in zip(*pairs, strict=True))
        signed = [[x - 2**bits if type_[0] == "s" and x >> bits - 1 else x for x in values.tolist()] for values in (old, new)]
        expected = np.array([ATOMS[op](a, b) % 2**bits for a, b in zip(*signed, strict=True)], f"u{size}")
    else:
        values = [generator.integers(-50, 50, 64) / 4.0 for _ in range(2)]
        exact = [ATOMS[op](a, b) for a, b in zip(*values, strict=True)]
        if type_ == "bf16":
            old, new, expected = (np.array(x, np.float32).view(np.uint32) >> 16 for x in (*values, exact))
            old, new, expected = (x.astype(np.uint16) for x in (old, new, expected))
        else:
            old, new, expected = (np.array(x, f"f{size}").view(f"u{size}") for x in (*values, exact))
    assert np.array_equal(reduced(op, type_, old, new), expected)


RED = "add.u32 %r10, %r7, %r1;\nred.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{}.u32 [%r10], %r22, [%r9];\n"
BULK_RED = "@%p1 cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{}.u32 [%r7], [%r20], 128, [%r9];\n"


@pytest.mark.parametrize("send", [RED, BULK_RED], ids=["red.async", "cp.reduce.async.bulk"])
@pytest.mark.parametrize(("op", "function"), [("add", np.add), ("max", np.maximum), ("xor", np.bitwise_xor)])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_reductions_in_another_cta(schedule, seed, op, function, send):
    fill = "st.shared.u32 [%r2+128], %r1;\n" + STAY
    body = (
        HEAD
        + fill
        + "mad.lo.u32 %r22, %r21, 1000, %r0;\n"
        + TO_NEXT
        + EXPECT.format(128)
        + send.format(op)
        + WAIT
        + "add.u32 %r2, %r2, 128;\n"
        + KEEP
        + STAY
    )
    out = run(body, gpu=on(schedule, seed), shared=256, grid=2, cluster=(2,))[1]
    assert np.array_equal(out[:64].reshape(2, 32), function(4 * np.arange(32), np.array([[1000], [0]]) + np.arange(32)))


@pytest.mark.parametrize(
    ("op", "type_"),
    [(op, "u32") for op in ATOMS] + [("add", "s32"), ("min", "s32"), ("max", "s32"), *((op, "b32") for op in ("and", "or", "xor"))],
)
def test_every_form_of_red_async(op, type_):
    """All threads combine into one word each with what lies there; the order of one is the order of all."""
    fill = "st.shared.u32 [%r2+128], 100;\n" + STAY
    line = RED.replace(".u32 [%r10]", f".{type_} [%r10]").format(op)
    body = (
        HEAD
        + fill
        + "mad.lo.u32 %r22, %r21, 90, %r0;\nadd.u32 %r22, %r22, 20;\n"
        + TO_NEXT
        + EXPECT.format(128)
        + line
        + WAIT
        + "add.u32 %r2, %r2, 128;\n"
        + KEEP
        + STAY
    )
    out = run(body, gpu=on("random"), shared=256, grid=2, cluster=(2,))[1]
    assert out[:64].tolist() == [ATOMS[op](100, 20 + 90 * sender + thread) for sender in (1, 0) for thread in range(32)]


def test_red_async_of_64_bits():
    """Both words of a pair of threads: the carry goes from one to the other."""
    body = (
        HEAD
        + "shl.b32 %r30, %r0, 3;\nadd.u32 %r31, %r20, %r30;\nmov.u64 %d20, 0xFFFFFFFF;\nst.shared.u64 [%r31], %d20;\n"
        + STAY
        + "xor.b32 %r5, %r21, 1;\nmapa.shared::cluster.u32 %r7, %r31, %r5;\nmov.u32 %r8, bar;\nmapa.shared::cluster.u32 %r9, %r8, %r5;\n"
        + EXPECT.format(256)
        + "cvt.u64.u32 %d21, %r0;\nred.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u64 [%r7], %d21, [%r9];\n"
        + WAIT
        + "ld.shared.u64 %d22, [%r31];\nmad.lo.u32 %r3, %r21, 256, %r30;\ncvt.u64.u32 %d3, %r3;\nadd.u64 %d3, %d3, %d1;\nst.global.u64 [%d3], %d22;\n"
        + STAY
    )
    out = run(body, gpu=on("priority"), shared=512, grid=2, cluster=(2,))[1].view(np.uint64)
    assert out[:64].tolist() == 2 * [0xFFFFFFFF + thread for thread in range(32)]


MULTICAST = "setp.eq.and.u32 %p3, %r21, {}, %p1;\nmov.u16 %h1, {};\n@%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r20], [%d0+64], 128, [bar], %h1;\n"


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_multicast(schedule, seed):
    body = HEAD + EXPECT.format(128) + MULTICAST.format(2, 15) + WAIT + KEEP + STAY
    out = run(body, gpu=on(schedule, seed), shared=256, grid=4, cluster=(4,), arrays=(SOURCE, None, None))[1]
    assert np.array_equal(out[:128].reshape(4, 32), np.broadcast_to(SOURCE[16:48], (4, 32)))
    with pytest.raises(OutOfBoundsError, match="a copy to CTAs 0b10011 of a cluster of 4"):
        run(body.replace("%h1, 15", "%h1, 19"), gpu=on(schedule, seed), shared=256, grid=4, cluster=(4,))
    with pytest.raises(DeadlockError, match=r"CTA \(2, 0, 0\) in phase 0: 0 of 1 arrivals and 128 bytes are missing"):
        run(body.replace("%h1, 15", "%h1, 11"), gpu=on(schedule, seed), shared=256, grid=4, cluster=(4,))


PAIR = """
mov.b64 %d5, p2;
cvta.param.u64 %d5, %d5;
mov.u32 %r8, bar;
and.b32 %r8, %r8, 0xfeffffff;
setp.eq.u32 %p3, %r21, 0;
@!%p3 bra SEND;
{expect}
SEND:
shl.b32 %r9, %r21, 5;
@%p1 cp.async.bulk.tensor.1d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r20], [%d5, {{%r9}}], [%r8];
@!%p3 bra OTHER;
{wait}
OTHER:
barrier.cluster.arrive;
barrier.cluster.wait;
{keep}
{stay}
"""


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_pair_of_ctas_signals_the_even_one(schedule, seed):
    """cta_group::2: each CTA loads into its own memory and tells the even CTA's mbarrier."""
    from ptx_text import A, B, kernel

    text = PAIR.format(expect=EXPECT.format(256), wait=WAIT, keep=KEEP, stay="")
    text = kernel(HEAD.replace(".shared .align 8 .b64 bar;", ".shared .align 8 .b64 bar;\n") + text).replace(
        ".param .u64 p2", ".param .align 64 .b8 p2[128]"
    )
    text = (
        text.replace("ld.param.u64 %d2, [p2];\n", "")
        .replace("dynamic[];", "dynamic[];")
        .replace(".extern .shared .align 16", ".extern .shared .align 128")
    )

    def pair(text):
        gpu, out = on(schedule, seed), np.zeros(64, np.uint32)
        gpu.register_buffer(A, SOURCE, "a")
        gpu.register_buffer(B, out, "b")
        map_ = TensorMap(A, "u32", (4096,), (), (32,))
        params = [struct.pack("<Q", A), struct.pack("<Q", B), map_.encode()]
        gpu.launch(Program.parse(text), "k", (2,), (32,), 256, params, (2,))
        return out

    assert np.array_equal(pair(text), SOURCE[:64])
    with pytest.raises(OutOfBoundsError, match="the data goes to CTA 1 of the cluster, the mbarrier is in CTA 0"):
        pair(text.replace("cta_group::2", "cta_group::1"))
    with pytest.raises(DeadlockError, match="0 of 1 arrivals and 256 bytes are missing"):
        pair(text.replace("and.b32 %r8, %r8, 0xfeffffff;", "or.b32 %r8, %r8, 0x1000000;"))
