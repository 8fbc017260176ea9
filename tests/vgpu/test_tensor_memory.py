"""Tensor memory: allocation, who may touch what, and every shape of tcgen05.ld and st by the formulas of the PTX ISA."""

from __future__ import annotations

import re

import numpy as np
import pytest
from matrix_tiles import dump, registers
from ptx_text import run

from fa4.vgpu import DeadlockError, DivergenceError, Gpu, TensorMemoryError, UnsupportedInstructionError

WORDS = 1 << 16


def allocate(columns=512, group=1, slot=0):
    """Warp 0 allocates; afterwards %r1 is the address in every thread, and %r2 with the warp's first lane."""
    return f"""
    mov.u32 %r3, dynamic;
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra HAVE{slot};
    tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r3+{4 * slot}], {columns};
    HAVE{slot}:
    bar.sync 0;
    ld.shared.u32 %r1, [%r3+{4 * slot}];
    shr.u32 %r2, %r0, 5;
    and.b32 %r2, %r2, 3;
    shl.b32 %r2, %r2, 21;
    add.u32 %r2, %r2, %r1;
    """


FILL = "".join(f"mad.lo.u32 %r{20 + i}, %r0, 1000, {i};\n" for i in range(128))
STORE = f"tcgen05.st.sync.aligned.32x32b.x128.b32 [%r2], {registers(20, 128)};\ntcgen05.wait::st.sync.aligned;\nbar.sync 0;\n"
SHAPES = [
    *(("32x32b", n) for n in (1, 2, 4, 8, 16, 32, 64, 128)),
    *(("16x64b", n) for n in (1, 4, 64)),
    *(("16x128b", n) for n in (1, 2, 16)),
    *(("16x256b", n) for n in (1, 2, 16)),
    *(("16x32bx2", n) for n in (1, 8, 32)),
]
SPLIT = 40


def element(shape, t, k):
    """(lane, column) of register k of thread t."""
    if shape == "32x32b":
        return t, k
    if shape == "16x64b":
        return t // 4 + (8 if t & 1 else 0), 2 * k + (t >> 1 & 1)
    if shape == "16x128b":
        return t // 4 + (8 if k & 1 else 0), 4 * (k // 2) + t % 4
    if shape == "16x256b":
        return t // 4 + (8 if k & 2 else 0), 8 * (k // 4) + 2 * (t % 4) + (k & 1)
    return t % 16, k + (SPLIT if t >= 16 else 0)


def count_of(shape, n):
    return n * {"16x128b": 2, "16x256b": 4}.get(shape, 1)


def split_of(shape):
    return f", {SPLIT}" if shape == "16x32bx2" else ""


def give_back(body):
    """The body, and behind it the deallocation of what it allocates, unless it does that itself."""
    allocations = re.findall(r"tcgen05\.alloc\.cta_group::(\d)\S* \[%r3\+(\d+)\], (\S+);", body)
    if "dealloc" in body or not allocations:
        return body
    lines = ["bar.sync 0;", "setp.ge.u32 %p1, %r0, 32;", "@%p1 bra FREED;"]
    for group, slot, columns in allocations:
        lines.append(f"ld.shared.u32 %r1, [%r3+{slot}];\ntcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r1, {columns};")
    return "\n".join([body, *lines, "FREED:"])


def execute(body, words=WORDS, **options):
    body = give_back(body)
    gpu = options.pop("gpu", None) or Gpu("sm_100a")
    return run(body, gpu=gpu, threads=options.pop("threads", 128), shared=4096, arrays=(None, None, np.zeros(words, np.uint32)), **options)[
        2
    ]


