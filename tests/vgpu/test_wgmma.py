"""wgmma: operands laid out element by element by the formulas of the PTX ISA, results against exact products."""

from __future__ import annotations

import re

import numpy as np
import pytest
from matrix_tiles import A_AT, B_AT, SHARED, TYPES, U32, dump, fill_shared, layout, matrix, place, registers
from ptx_text import run

from fa4.vgpu import DivergenceError, Gpu, MatrixDescriptorError, PendingMultiplyError, UninitializedError, UnsupportedInstructionError
from fa4.vgpu.descriptor import MatrixDescriptor, Operand


def rows_columns(n):
    """Row and column of each thread's f32 result registers, 128 threads."""
    t, k = np.ogrid[:128, : n // 2]
    return t // 32 * 16 + t % 32 // 4 + 8 * (k // 2 % 2), 8 * (k // 4) + 2 * (t % 4) + k % 2


def execute(body, memory, words, threads=128, **options):
    source = np.zeros(SHARED // 4, U32)
    source[: len(memory) // 4] = memory.view(U32)
    out = np.zeros(words, U32)
    gpu = options.pop("gpu", None) or Gpu("sm_90a", **options)
    run(fill_shared(memory) + body, gpu=gpu, threads=threads, shared=SHARED - 1024, arrays=(None, source, out))
    return out


FORMS = [
    # n, accumulator, a, b, swizzle, A in registers, transposed A and B, negated A and B
    (8, "f32", "bf16", "bf16", 128, False, (False, False), (False, False)),
    (64, "f32", "bf16", "bf16", 128, True, (False, True), (True, False)),
    (128, "f32", "f16", "f16", 64, False, (True, True), (True, True)),
    (96, "f16", "f16", "f16", 32, False, (False, True), (False, True)),
    (24, "f16", "f16", "f16", 0, True, (False, False), (False, False)),
    (64, "f32", "bf16", "bf16", 0, False, (True, True), (False, False)),
    (64, "f32", "bf16", "bf16", 32, False, (True, False), (False, False)),
    (256, "f32", "tf32", "tf32", 128, False, (False, False), (False, False)),
    (40, "f32", "tf32", "tf32", 32, True, (False, False), (False, True)),
    (72, "f32", "e4m3", "e5m2", 128, True, (False, False), (False, False)),
    (64, "f16", "e5m2", "e5m2", 64, False, (False, False), (True, False)),
    (48, "s32", "s8", "u8", 128, False, (False, False), (False, False)),
    (32, "s32", "u8", "s8", 0, True, (False, False), (False, False)),
]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms(form, steps):
    """D = A B, then D += A B for each further step, against exact integers."""
    n, accumulator, a, b, swizzle, in_registers, transposed, negated = form
    rng = np.random.default_rng(n)
    size = np.dtype(TYPES[a]).itemsize
    k = 32 // size
    A, B = matrix(rng, (64, k), a), matrix(rng, (n, k), b)
    operands = Operand("A", 64, k, size, transposed[0]), Operand("B", n, k, size, transposed[1])
    descriptors = layout(A_AT, operands[0], swizzle), layout(B_AT, operands[1], swizzle)
    memory = np.zeros(SHARED, np.uint8)
    for values, operand, descriptor in zip((A, B), operands, descriptors, strict=True):
        place(memory, descriptor, operand, values)
    count = n // 4 if accumulator == "f16" else n // 2
    load_a, first = "", f"{descriptors[0].encode(False)}"
    if in_registers:
        per = 4 // size
        t, r, i = np.ogrid[:128, :4, :per]
        fragment = np.ascontiguousarray(A[t // 32 * 16 + t % 32 // 4 + 8 * (r % 2) + 0 * i, t % 4 * per + i + 4 * per * (r // 2)])
        memory[: 128 * 16] = 0
        memory[98304 - 2048 : 98304] = fragment.view(np.uint8).reshape(-1)
        load_a = f"mul.lo.u32 %r7, %r0, 16;\nld.shared.v4.u32 {registers(10, 4)}, [%r7+{98304 - 2048}];"
        first = registers(10, 4)
    signs = "".join(f", {-1 if x else 1}" for x in negated) if accumulator != "s32" else ""
    flags = "".join(f", {int(x)}" for x in (transposed[1:] if in_registers else transposed)) if a in ("f16", "bf16") else ""
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{accumulator}.{a}.{b}"
    lines = [load_a, "wgmma.fence.sync.aligned;"]
    for step in range(steps):
        lines.append(f"{opcode} {registers(20, count)}, {first}, {descriptors[1].encode(False)}, {int(step > 0)}{signs}{flags};")
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", dump(20, count)]
    out = execute("\n".join(lines), memory, 128 * count).reshape(128, count)
    sign = -1 if negated[0] != negated[1] else 1
    exact = sign * steps * (A.astype(np.float64) @ B.astype(np.float64).T)
    rows, columns = rows_columns(n)
    expected = exact[rows, columns]
    if accumulator == "f16":
        assert np.array_equal(out.view(np.float16), expected.astype(np.float16))
    else:
        assert np.array_equal(out.view(np.float32 if accumulator == "f32" else np.int32), expected)


def simple(between="", end="wgmma.wait_group.sync.aligned 0;", before="", transform=lambda text: text):
    """Two K steps of A (64 x 32) times B (64 x 32), both in one 64-byte swizzle; (registers, exact)."""
    rng = np.random.default_rng(5)
    A, B = matrix(rng, (64, 32), "bf16"), matrix(rng, (64, 32), "bf16")
    memory = np.zeros(SHARED, np.uint8)
    descriptors = []
    for values, at in ((A, A_AT), (B, B_AT)):
        operand = Operand("A", 64, 32, 2, False)
        descriptor = MatrixDescriptor(at, 16, 512, 64)
        place(memory, descriptor, operand, values)
        descriptors.append(descriptor)
    step = [[MatrixDescriptor(d.start + 32 * i, 16, 512, 64).encode(False) for d in descriptors] for i in (0, 1)]
    multiply = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {d}, {a}, {b}, {scale}, 1, 1, 0, 0;"
    body = "\n".join(
        [
            before,
            "wgmma.fence.sync.aligned;",
            *(multiply.format(d=registers(20, 32), a=a, b=b, scale=i) for i, (a, b) in enumerate(step)),
            "wgmma.commit_group.sync.aligned;",
            between,
            end,
            dump(20, 32),
        ]
    )
    return transform(body), memory, A.astype(np.float64) @ B.astype(np.float64).T


@pytest.mark.parametrize("schedule", ["round_robin", "random", "priority"])
@pytest.mark.parametrize("threads", [128, 256])
def test_k_steps_add_up_in_every_schedule(schedule, threads):
    body, memory, exact = simple()
    out = execute(body, memory, threads * 32, threads, schedule=schedule, seed=3).reshape(-1, 128, 32)
    rows, columns = rows_columns(64)
    for group in out.view(np.float32):
        assert np.array_equal(group, exact[rows, columns])


FAULTS = [
    ("add.f32 %r200, %r20, %r21;", "the result of a wgmma that has not been waited for is touched"),
    ("mov.b32 %r51, 0;", "the result of a wgmma that has not been waited for is touched"),
    ("wgmma.wait_group.sync.aligned 1;\nadd.f32 %r200, %r20, %r21;", "the result of a wgmma that has not been waited for is touched"),
]


@pytest.mark.parametrize(("between", "message"), FAULTS)
def test_results_are_out_of_bounds_until_they_are_waited_for(between, message):
    body, memory, exact = simple(between)
    with pytest.raises(PendingMultiplyError, match=message) as caught:
        execute(body, memory, 4096)
    assert caught.value.place.ptx_text in between
    clean, memory, exact = simple(between="wgmma.wait_group.sync.aligned 0;\n" + between.replace("mov.b32 %r51, 0;", "mov.b32 %r199, 0;"))
    out = execute(clean, memory, 4096).reshape(128, 32)
    assert np.array_equal(out.view(np.float32), exact[rows_columns(64)])


def test_an_uncommitted_multiplication_is_never_complete():
    body, memory, _ = simple(transform=lambda text: text.replace("wgmma.commit_group.sync.aligned;", ""))
    with pytest.raises(PendingMultiplyError, match="not been waited for"):
        execute(body, memory, 4096)


def test_a_registers_may_not_change_before_the_wait():
    def in_registers(text):
        return re.sub(r"(m64n64k16\S* \{[^}]*\}), \d+, (\d+, \d), 1, 1, 0, 0;", r"\1, {%r10, %r11, %r12, %r13}, \2, 1, 1, 0;", text)

    zero = "".join(f"mov.b32 %r{10 + i}, 0;\n" for i in range(4))
    body, memory, _ = simple("mov.b32 %r12, 5;", before=zero, transform=in_registers)
    with pytest.raises(PendingMultiplyError, match="an A register of a wgmma that has not been waited for is overwritten"):
        execute(body, memory, 4096)
    clean, memory, _ = simple("mov.b32 %r14, %r12;", before=zero, transform=in_registers)
    assert not execute(clean, memory, 4096).any()


def test_operands_are_read_as_late_as_the_wait():
    """Shared memory that changes before the wait changes the result."""
    overwrite = "shl.b32 %r7, %r0, 4;\nmov.b32 %r8, 0;\n" + "\n".join(
        f"st.shared.v4.u32 [%r7+{A_AT + 2048 * i}], {{%r8, %r8, %r8, %r8}};" for i in range(2)
    )
    body, memory, _ = simple(overwrite + "\nbar.sync 0;")
    assert not execute(body, memory, 4096).any()


def test_warps_of_a_warpgroup_must_agree():
    def differ(text):
        a = MatrixDescriptor(A_AT, 16, 512, 64).encode(False)
        pick = f"mov.u64 %d20, {a};\nsetp.ge.u32 %p2, %r0, 96;\n@%p2 add.u64 %d20, %d20, 2;\n"
        return pick + text.replace(f" {a},", " %d20,", 1)

    body, memory, _ = simple(transform=differ)
    with pytest.raises(DivergenceError, match="the warps of warpgroup 0 issue different multiplications"):
        execute(body, memory, 4096)
    lanes, memory, _ = simple(transform=lambda text: differ(text).replace("%r0, 96;", "%r0, 100;"))
    with pytest.raises(DivergenceError, match="descriptor of A differs between lanes"):
        execute(lanes, memory, 4096)


def test_wrong_descriptors_say_so_at_the_instruction():
    a = MatrixDescriptor(A_AT, 16, 512, 64).encode(False)
    body, memory, _ = simple(transform=lambda text: text.replace(f" {a},", f" {a | 1 << 46},"))
    with pytest.raises(MatrixDescriptorError, match=r"descriptor of A, .*bits 46 are reserved") as caught:
        execute(body, memory, 4096)
    assert "wgmma.mma_async" in caught.value.place.ptx_text
    beyond = MatrixDescriptor(81920, 16, 512, 64).encode(False)
    body, memory, _ = simple(transform=lambda text: text.replace(f" {a},", f" {beyond},"))
    with pytest.raises(UninitializedError, match=r"A: byte 0x14000 of shared memory is read"):
        execute(body, memory[:81920], 4096)


def test_forms_that_do_not_exist():
    for shape, types, tail in (
        ("m64n12k16", "f32.bf16.bf16", ", 1, 1, 1, 0, 0"),
        ("m64n64k8", "f32.bf16.bf16", ", 1, 1, 1, 0, 0"),
        ("m64n64k16", "f16.bf16.bf16", ", 1, 1, 1, 0, 0"),
        ("m64n64k8", "f32.tf32.tf32", ", 1, 1, 1, 0, 0"),
        ("m64n40k32", "s32.s8.s8", ", 1"),
        ("m64n64k16", "f32.bf16.bf16", ", 1, 2, 1, 0, 0"),
    ):
        text = f"wgmma.mma_async.sync.aligned.{shape}.{types} {registers(20, 32)}, %d1, %d1{tail};"
        with pytest.raises(UnsupportedInstructionError, match=shape):
            run(text, threads=128, gpu=Gpu("sm_90a"))


def test_no_bit_depends_on_what_is_carried_out_together():
    """Values whose sum depends on the order: three instructions in one group, and each in its own, waited for."""
    rng = np.random.default_rng(7)
    A, B = (rng.standard_normal((64, 16)).astype(TYPES["bf16"]) for _ in range(2))
    memory = np.zeros(SHARED, np.uint8)
    descriptors = []
    for values, name, at in ((A, "A", A_AT), (B, "B", B_AT)):
        operand = Operand(name, 64, 16, 2, False)
        descriptors.append(layout(at, operand, 128))
        place(memory, descriptors[-1], operand, values)
    first, second = (d.encode(False) for d in descriptors)
    opcode = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
    done = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
    steps = [f"{opcode} {registers(20, 32)}, {first}, {second}, {int(i > 0)}, 1, 1, 0, 0;" for i in range(3)]
    together, apart = (
        execute("\n".join(["wgmma.fence.sync.aligned;", *lines, dump(20, 32)]), memory, 128 * 32).reshape(128, 32).view(np.float32)
        for lines in ([*steps, done], [line for step in steps for line in (step, done)])
    )
    assert np.array_equal(together, apart)
    left, right = (np.tile(x.astype(np.float32), (1, 3)) for x in (A, B))
    longer = (left @ right.T)[rows_columns(64)]
    assert np.allclose(together, longer, atol=1e-4)
    assert not np.array_equal(together, longer), "one sum over all of K has other bits"
