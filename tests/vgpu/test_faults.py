# ruff: noqa: E501 -- kernels and rows of tables in one line
"""Every check with a planted fault, and a twin without it that runs."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
from ptx_text import kernel, run

from fa4 import Fa4Error
from fa4.vgpu import (
    BarrierError,
    DeadlockError,
    DivergenceError,
    Gpu,
    MisalignedError,
    OutOfBoundsError,
    PendingCopyError,
    Program,
    PtxSyntaxError,
    TrapError,
    UninitializedError,
    UnsupportedInstructionError,
    VgpuError,
)


@dataclass(frozen=True)
class Fault:
    """``faulty`` and ``clean`` replace @ in ``body``; ``at`` is the instruction at fault, ``who`` (warp, lane)."""

    name: str
    body: str
    faulty: str
    clean: str
    error: type[VgpuError]
    message: str
    at: str
    who: tuple[int, int] = (0, 0)
    threads: int = 64
    schedule: str = "round_robin"


COPY = """
shl.b32 %r1, %r0, 4;
cvt.u64.u32 %d3, %r1;
add.u64 %d3, %d0, %d3;
cp.async.cg.shared.global [%r1], [%d3], 16;
cp.async.commit_group;
"""
SHIFTED = "add.u32 %r2, %r1, 512;\nand.b32 %r2, %r2, 1023;\n"  # a place that the other warp fills

FAULTS = [
    Fault("load beyond a buffer", "ld.global.u32 %r1, [%d11+@];", "16256", "16128", OutOfBoundsError, r"4 bytes at global address 0x14000 are outside every buffer; the nearest buffer is 'a', 0x10000 to 0x14000, offset \+16384", "ld.global", (1, 0)),
    Fault("store before a buffer", "st.global.u32 [%d11+@], %r0;", "-4", "0", OutOfBoundsError, "0xfffc", "st.global"),
    Fault("vector over the end", "mad.wide.u32 %d3, %r0, 16, %d0;\nld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%d3+@];", "15376", "15360", OutOfBoundsError, "16 bytes at global address 0x14000", "ld.global.v4", (1, 31)),
    Fault("shared memory beyond its end", "mul.lo.u32 %r1, %r0, 16;\nst.shared.v4.u32 [%r1+@], {%r0,%r0,%r0,%r0};", "16", "0", OutOfBoundsError, "shared address 0x400, which has 0x400 bytes", "st.shared", (1, 31)),
    Fault("local memory beyond its end", ".local .align 4 .b8 depot[16];\nst.local.u32 [depot+@], %r0;", "16", "12", OutOfBoundsError, "local address 0x10; a thread has 16 bytes", "st.local"),
    Fault("generic address in no window", "mov.u64 %d3, @;\nld.u32 %r1, [%d3];", "0x0700000000000000", "0x10000", OutOfBoundsError, "0x700000000000000", "ld.u32"),
    Fault("misaligned global", "ld.global.u32 %r1, [%d11+@];", "2", "4", MisalignedError, "0x10002 is not a multiple of 4", "ld.global"),
    Fault("misaligned vector", "ld.global.v2.u32 {%r1,%r2}, [%d0+@];", "4", "8", MisalignedError, "not a multiple of 8", "ld.global"),
    Fault("misaligned shared", "mul.lo.u32 %r1, %r0, 4;\nst.shared.u32 [%r1+@], %r0;", "2", "4", MisalignedError, "shared address 0x2", "st.shared"),
    Fault("misaligned copy", "shl.b32 %r1, %r0, 4;\ncp.async.cg.shared.global [%r1], [%d0+@], 16;\ncp.async.wait_all;", "8", "16", MisalignedError, "source 0x10008", "cp.async.cg"),
    Fault("copy from outside", "shl.b32 %r1, %r0, 4;\nmov.u32 %r2, @;\ncp.async.cg.shared.global [%r1], [%d0+16384], 16, %r2;\ncp.async.wait_all;", "16", "0", OutOfBoundsError, "0x14000", "cp.async.cg"),
    Fault("register written on one path only", "setp.lt.u32 %p1, %r0, @;\n@%p1 bra L;\nmov.u32 %r1, 1;\nL:\nadd.u32 %r2, %r1, 1;", "40", "0", UninitializedError, "register %r1 is read, but was never written", "add.u32 %r2", (0, 0)),
    Fault("register written under a guard", "setp.lt.u32 %p1, %r0, @;\n@%p1 mov.u32 %r1, 1;\nst.global.u32 [%d12], %r1;", "40", "64", UninitializedError, "%r1", "st.global", (1, 8)),
    Fault("a guard never written", "@\n@%p5 add.u32 %r1, %r0, 1;", "", "setp.eq.u32 %p5, %r0, 0;", UninitializedError, "register %p5 is read", "add.u32 %r1"),
    Fault("a branch on a predicate never written", "@\n@%p5 bra L;\nL:\nmov.u32 %r1, 0;", "", "setp.eq.u32 %p5, %r0, 0;", UninitializedError, "register %p5 is read", "bra L"),
    Fault("a copy of an unwritten register is used", "@\nmov.u32 %r2, %r1;\nadd.u32 %r3, %r2, 1;", "", "mov.u32 %r1, 0;", UninitializedError, "%r2", "add.u32 %r3"),
    Fault("shared memory never written", "mul.lo.u32 %r1, %r0, 4;\nst.shared.u32 [%r1], %r0;\nld.shared.u32 %r2, [%r1+@];", "128", "0", UninitializedError, "byte 0x100 of shared memory is read, but was never written", "ld.shared", (1, 0)),
    Fault("half of a word never written", "mul.lo.u32 %r1, %r0, 4;\nmov.u16 %h1, 1;\n@\nst.shared.u16 [%r1], %h1;\nld.shared.u32 %r2, [%r1];", "", "st.shared.u16 [%r1+2], %h1;", UninitializedError, "byte 0x2 of shared", "ld.shared"),
    Fault("local memory never written", ".local .align 4 .b8 depot[16];\nst.local.u32 [depot], %r0;\nld.local.u32 %r1, [depot+@];", "4", "0", UninitializedError, "local memory", "ld.local"),
    Fault("no wait for a copy", COPY + "@\nld.shared.u32 %r3, [%r1];", "", "cp.async.wait_group 0;", PendingCopyError, "byte 0x0 of shared memory is read before the asynchronous copy to it has been waited for", "ld.shared"),
    Fault("a wait that leaves the group open", COPY + "cp.async.wait_group @;\nld.shared.u32 %r3, [%r1];", "1", "0", PendingCopyError, "before the asynchronous copy", "ld.shared"),
    Fault("a wait for a group that was not committed", COPY.replace("cp.async.commit_group;", "@") + "cp.async.wait_group 0;\nld.shared.u32 %r3, [%r1];", "", "cp.async.commit_group;", PendingCopyError, "before the asynchronous copy", "ld.shared"),
    Fault("no barrier behind the wait", COPY + "cp.async.wait_group 0;\n@\n" + SHIFTED + "ld.shared.u32 %r3, [%r2];", "", "bar.sync 0;", VgpuError, "shared memory is read", "ld.shared", schedule="priority"),
    Fault("ldmatrix before the wait", COPY + "@\nldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r3,%r4,%r5,%r6}, [%r1];", "", "cp.async.wait_all;", PendingCopyError, "before the asynchronous copy", "ldmatrix"),
    Fault("a store where a copy is to arrive", COPY + "@\nst.shared.u32 [%r1], %r0;\ncp.async.wait_all;", "", "cp.async.wait_all;", PendingCopyError, "is written while an asynchronous copy to it is on its way", "st.shared"),
    Fault("a copy where a copy is to arrive", COPY + "@\ncp.async.ca.shared.global [%r1], [%d3], 8;\ncp.async.wait_all;", "", "cp.async.wait_all;", PendingCopyError, "is written while", "cp.async.ca"),
    Fault("barrier under divergence", "setp.lt.u32 %p1, %r0, @;\n@%p1 bra L;\nbar.sync 0;\nL:\nmov.u32 %r1, 0;", "5", "0", DivergenceError, r"lanes \[0, 1, 2, 3, 4\] of the warp do not execute this barrier", "bar.sync", (0, 5)),
    Fault("different counts at a barrier", "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra L;\nbar.sync 1, 64;\nbra.uni D;\nL:\nbar.sync 1, @;\nD:\nmov.u32 %r1, 0;", "32", "64", BarrierError, r"barrier 1 is used with", "bar.sync 1"),
    Fault("a count that is no multiple of 32", "bar.sync 1, @;", "48", "64", BarrierError, "48 threads at barrier 1", "bar.sync"),
    Fault("a barrier that does not exist", "bar.sync @;", "16", "15", BarrierError, "barrier 16 does not exist", "bar.sync"),
    Fault("more arrivals than expected", "bar.arrive 1, 64;\n@", "bar.arrive 1, 32;", "bar.sync 0;", BarrierError, "barrier 1 is used with 32 threads", "bar.arrive 1, 32", schedule="priority"),
    Fault("trap", "setp.eq.u32 %p1, %r0, @;\n@%p1 trap;", "37", "64", TrapError, "trap", "trap", (1, 5)),
    Fault("unknown instruction", "@", "frobnicate.b32 %r1, %r0;", "mov.b32 %r1, %r0;", UnsupportedInstructionError, "unknown instruction frobnicate.b32", "frobnicate"),
    Fault("unknown modifier", "add.@s32 %r1, %r0, %r0;", "half.", "", UnsupportedInstructionError, "unsupported form add.half.s32: modifier .half", "add.half"),
    Fault("indexed branch beyond its labels", "ts: .branchtargets X, Y;\nmov.u32 %r1, @;\nbrx.idx %r1, ts;\nX:\nY:\nmov.u32 %r2, 0;", "2", "1", VgpuError, "beyond its 2 targets", "brx.idx"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_planted_fault(fault):
    run(
        fault.body.replace("@", fault.clean) if "@%" not in fault.body else _replaced(fault.body, fault.clean),
        threads=fault.threads,
        shared=1024,
        gpu=Gpu(schedule=fault.schedule),
    )
    with pytest.raises(fault.error, match=fault.message) as caught:
        run(_replaced(fault.body, fault.faulty), threads=fault.threads, shared=1024, gpu=Gpu(schedule=fault.schedule))
    error = caught.value
    assert isinstance(error, Fa4Error)
    place = error.place
    assert place.kernel == "k"
    assert place.cta == (0, 0, 0)
    assert fault.at in place.ptx_text
    assert kernel(_replaced(fault.body, fault.faulty)).splitlines()[place.ptx_line - 1].strip() == place.ptx_text
    if fault.schedule == "round_robin":
        assert (place.warp, place.lane) == fault.who
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def _replaced(body: str, text: str) -> str:
    """@ replaced, but not where it begins a guard."""
    return body.replace("@%", "\0").replace("@!", "\1").replace("@", text).replace("\0", "@%").replace("\1", "@!")


def test_a_write_to_a_read_only_buffer():
    gpu = Gpu()
    array = np.zeros(64, np.uint32)
    gpu.register_buffer(0x10000, array, "weights", writable=False)
    text = kernel("st.global.u32 [%d11], %r0;")
    with pytest.raises(OutOfBoundsError, match="a write to buffer 'weights', which is read-only"):
        gpu.launch(Program.parse(text), "k", (1,), (32,), 0, [(0x10000).to_bytes(8, "little")] * 3)
    assert not array.any()


def test_a_deadlock_is_a_table():
    body = "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra L;\nbar.sync 2, 64;\nbra.uni D;\nL:\nbar.sync 1, 64;\nD:\nmov.u32 %r1, 0;"
    with pytest.raises(DeadlockError) as caught:
        run(body, threads=96)
    rows = str(caught.value).splitlines()
    line = {text: i for i, text in enumerate(kernel(body).splitlines(), 1)}
    assert (
        rows[1]
        == f"  CTA (0, 0, 0) warp 0: waits for barrier 1: 32 of 64 threads arrived, warps [0] at PTX line {line['bar.sync 1, 64;']}: bar.sync 1, 64;"
    )
    assert rows[2] == "  CTA (0, 0, 0) warp 1: exited" or "barrier 2" in rows[2]
    run(body.replace("bar.sync 2, 64", "bar.sync 1, 96").replace("bar.sync 1, 64", "bar.sync 1, 96"), threads=96)


def test_a_barrier_counts_those_that_have_not_exited():
    run("setp.lt.u32 %p1, %r0, 32;\n@%p1 exit;\nbar.sync 0;\nst.global.u32 [%d12], %r0;", threads=96, gpu=Gpu(schedule="priority"))


def test_producers_may_arrive_without_waiting():
    body = """
    shl.b32 %r1, %r0, 2;
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra CONSUMER;
    st.shared.u32 [%r1], %r0;
    bar.arrive 3, 64;
    bra.uni DONE;
    CONSUMER:
    bar.sync 3, 64;
    ld.shared.u32 %r2, [%r1+-128];
    st.global.u32 [%d12], %r2;
    DONE:
    mov.u32 %r3, 0;
    """
    for seed in range(4):
        for schedule in ("round_robin", "random", "priority"):
            _, out, _ = run(body, threads=64, shared=128, gpu=Gpu(schedule=schedule, seed=seed))
            assert out[32:64].tolist() == list(range(32))


def test_a_source_changed_before_the_wait_shows():
    """The copy reads when it completes; on hardware either value may arrive."""
    body = COPY + "st.global.u32 [%d3], %r0;\n{}\ncp.async.wait_all;\nld.shared.u32 %r3, [%r1];\nst.global.u32 [%d12], %r3;"
    late, early = (run(body.format(""), shared=1024, threads=32, gpu=Gpu(delay=delay))[1][:32] for delay in ("late", "early"))
    assert late.tolist() == list(range(32))
    assert not early.any()


def test_zero_fill_of_copies():
    for options, count in ((", %r5", None), (", %p1", 0), ("", 16)):
        body = f"""
        setp.eq.u32 %p1, %r0, %r0;
        and.b32 %r5, %r0, 15;
        shl.b32 %r1, %r0, 4;
        mad.wide.u32 %d3, %r0, 16, %d0;
        cp.async.ca.shared.global [%r1], [%d3], 16{options};
        cp.async.wait_all;
        ld.shared.v4.u32 {{%r10,%r11,%r12,%r13}}, [%r1];
        mad.wide.u32 %d4, %r0, 16, %d1;
        st.global.v4.u32 [%d4], {{%r10,%r11,%r12,%r13}};
        """
        source = np.full(4096, 0x01020304, np.uint32)
        for delay in ("late", "early"):
            _, out, _ = run(body, shared=512, arrays=(source, None, None), gpu=Gpu(delay=delay))
            rows = out[:128].view(np.uint8).reshape(32, 16)
            expected = np.where(np.arange(16) < (np.arange(32)[:, None] % 16 if count is None else count), source[:4].view(np.uint8), 0)
            assert (rows == expected).all()


def test_places_come_from_the_line_table():
    text = kernel(".loc 1 41 3, function_name $str, inlined_at 1 97 5\nld.global.u32 %r1, [%d0+1];").replace(
        ".visible", '.file 1 "fa4/kernels/some.py"\n.visible', 1
    )
    gpu = Gpu()
    gpu.register_buffer(0x10000, 4096, "a")
    with pytest.raises(MisalignedError) as caught:
        gpu.launch(Program.parse(text), "k", (1,), (32,), 0, [(0x10000).to_bytes(8, "little")] * 3)
    assert caught.value.place.source == "fa4/kernels/some.py:41 inlined at fa4/kernels/some.py:97"
    assert str(caught.value).splitlines()[-1] == "  source fa4/kernels/some.py:41 inlined at fa4/kernels/some.py:97"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("add.u32 %r1, %r0, ?;", r"PTX line 18: unexpected '\?"),
        ("add.u32 %r1, %r0", "expected ','"),
        ("@%r1 add.u32 %r1, %r0, 1;", "%r1 is no predicate"),
        ("bra NOWHERE;", "unknown label in bra NOWHERE"),
        (".reg .v4 .b32 %v;", "vector registers are not supported"),
        ("{ mov.u32 %r1, 0;", "a body does not end"),
        (".reg .b128 %q<2>;\nxor.b128 %q0, %q0, %q1;", "xor.b128 with a register of 128 bits is not supported"),
    ],
)
def test_text_that_is_no_ptx(body, message):
    with pytest.raises(PtxSyntaxError, match=message):
        Program.parse(kernel(body))


def test_unwritten_registers_may_be_nan():
    body = "setp.lt.u32 %p1, %r0, 16;\n@%p1 mov.u32 %r1, 5;\nadd.f32 %r2, %r1, %r1;\nst.global.u32 [%d12], %r2;"
    with pytest.raises(UninitializedError, match="register %r1"):
        run(body)
    out = run(body, gpu=Gpu(unwritten="nan"))[1][:32].view(np.float32)
    assert np.isnan(out[16:]).all()
    assert not np.isnan(out[:16]).any()
    with pytest.raises(UninitializedError, match="register %p5"):
        run("@%p5 mov.u32 %r1, 5;", gpu=Gpu(unwritten="nan"))