@pytest.mark.parametrize(("shape", "n", "half"), [(shape, n, half) for shape, n in SHAPES for half in (0, 16)[: 1 + (shape != "32x32b")]])
def test_load(shape, n, half):
    count = count_of(shape, n)
    body = f"""{allocate()} {FILL} {STORE}
    add.u32 %r2, %r2, {half << 16};
    tcgen05.ld.sync.aligned.{shape}.x{n}.b32 {registers(150, count)}, [%r2]{split_of(shape)};
    tcgen05.wait::ld.sync.aligned;
    {dump(150, count)}"""
    out = execute(body)[: 128 * count].reshape(128, count)
    for t, k in np.ndindex(128, count):
        lane, column = element(shape, t % 32, k)
        assert out[t, k] == (t // 32 * 32 + half + lane) * 1000 + column


@pytest.mark.parametrize(("shape", "n"), SHAPES)
def test_store(shape, n):
    count = count_of(shape, n)
    body = f"""{allocate()} {FILL} {STORE}
    {"".join(f"mad.lo.u32 %r{150 + i}, %r0, 1000, {500000 + i};" for i in range(count))}
    tcgen05.st.sync.aligned.{shape}.x{n}.b32 [%r2]{split_of(shape)}, {registers(150, count)};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x128.b32 {registers(20, 128)}, [%r2];
    {dump(20, 128)}"""
    out = execute(body)[: 128 * 128].reshape(128, 128)
    expected = np.arange(128)[:, None] * 1000 + np.arange(128)
    for t, k in np.ndindex(128, count):
        lane, column = element(shape, t % 32, k)
        expected[t // 32 * 32 + lane, column] = t * 1000 + 500000 + k
    assert np.array_equal(out, expected)


def test_packed_elements_come_from_and_go_to_neighbouring_columns():
    body = f"""{allocate()} {FILL} {STORE}
    tcgen05.ld.sync.aligned.32x32b.x8.pack::16b.b32 {registers(150, 8)}, [%r2];
    tcgen05.st.sync.aligned.32x32b.x8.unpack::16b.b32 [%r2+256], {registers(150, 8)};
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {registers(158, 16)}, [%r2+256];
    {dump(150, 24)}"""
    out = execute(body)[: 128 * 24].reshape(128, 24)
    low = (np.arange(128)[:, None] * 1000 + np.arange(16)) & 0xFFFF
    assert np.array_equal(out[:, :8], low[:, ::2] | low[:, 1::2] << 16)
    assert np.array_equal(out[:, 8:], low)


@pytest.mark.parametrize(
    ("kind", "expected"), [("min.u32", 0), ("max.s32", 31), ("max.f32", 31), ("min.abs.f32", 0), ("max.NaN.f32", None)]
)
def test_load_with_reduction(kind, expected):
    body = f"""{allocate()} {FILL} {STORE}
    {"mov.b32 %r150, 0x7fc00000;" if expected is None else "mov.b32 %r150, %r25;"}
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2+5], {{%r150}};
    tcgen05.ld.red.sync.aligned.32x32b.x32.{kind} {registers(160, 32)}, %r200, [%r2];
    mov.b32 %r201, %r160;
    {dump(200, 2)}"""
    out = execute(body, gpu=Gpu("sm_103a"))[:256].reshape(128, 2)
    assert np.array_equal(out[:, 1], np.arange(128) * 1000)
    if expected is None:
        assert np.isnan(out[:, 0].view(np.float32)).all()
    else:
        assert np.array_equal(out[:, 0], np.arange(128) * 1000 + expected)


def test_registers_in_any_order():
    order = [31, 5, 100, 7, 64, 21, 22, 90]
    names = "{" + ", ".join(f"%r{150 + i}" for i in order) + "}"
    body = f"""{allocate()} {FILL} {STORE}
    {"".join(f"mov.u32 %r{150 + i}, 0;" for i in range(128))}
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {names}, [%r2];
    {dump(150, 128)}"""
    out = execute(body)[: 128 * 128].reshape(128, 128)
    assert np.array_equal(out[:, order], np.arange(128)[:, None] * 1000 + np.arange(8))
    assert (np.delete(out, order, axis=1) == 0).all()


@pytest.mark.parametrize("schedule", ["round_robin", "random", "priority"])
def test_allocations_are_apart_and_wait_for_room(schedule):
    """Two warps take 256 and 512 columns, so that the second to come waits for the other's."""
    body = """
    mov.u32 %r3, dynamic;
    shr.u32 %r4, %r0, 5;
    mad.lo.u32 %r5, %r4, 4, %r3;
    mov.u32 %r6, 256;
    setp.eq.u32 %p1, %r4, 1;
    @%p1 mov.u32 %r6, 512;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], %r6;
    ld.shared.u32 %r7, [%r5];
    mad.lo.u32 %r8, %r4, 0x200000, %r7;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r0};
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, %r6;
    mul.wide.u32 %d3, %r0, 4;
    add.u64 %d3, %d3, %d2;
    st.global.u32 [%d3], %r7;
    """
    out = execute(body, threads=64, gpu=Gpu("sm_100a", schedule=schedule, seed=2))
    assert not out[:64].any()


def fault(body, error, match, **options):
    with pytest.raises(error, match=match) as caught:
        execute(body, **options)
    return caught.value.place


def load(offset=""):
    return f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers(150, 32)}, [%r2{offset}];"


@pytest.mark.parametrize(
    ("columns", "before", "offset", "message"),
    [
        (64, "", "+33", r"column 64 of columns 33 to 64 is not allocated"),
        (512, "", "+481", r"columns 481 to 512; there are 512"),
        (512, "add.u32 %r2, %r2, 0x200000;", "", r"tensor memory lane 32; warp 0 reaches lanes 0 to 31"),
        (512, "add.u32 %r2, %r2, 0x100000;", "", r"tensor memory lane 16; warp 0 reaches lanes 0 to 31"),
    ],
)
def test_columns_and_lanes_out_of_reach(columns, before, offset, message):
    place = fault(allocate(columns) + before + load(offset), TensorMemoryError, message)
    assert "tcgen05.ld" in place.ptx_text
    execute(allocate(columns) + load("+32" if columns == 64 else "+480"))  # the last columns there are


def test_lanes_must_agree_and_be_there():
    fault(allocate() + "and.b32 %r4, %r0, 1;\nadd.u32 %r2, %r2, %r4;" + load(), DivergenceError, "differs between lanes")
    text = allocate() + "setp.ge.u32 %p2, %r0, 40;\n@%p2 bra OUT;\n" + load() + "\nOUT:"
    place = fault(text, DivergenceError, "all lanes of the warp must execute this together")
    assert (place.warp, place.lane) == (1, 0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (allocate(48), "48 columns: must be a power of two from 32 to 512"),
        (
            allocate(32) + "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 64;",
            "dealloc of 64 columns from 0x0; allocated are: 32 from 0x0",
        ),
        ("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" + allocate(), "after tcgen05.relinquish_alloc_permit"),
        ("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" + allocate(), "cta_group::1 in a CTA that uses cta_group::2"),
        (allocate(32, group=2), "needs a pair of CTAs; the cluster has 1"),
    ],
)
def test_misused_allocation(body, message):
    fault(body, TensorMemoryError, message, threads=32)


