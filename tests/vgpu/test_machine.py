# ruff: noqa: E501 -- kernels and rows of tables in one line
"""Schedules, reports and observers."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_text import A, B, C, kernel, run

from fa4.vgpu import Gpu, Program, UninitializedError

TICKET = "mov.u32 %r1, 1;\natom.global.add.u32 %r2, [%d2], %r1;\nst.global.u32 [%d12], %r2;"


def tickets(**options):
    return run("mov.u32 %r9, %ctaid.x;\nmad.wide.u32 %d12, %r9, 512, %d12;\n" + TICKET, threads=128, grid=8, gpu=Gpu(**options))[1][:1024]


@pytest.mark.parametrize("schedule", ["round_robin", "random", "priority"])
def test_schedules_differ_by_seed_and_repeat(schedule):
    first = tickets(schedule=schedule, seed=1)
    assert sorted(first.tolist()) == list(range(1024)), "every ticket is given once"
    assert np.array_equal(first, tickets(schedule=schedule, seed=1))
    same = np.array_equal(first, tickets(schedule=schedule, seed=2))
    assert same == (schedule == "round_robin")


def test_ctas_come_in_order_where_one_is_resident():
    assert tickets(resident=1).reshape(8, 128).min(1).tolist() == [128 * i for i in range(8)]


def test_a_warp_that_spins_does_not_starve_the_one_it_waits_for():
    body = """
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra WRITER;
    SPIN:
    ld.volatile.global.u32 %r1, [%d2];
    setp.eq.u32 %p2, %r1, 0;
    @%p2 bra SPIN;
    bra.uni DONE;
    WRITER:
    mov.u32 %r1, 1;
    st.volatile.global.u32 [%d2], %r1;
    DONE:
    st.global.u32 [%d12], %r1;
    """
    for schedule in ("round_robin", "random", "priority"):
        for seed in range(3):
            gpu = Gpu(schedule=schedule, seed=seed)
            assert (run(body, threads=64, gpu=gpu)[1][:64] == 1).all()
            assert gpu.report().instructions < 500, "a warp that polls global memory gets another priority"


def test_warps_that_wait_for_each_other_take_turns():
    """In the order of their number, twice each: soon done, where a warp that waited longest is not the last one to be asked."""
    body = """
    setp.eq.u32 %p0, %r0, 0;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r3, 0;
    SPIN:
    ld.acquire.gpu.global.u32 %r2, [%d2];
    setp.ne.u32 %p1, %r2, %r1;
    @%p1 bra SPIN;
    @%p0 red.release.gpu.global.add.u32 [%d2], 1;
    add.u32 %r1, %r1, 4;
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p1, %r3, 2;
    @%p1 bra SPIN;
    """
    for seed in range(3):
        gpu = Gpu(schedule="priority", seed=seed)
        run(body, threads=32, grid=4, gpu=gpu)
        assert gpu.report().instructions < 5000


def test_report():
    gpu = Gpu()
    body = "shl.b32 %r1, %r0, 4;\nsetp.lt.u32 %p1, %r0, 16;\n@%p1 st.shared.u32 [%r1], %r0;\ncp.async.ca.shared.global [%r1+1024], [%d0], 8;\nst.global.v2.u32 [%d1], {%r0, %r0};"
    run(body, threads=64, grid=3, shared=3072, gpu=gpu)
    report = gpu.report()
    per_warp = 13
    assert report.instructions == 3 * 2 * per_warp
    assert report.by_warp == (3 * per_warp, 3 * per_warp)
    assert report.by_opcode["st.global.v2.u32"] == 6
    assert report.by_class["st"] == 12
    assert report.by_source == {"": report.instructions}
    assert report.bytes == {"param": 3 * 64 * 24, "shared": 3 * 16 * 4, "cp.async": 3 * 64 * 8, "global": 3 * 64 * 8}
    assert report.ctas == 3
    run(body, threads=64, grid=1, shared=3072, gpu=gpu)
    assert gpu.report().instructions == 4 * 2 * per_warp


def test_source_lines_in_the_report():
    text = kernel(".loc 1 10 0\nadd.u32 %r1, %r0, 1;\nadd.u32 %r1, %r1, 1;\n.loc 1 11 0\nst.global.u32 [%d12], %r1;").replace(
        ".visible", '.file 1 "some.py"\n.visible'
    )
    gpu = Gpu()
    for i, address in enumerate((A, B, C)):
        gpu.register_buffer(address, 4096, str(i))
    gpu.launch(Program.parse(text), "k", (1,), (64,), 0, [a.to_bytes(8, "little") for a in (A, B, C)])
    assert gpu.report().by_source == {"": 14, "some.py:10": 4, "some.py:11": 4}


class Recorder:
    def __init__(self):
        self.blocks, self.events = [], []

    def block(self, cta, warp, block, lanes):
        self.blocks.append((cta, warp, block, lanes))

    def launch(self, launch, program):
        self.ops = launch.kernel.ops

    def event(self, cta, warp, op, lanes, values):
        self.events.append((warp, self.ops[op].opcode, lanes, [None if v is None else v.tolist() for v in values]))


@pytest.mark.parametrize("schedule", ["round_robin", "priority"])
def test_observer_sees_each_warp_in_program_order(schedule):
    body = """
    shl.b32 %r1, %r0, 4;
    cp.async.cg.shared.global [%r1], [%d0], 16;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    setp.lt.u32 %p1, %r0, 40;
    @%p1 bra L;
    bar.arrive 1, 32;
    L:
    st.global.u32 [%d12], %r0;
    """
    body = body.replace("bar.arrive 1, 32;", "mov.u32 %r2, 0;")
    recorder = Recorder()
    gpu = Gpu(schedule=schedule)
    gpu.observer = recorder
    run(body, threads=64, shared=1024, gpu=gpu)
    for warp in (0, 1):
        threads = range(32 * warp, 32 * warp + 32)
        assert [event[1:] for event in recorder.events if event[0] == warp] == [
            ("cp.async.cg.shared.global", 32, [[16 * t for t in threads], [A] * 32, [16]]),
            ("cp.async.commit_group", 32, []),
            ("cp.async.wait_group", 32, [[0]]),
            ("bar.sync", 32, [[0]]),
            ("st.global.u32", 32, [[B + 4 * t for t in threads], list(threads)]),
        ]
    assert [b[2:] for b in recorder.blocks if b[1] == 0] == [(0, 32), (1, 32), (3, 32)]
    assert [b[2:] for b in recorder.blocks if b[1] == 1] == [(0, 32), (1, 32), (2, 24), (3, 32)]


def test_code_is_generated_once_per_program():
    program = Program.parse(kernel("st.global.u32 [%d12], %r0;"))
    for arch in ("sm_80", "sm_86", "sm_80"):
        gpu = Gpu(arch)
        for i, address in enumerate((A, B, C)):
            gpu.register_buffer(address, 4096, str(i))
        gpu.launch(program, "k", (2,), (64,), 0, [a.to_bytes(8, "little") for a in (A, B, C)])
    (code,) = program.code.values()
    assert set(code.blocks) == {(0, True)}


def test_blocks_and_grids_of_three_dimensions_and_a_last_warp_that_is_not_full():
    axes = [f"%{name}.{axis}" for name in ("tid", "ctaid", "ntid", "nctaid") for axis in "xyz"]
    loads = "\n".join(f"mov.u32 %r{10 + i}, {name};" for i, name in enumerate(axes))
    rank = "mad.lo.u32 %r1, %r12, 3, %r11;\nmad.lo.u32 %r1, %r1, 7, %r10;\nmad.lo.u32 %r2, %r15, 3, %r14;\nmad.lo.u32 %r2, %r2, 2, %r13;\nmad.lo.u32 %r1, %r2, 42, %r1;"
    stores = "\n".join(f"st.global.u32 [%d3+{4 * i}], %r{10 + i};" for i in range(12))
    text = kernel(f"{loads}\n{rank}\nmul.wide.u32 %d3, %r1, 48;\nadd.u64 %d3, %d3, %d0;\nbar.sync 0;\n{stores}")
    out = np.zeros(12 * 42 * 12, np.uint32)
    gpu = Gpu(resident=2, schedule="random")
    gpu.register_buffer(A, out, "out")
    gpu.launch(Program.parse(text), "k", (2, 3, 2), (7, 3, 2), 0, [A.to_bytes(8, "little")] * 3)
    rows = iter(out.reshape(-1, 12).tolist())
    for cta in np.ndindex(2, 3, 2):
        for thread in np.ndindex(2, 3, 7):
            assert next(rows) == [*thread[::-1], *cta[::-1], 7, 3, 2, 2, 3, 2]


def test_unwritten_registers_as_nan():
    """Half of the lanes write the register, all use it."""
    body = "setp.lt.u32 %p1, %r0, 16;\n@%p1 mov.u32 %r1, 1;\nadd.u32 %r2, %r1, 5;\nst.global.u32 [%d12], %r2;"
    program = Program.parse(kernel(body))
    for unwritten in ("nan", "error", "nan"):  # one program, both ways
        gpu = Gpu(unwritten=unwritten)
        buffers = [gpu.register_buffer(address, 4096, name) for address, name in ((A, "a"), (B, "b"), (C, "c"))]
        launch = program, "k", (1,), (32,), 0, [a.to_bytes(8, "little") for a in (A, B, C)]
        if unwritten == "error":
            with pytest.raises(UninitializedError, match="register %r1 is read, but was never written"):
                gpu.launch(*launch)
        else:
            gpu.launch(*launch)
            assert buffers[1].view(np.uint32)[:32].tolist() == [6] * 16 + [4] * 16


@pytest.mark.parametrize("body", ["ret;", ".reg .b64 %d<3>;\nmov.u64 %d1, 5;\nadd.u64 %d2, %d1, 1;\nret;"])
def test_kernels_without_registers_of_some_width(body):
    program = Program.parse(f".version 8.8\n.target sm_80\n.address_size 64\n.visible .entry k() {{\n{body}\n}}")
    assert Gpu().launch(program, "k", (1,), (64,)).instructions == 2 * (body.count(";") - body.count(".reg"))
