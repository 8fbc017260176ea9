# ruff: noqa: E501 -- kernels and rows of tables in one line
"""Loads, stores, atomics, and instructions across lanes: many small kernels with results stated in numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ptx_text import A, C, kernel, run

from fa4.vgpu import DivergenceError, Gpu, LaunchError, Program

U32 = np.uint32
LANES = np.arange(32)


def words(n=4096, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32)


@pytest.mark.parametrize(("bits", "vector"), [(b, v) for b in (8, 16, 32, 64) for v in (1, 2, 4) if b * v <= 128])
@pytest.mark.parametrize("space", ["global", "shared", "local", "generic"])
def test_every_width_and_space(space, bits, vector):
    size = bits // 8 * vector
    letter = {8: "h", 16: "h", 32: "r", 64: "d"}[bits]
    regs = ", ".join(f"%{letter}{20 + i}" for i in range(vector))
    group = f"{{{regs}}}" if vector > 1 else regs
    suffix = f".v{vector}.b{bits}" if vector > 1 else f".b{bits}"
    lines = [f"mul.lo.u32 %r1, %r0, {size};", "cvt.u64.u32 %d3, %r1;", "add.u64 %d4, %d0, %d3;", "add.u64 %d5, %d1, %d3;"]
    lines += [f"ld.global{suffix} {group}, [%d4];"]
    if space == "shared":
        lines += [
            "mov.u32 %r2, dynamic;",
            "add.u32 %r2, %r2, %r1;",
            f"st.shared{suffix} [%r2], {group};",
            f"ld.shared{suffix} {group}, [%r2];",
        ]
    elif space == "local":
        lines += [
            ".local .align 16 .b8 depot[32];",
            "mov.u32 %r2, depot;",
            f"st.local{suffix} [%r2+16], {group};",
            f"ld.local{suffix} {group}, [%r2+16];",
        ]
    elif space == "generic":
        lines += [
            "mov.u64 %d6, dynamic;",
            "cvta.shared.u64 %d6, %d6;",
            "add.u64 %d6, %d6, %d3;",
            f"st{suffix} [%d6], {group};",
            f"ld{suffix} {group}, [%d6];",
        ]
    lines += [f"st.global{suffix} [%d5], {group};"]
    source, target, _ = run("\n".join(lines), shared=1024, threads=64, arrays=(words(), None, None))
    assert np.array_equal(target.view(np.uint8)[: 64 * size], source.view(np.uint8)[: 64 * size])
    assert not target.view(np.uint8)[64 * size :].any()


def test_narrow_loads_extend_by_their_type():
    source = np.arange(128, 256, dtype=np.uint8).view(np.uint32)
    data = np.resize(source, 4096)
    body = "ld.global.s8 %r1, [%d0+3];\nld.global.u8 %r2, [%d0+3];\nld.global.s16 %d3, [%d0+2];\nst.global.v2.u32 [%d1], {%r1, %r2};\nst.global.u64 [%d1+8], %d3;"
    _, out, _ = run(body, arrays=(data, None, None))
    assert out[:2].tolist() == [0xFFFFFF83, 0x83]
    assert int(out[2:4].view(np.int64)[0]) == np.array([0x82, 0x83], np.uint8).view(np.int16)[0]


def test_guarded_and_divergent_accesses_touch_only_their_lanes():
    body = """
    setp.lt.u32 %p1, %r0, 10;
    @%p1 ld.global.u32 %r1, [%d11];
    @!%p1 mov.u32 %r1, 7;
    and.b32 %r2, %r0, 1;
    setp.eq.u32 %p2, %r2, 1;
    @%p2 bra ODD;
    st.global.u32 [%d12], %r1;
    bra.uni JOIN;
    ODD:
    add.u32 %r1, %r1, 100;
    st.global.u32 [%d12], %r1;
    JOIN:
    activemask.b32 %r3;
    mad.wide.u32 %d5, %r0, 4, %d2;
    st.global.u32 [%d5], %r3;
    """
    _, out, masks = run(body, arrays=(np.arange(1, 4097, dtype=U32), None, None))
    expected = np.where(LANES < 10, LANES + 1, 7) + np.where(LANES % 2, 100, 0)
    assert np.array_equal(out[:32], expected)
    assert (masks[:32] == 0xFFFFFFFF).all(), "the lanes meet again"
    assert not out[32:].any()


def test_loop_with_a_different_count_in_each_lane():
    body = """
    mov.u32 %r1, 0;
    mov.u32 %r2, 0;
    LOOP:
    add.u32 %r2, %r2, %r1;
    add.u32 %r1, %r1, 1;
    setp.le.u32 %p1, %r1, %r0;
    @%p1 bra LOOP;
    st.global.u32 [%d12], %r2;
    """
    _, out, _ = run(body, threads=96)
    lanes = np.arange(96)
    assert np.array_equal(out[:96], lanes * (lanes + 1) // 2)


def test_indexed_branch_and_early_exit():
    body = """
    and.b32 %r1, %r0, 3;
    setp.ge.u32 %p1, %r0, 20;
    @%p1 exit;
    ts: .branchtargets T0, T1, T2, T3;
    brx.idx %r1, ts;
    T0: mov.u32 %r2, 10; bra DONE;
    T1: mov.u32 %r2, 11; bra DONE;
    T2: mov.u32 %r2, 12; bra DONE;
    T3: mov.u32 %r2, 13;
    DONE:
    st.global.u32 [%d12], %r2;
    """
    _, out, _ = run(body)
    assert np.array_equal(out[:32], np.where(LANES < 20, 10 + LANES % 4, 0))


def test_special_registers_of_a_grid():
    body = """
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mad.lo.u32 %r3, %r1, %r2, %r0;
    mov.u32 %r4, %warpid;
    mov.u32 %r5, %laneid;
    mov.u32 %r6, %lanemask_lt;
    mov.u32 %r7, %dynamic_smem_size;
    mov.u32 %r8, %nctaid.x;
    mad.wide.u32 %d3, %r3, 16, %d0;
    st.global.v4.u32 [%d3], {%r4, %r5, %r6, %r7};
    mad.wide.u32 %d4, %r3, 4, %d1;
    st.global.u32 [%d4], %r8;
    """
    out, grid, _ = run(body, threads=64, grid=5, shared=48)
    rows = out[: 5 * 64 * 4].reshape(5, 2, 32, 4)
    assert (rows[..., 0] == np.array([0, 1])[:, None]).all()
    assert (rows[..., 1] == LANES).all()
    assert (rows[..., 2] == (1 << LANES) - 1).all()
    assert (rows[..., 3] == 48).all()
    assert (grid[:320] == 5).all()


# Across lanes


@pytest.mark.parametrize(
    ("mode", "lane", "control"), list(itertools.product(("up", "down", "bfly", "idx"), (0, 1, 5, 16, 31), (0x1F, 0x0, 0x181F, 0x100F)))
)
def test_shuffles(mode, lane, control):
    body = f"ld.global.u32 %r1, [%d11];\nshfl.sync.{mode}.b32 %r2|%p1, %r1, {lane}, {control}, -1;\nst.global.u32 [%d12], %r2;\nselp.u32 %r3, 1, 0, %p1;\nmad.wide.u32 %d5, %r0, 4, %d2;\nst.global.u32 [%d5], %r3;"
    source, out, valid = run(body, arrays=(words(), None, None))
    segment, clamp = control >> 8 & 31, control & 31
    for i in range(32):  # word for word the pseudocode of the ISA
        highest, lowest = (i & segment) | (clamp & ~segment & 31), i & segment
        j, ok = {
            "up": lambda i=i, h=highest: (i - lane, i - lane >= h),
            "down": lambda i=i, h=highest: (i + lane, i + lane <= h),
            "bfly": lambda i=i, h=highest: (i ^ lane, i ^ lane <= h),
            "idx": lambda lo=lowest, h=highest: (lo | lane & ~segment & 31, (lo | lane & ~segment & 31) <= h),
        }[mode]()
        assert out[i] == source[j if ok else i], i
        assert valid[i] == ok, i


def test_shuffle_of_a_register_with_a_fixed_pattern_is_the_same_as_with_a_register():
    fixed = "ld.global.u32 %r1, [%d11];\nshfl.sync.bfly.b32 %r2, %r1, 3, 31, -1;\nst.global.u32 [%d12], %r2;"
    variable = fixed.replace("shfl", "mov.u32 %r5, 3;\nshfl").replace("%r1, 3,", "%r1, %r5,")
    source, out, _ = run(fixed, threads=64, arrays=(words(), None, None))
    assert np.array_equal(out[:64].reshape(2, 32), source[:64].reshape(2, 32)[:, LANES ^ 3])
    assert np.array_equal(run(variable, threads=64, arrays=(words(), None, None))[1], out)


def test_votes_matches_and_reductions():
    body = """
    ld.global.u32 %r1, [%d11];
    and.b32 %r2, %r1, 3;
    setp.eq.u32 %p1, %r2, 1;
    vote.sync.ballot.b32 %r3, %p1, -1;
    vote.sync.any.pred %p2, %p1, -1;
    vote.sync.all.pred %p3, %p1, -1;
    vote.sync.uni.pred %p4, %p1, -1;
    match.any.sync.b32 %r4, %r2, -1;
    match.all.sync.b32 %r5|%p5, %r2, -1;
    redux.sync.add.u32 %r6, %r1, -1;
    redux.sync.min.s32 %r7, %r1, -1;
    redux.sync.xor.b32 %r8, %r1, -1;
    selp.u32 %r10, 1, 0, %p2;
    selp.u32 %r11, 1, 0, %p3;
    selp.u32 %r12, 1, 0, %p4;
    selp.u32 %r13, 1, 0, %p5;
    mad.wide.u32 %d5, %r0, 48, %d1;
    st.global.v4.u32 [%d5], {%r3, %r4, %r5, %r6};
    st.global.v4.u32 [%d5+16], {%r7, %r8, %r10, %r11};
    st.global.v2.u32 [%d5+32], {%r12, %r13};
    """
    source, out, _ = run(body, arrays=(words(), None, None))
    x = source[:32]
    small = x & 3
    rows = out[: 32 * 12].reshape(32, 12)
    ballot = sum(1 << i for i in range(32) if small[i] == 1)
    assert (rows[:, 0] == ballot).all()
    assert rows[:, 1].tolist() == [sum(1 << j for j in range(32) if small[j] == small[i]) for i in range(32)]
    assert (rows[:, 2] == 0).all()
    assert (rows[:, 3] == x.sum(dtype=U32)).all()
    assert (rows[:, 4] == x.view(np.int32).min().view(U32)).all()
    assert (rows[:, 5] == np.bitwise_xor.reduce(x)).all()
    assert rows[0, 6:10].tolist() == [1, 0, 0, 0]


def test_a_shuffle_that_some_lanes_do_not_reach():
    body = "setp.lt.u32 %p1, %r0, 16;\n@%p1 bra L;\nshfl.sync.idx.b32 %r1, %r0, 0, 31, {mask};\nL:\nst.global.u32 [%d12], %r0;"
    with pytest.raises(DivergenceError, match=r"lanes \[0, 1, .*, 15\] are in the mask"):
        run(body.format(mask="-1"))
    run(body.replace("idx.b32 %r1, %r0, 0", "idx.b32 %r1, %r0, 20").format(mask="0xFFFF0000"))


def test_an_election_that_some_lanes_do_not_reach():
    body = "setp.lt.u32 %p1, %r0, 16;\n@%p1 bra L;\nelect.sync %r1|%p2, {mask};\nL:\nst.global.u32 [%d12], %r0;"
    with pytest.raises(DivergenceError, match=r"lanes \[0, 1, .*, 15\] are in the mask"):
        run(body.format(mask="-1"))
    run(body.format(mask="0xFFFF0000"))


# Atomics


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("add.u32", lambda v: v.sum(dtype=U32)),
        ("min.u32", lambda v: v.min()),
        ("max.s32", lambda v: v.view(np.int32).max().view(U32)),
        ("and.b32", np.bitwise_and.reduce),
        ("or.b32", np.bitwise_or.reduce),
        ("xor.b32", np.bitwise_xor.reduce),
        ("exch.b32", lambda v: v[-1]),
    ],
)
def test_atomics(space, operation, expected):
    place = "[%d2]" if space == "global" else "[dynamic]"
    first = "" if space == "global" else "st.shared.u32 [dynamic], %r9;\n"
    last = "" if space == "global" else "ld.shared.u32 %r3, [dynamic];\nst.global.u32 [%d2], %r3;"
    body = f"mov.u32 %r9, 0;\n{first}ld.global.u32 %r1, [%d11];\natom.{space}.{operation} %r2, {place}, %r1;\nst.global.u32 [%d12], %r2;\n{last}"
    source, out, cell = run(body, shared=16, arrays=(words(), None, None))
    assert cell[0] == expected(np.concatenate([[U32(0)], source[:32]]).astype(U32))
    assert out[0] == 0, "lanes come in order"
    red = f"ld.global.u32 %r1, [%d11];\nred.global.{operation} [%d2], %r1;"
    if not operation.startswith("exch"):
        assert run(red, arrays=(words(), None, None))[2][0] == cell[0]


def test_compare_and_swap_makes_a_lock_and_floats_add():
    body = """
    mov.u32 %r1, 0;
    atom.global.cas.b32 %r2, [%d2], 0, %r0;
    atom.global.inc.u32 %r5, [%d2+16], 5;
    mov.b32 %r3, 0f3F000000;
    red.global.add.f32 [%d2+4], %r3;
    mov.b32 %r4, 0x3C003C00;
    red.global.add.noftz.f16x2 [%d2+8], %r4;
    st.global.u32 [%d12], %r2;
    """
    _, old, cell = run(body)
    assert cell[0] == 1, "the first lane swaps in its 0, the second its 1"
    assert old[:3].tolist() == [0, 0, 1]
    assert cell[1:2].view(np.float32)[0] == 16.0
    assert cell[2:3].view(np.float16).tolist() == [32.0, 32.0]
    assert cell[4] == 32 % 6


def test_barrier_reductions():
    body = """
    setp.lt.u32 %p1, %r0, 40;
    bar.red.popc.u32 %r1, 0, %p1;
    bar.red.and.pred %p2, 1, 64, %p1;
    bar.red.or.pred %p3, 0, !%p1;
    selp.u32 %r2, 1, 0, %p2;
    selp.u32 %r3, 1, 0, %p3;
    mad.wide.u32 %d5, %r0, 16, %d1;
    st.global.v4.u32 [%d5], {%r1, %r2, %r3, %r0};
    """
    for schedule in ("round_robin", "random", "priority"):
        _, out, _ = run(body, threads=64, gpu=Gpu(schedule=schedule))
        assert (out[:256].reshape(64, 4)[:, :3] == [40, 0, 1]).all()


def test_generic_addresses_and_isspacep():
    body = """
    mov.u64 %d3, dynamic;
    cvta.shared.u64 %d4, %d3;
    isspacep.shared %p1, %d4;
    isspacep.global %p2, %d4;
    isspacep.global %p3, %d0;
    selp.u32 %r1, 1, 0, %p1;
    selp.u32 %r2, 1, 0, %p2;
    selp.u32 %r3, 1, 0, %p3;
    cvta.to.shared.u64 %d5, %d4;
    cvt.u32.u64 %r4, %d5;
    mov.u64 %d6, p1;
    cvta.param.u64 %d7, %d6;
    ld.u64 %d8, [%d7];
    st.global.v4.u32 [%d8], {%r1, %r2, %r3, %r4};
    """
    _, out, _ = run(body, shared=16)
    assert out[:4].tolist() == [1, 0, 1, 0]


def test_one_lane_is_elected_and_fences_do_no_harm():
    body = """
    ldu.global.u32 %r1, [%d11];
    elect.sync %r2|%p1, -1;
    membar.gl;
    fence.acq_rel.gpu;
    nanosleep.u32 20;
    barrier.sync.aligned 0;
    bar.warp.sync -1;
    prefetch.global.L2 [%d11];
    @%p1 st.global.u32 [%d12], %r1;
    """
    source, out, _ = run(body, threads=64, arrays=(words(), None, None))
    assert np.flatnonzero(out).tolist() == [0, 32]
    assert out[0] == source[0]


def test_module_variables():
    text = kernel("ld.const.u32 %r1, [table+4];\nld.global.u32 %r2, [counter];\nadd.u32 %r2, %r2, %r1;\nst.global.u32 [%d12], %r2;")
    text = text.replace(".visible", ".const .align 4 .u32 table[3] = {5, 6, 7};\n.global .u32 counter = 100;\n.visible")
    gpu = Gpu()
    out = np.zeros(32, U32)
    gpu.register_buffer(A, out, "out")
    for _ in range(2):
        gpu.launch(Program.parse(text), "k", (1,), (32,), 0, [C.to_bytes(8, "little"), A.to_bytes(8, "little"), bytes(8)])
        assert (out == 106).all()


def test_launches_that_do_not_fit():
    program = Program.parse(kernel("").replace("{\n.reg", ".reqntid 32, 1, 1\n{\n.reg"))
    params = [bytes(8)] * 3
    gpu = Gpu("sm_86")
    for change, message in (
        ({"kernel": "other"}, "no kernel 'other'; there are: k"),
        ({"block": (64,)}, r"requires \(32, 1, 1\)"),
        ({"grid": (0,)}, "grid"),
        ({"params": params[:2]}, "2 parameters, k has 3"),
        ({"params": [bytes(8), bytes(4), bytes(8)]}, "4 bytes for parameter p1, which has 8"),
        ({"dynamic_shared_bytes": 10**6}, "sm_86 has 101376"),
        ({"cluster": (2, 1, 1)}, "sm_86 has no clusters"),
    ):
        arguments = {"program": program, "kernel": "k", "grid": (1,), "block": (32,), "params": params, **change}
        with pytest.raises(LaunchError, match=message):
            gpu.launch(**arguments)
    gpu.register_buffer(100, 64, "x")
    with pytest.raises(LaunchError, match="overlaps 'x'"):
        gpu.register_buffer(150, 64, "y")
    with pytest.raises(LaunchError, match="not contiguous"):
        gpu.register_buffer(10**6, np.zeros((4, 4))[:, 1], "z")
    for options in ({"arch": "sm_1"}, {"schedule": "fair"}, {"resident": 0}, {"approximate": "no"}):
        with pytest.raises(LaunchError):
            Gpu(**options).launch(program, "k", (1,), (32,), 0, params)