def test_a_cta_must_give_its_columns_back():
    kept = allocate(64) + "mov.u32 %r4, 0;  // no dealloc"
    place = fault(kept, TensorMemoryError, "ends with columns of tensor memory that were not deallocated: 64 from 0x0")
    assert place.cta == (0, 0, 0)
    execute(allocate(64))


def test_an_allocation_that_never_finds_room_is_a_deadlock():
    fault(allocate(512) + allocate(32, slot=1), DeadlockError, "32 columns of tensor memory; 512 are allocated")


PAIR = """
mov.u32 %r4, %cluster_ctarank;
setp.ne.u32 %p2, %r4, 0;
"""


@pytest.mark.parametrize("schedule", ["round_robin", "random", "priority"])
def test_a_pair_allocates_together(schedule):
    """Both get the same columns; a CTA alone waits for the other."""
    body = allocate(128, group=2) + "mov.u32 %r5, %ctaid.x;\nmul.wide.u32 %d3, %r5, 4;\nadd.u64 %d3, %d3, %d2;\nst.global.u32 [%d3], %r1;"
    out = execute(body, grid=4, cluster=(2,), gpu=Gpu("sm_100a", schedule=schedule, seed=1))
    assert not out[:4].any()
    alone = PAIR + "@%p2 exit;\n" + allocate(128, group=2)
    fault(alone, DeadlockError, "128 columns of tensor memory, in both CTAs of the pair together", grid=2, cluster=(2,))
    differ = "mov.u32 %r6, %cluster_ctarank;\nmad.lo.u32 %r6, %r6, 32, 32;\n" + allocate("%r6", group=2)
    fault(differ, TensorMemoryError, r"the CTAs of a pair allocate \[", grid=2, cluster=(2,))


def test_forms_that_are_not_modelled():
    for text in (
        "tcgen05.shift.cta_group::1.down [%r1];",
        "tcgen05.cp.cta_group::1.128x256b [%r1], %d1;",
        "tcgen05.ld.sync.aligned.32x32b.x3.b32 {%r4, %r5, %r6}, [%r1];",
        "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r4}, [%r1];",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %d1, %d1, [%r1], %r1, 0;",
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r1], %d1, %d1, %r1, [%r1], [%r1], 0;",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %d1, %d1, %r1, 0;",
    ):
        with pytest.raises(UnsupportedInstructionError, match="tcgen05"):
            execute("mov.u32 %r1, 0;\n" + text)
