"""tcgen05.mma: operands laid out element by element, results in tensor memory where the PTX ISA says, against exact products."""

from __future__ import annotations

import numpy as np
import pytest
from matrix_tiles import A_AT, B_AT, SHARED, TYPES, U32, dump, fill_shared, layout, matrix, place, registers
from ptx_text import run
from test_tensor_memory import allocate, give_back

from fa4.vgpu import Gpu, MatrixDescriptorError, TensorMemoryError, UninitializedError, UnsupportedInstructionError, VgpuError
from fa4.vgpu.descriptor import MatrixDescriptor, Operand

KINDS = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "e4m3": "f8f6f4", "e5m2": "f8f6f4", "s8": "i8", "u8": "i8"}
CODES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "u8": 0, "s8": 1}
D_CODES = {"f16": 0, "f32": 1, "s32": 2}
BARRIER, SLOT = 96 * 1024, 96 * 1024 + 16
READY = "mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 0;"


def instruction_descriptor(m, n, a, b, accumulator, negated=(0, 0), transposed=(0, 0), saturate=0):
    bits = saturate << 3 | D_CODES[accumulator] << 4 | CODES[a] << 7 | CODES[b] << 10
    return bits | negated[0] << 13 | negated[1] << 14 | transposed[0] << 15 | transposed[1] << 16 | n // 8 << 17 | m // 16 << 24


def begin(memory, group):
    """Fill shared memory (of every CTA from its part of buffer b), make an mbarrier, allocate; %r8: the rank in an address."""
    text = allocate(512, group).replace("mov.u32 %r3, dynamic;", f"add.u32 %r3, %r10, {SLOT - BARRIER};")
    fill = fill_shared(memory).replace("st.shared.v4.u32 [%r6]", "add.u32 %r6, %r6, %r8;\nst.shared.v4.u32 [%r6]")
    return f"""
    mov.u32 %r9, %cluster_ctarank;
    mul.wide.u32 %d3, %r9, {SHARED};
    add.u64 %d1, %d1, %d3;
    mov.u32 %r8, dynamic;
    and.b32 %r8, %r8, 0xff000000;
    {fill}
    add.u32 %r10, %r8, {BARRIER};
    setp.ne.u32 %p2, %r0, 0;
    @%p2 bra INIT;
    mbarrier.init.shared.b64 [%r10], 1;
    INIT:
    bar.sync 0;
    {text}"""


SYNC = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"


def finish(columns):
    """Wait for the mbarrier, then every thread's lane of D to buffer c."""
    loads = [f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {registers(20, columns)}, [%r2];"]
    if columns & (columns - 1):
        loads = [f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers(20 + i, 8)}, [%r2+{i}];" for i in range(0, columns, 8)]
    where = f"mov.u32 %r9, %ctaid.x;\nmul.wide.u32 %d3, %r9, {128 * 4 * columns};\nadd.u64 %d2, %d2, %d3;\n"
    return "\n".join(
        [
            "WAIT:",
            READY,
            "@!%p3 bra WAIT;",
            "tcgen05.fence::after_thread_sync;",
            *loads,
            "tcgen05.wait::ld.sync.aligned;",
            where,
            dump(20, columns),
        ]
    )


def multiply(a, b, idesc, accumulate="0", group=1, kind="f16", tail="", d="%r1"):
    return f"tcgen05.mma.cta_group::{group}.kind::{kind} [{d}], {a}, {b}, {idesc}, {accumulate}{tail};"


def commit(group=1, mask=None):
    if mask is None:
        return f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.b64 [%r10];"
    return (
        f"mov.b16 %h1, {mask};\ntcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r10], %h1;"
    )


def only_thread_0(lines, leader=False):
    """What the one issuing thread executes (of the even CTA, with a pair)."""
    even = "mov.u32 %r9, %cluster_ctarank;\nsetp.ne.u32 %p5, %r9, 0;\n@%p5 bra ISSUED;\n" if leader else ""
    return "\n".join(["setp.ne.u32 %p4, %r0, 0;", "@%p4 bra ISSUED;", even, *lines, "ISSUED:"])


def execute(body, memories, columns, group=1, **options):
    """(CTA, lane, column) of D."""
    source = np.zeros((group, SHARED // 4), U32)
    for row, memory in zip(source, memories, strict=True):
        row[: len(memory) // 4] = memory.view(U32)
    out = np.zeros((group, 128, columns), U32)
    gpu = Gpu("sm_100a", **options)
    cluster = None if group == 1 else (2,)
    arrays = (None, source.reshape(-1), out.reshape(-1))
    run(give_back(begin(memories[0], group) + body), gpu=gpu, threads=128, grid=group, shared=SHARED - 1024, arrays=arrays, cluster=cluster)
    return out


def place_operands(A, B, a, b, group, transposed, swizzle):
    """(shared memories, descriptors): each CTA has its rows of A and of B."""
    memories = []
    for cta in range(group):
        memory = np.zeros(SHARED, np.uint8)
        descriptors = []
        for values, type_, at, name, mn_major in ((A, a, A_AT, "A", transposed[0]), (B, b, B_AT, "B", transposed[1])):
            part = np.split(values, group)[cta]
            operand = Operand(name, *part.shape, np.dtype(TYPES[type_]).itemsize, bool(mn_major))
            descriptors.append(layout(at, operand, swizzle))
            place(memory, descriptors[-1], operand, part)
        memories.append(memory)
    return memories, [d.encode(True) for d in descriptors]


def where_d_lies(m, n, group):
    """(CTA, lane, column) arrays (m, n) of D's elements."""
    row, column = np.mgrid[:m, :n]
    cta = row // (m // group)
    row = row % (m // group)
    if group == 2 and m == 128:
        return cta, row + 64 * (column // (n // 2)), column % (n // 2)
    if m == 64:
        return cta, 32 * (row // 16) + row % 16, column
    return cta, row, column


FORMS = [
    # group, M, N, accumulator, A, B, swizzle, transposed, negated
    (1, 128, 64, "f32", "bf16", "bf16", 128, (0, 0), (0, 0)),
    (1, 128, 48, "f32", "f16", "f16", 64, (1, 1), (1, 0)),
    (1, 64, 24, "f32", "f16", "f16", 32, (0, 1), (0, 1)),
    (1, 64, 64, "f16", "f16", "f16", 0, (1, 0), (0, 0)),
    (1, 128, 32, "f16", "f16", "f16", 128, (0, 1), (1, 1)),
    (1, 128, 32, "f32", "tf32", "tf32", 128, (0, 0), (0, 0)),
    (1, 64, 32, "f32", "tf32", "tf32", 64, (0, 0), (0, 0)),
    (1, 128, 16, "f32", "e4m3", "e5m2", 32, (0, 0), (0, 0)),
    (1, 128, 64, "f16", "e5m2", "e4m3", 128, (1, 1), (0, 1)),
    (1, 64, 16, "s32", "s8", "u8", 128, (0, 0), (0, 0)),
    (1, 128, 32, "s32", "u8", "s8", 0, (0, 0), (0, 0)),
    (2, 256, 64, "f32", "bf16", "bf16", 128, (0, 0), (0, 0)),
    (2, 256, 96, "f32", "f16", "f16", 32, (1, 1), (0, 1)),
    (2, 128, 64, "f32", "bf16", "bf16", 64, (0, 1), (1, 0)),
    (2, 128, 128, "f32", "e4m3", "e4m3", 128, (0, 0), (0, 0)),
]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms(form, steps):
    """D = A B, then D += A B for each further step; M and N of one CTA or a pair, against exact integers."""
    group, m, n, accumulator, a, b, swizzle, transposed, negated = form
    rng = np.random.default_rng(n)
    k = 32 // np.dtype(TYPES[a]).itemsize
    A, B = matrix(rng, (m, k), a), matrix(rng, (n, k), b)
    memories, (first, second) = place_operands(A, B, a, b, group, transposed, swizzle)
    idesc = instruction_descriptor(m, n, a, b, accumulator, negated, transposed)
    lines = [multiply(first, second, idesc, int(i > 0), group, KINDS[a]) for i in range(steps)]
    columns = n // 2 if group == 2 and m == 128 else n
    body = only_thread_0([*lines, commit(group, 3 if group == 2 else None)], group == 2) + finish(columns)
    out = execute((SYNC if group == 2 else "") + body, memories, columns, group)
    sign = -1 if negated[0] != negated[1] else 1
    exact = sign * steps * (A.astype(np.float64) @ B.astype(np.float64).T)
    got = out[where_d_lies(m, n, group)]
    if accumulator == "f16":
        assert np.array_equal(got.astype(np.uint16).view(np.float16), exact.astype(np.float16))
    else:
        assert np.array_equal(got.view(np.float32 if accumulator == "f32" else np.int32), exact)


@pytest.mark.parametrize(
    ("group", "m", "n", "type_"),
    [(1, 128, 64, "bf16"), (1, 128, 32, "tf32"), (1, 128, 32, "e4m3"), (1, 64, 32, "f16"), (2, 256, 64, "bf16"), (2, 128, 64, "bf16")],
)
def test_a_from_tensor_memory(group, m, n, type_):
    """Each lane stores its row of A, 32 bytes in 8 columns; a pair with M = 128 stores its 64 rows twice."""
    rng = np.random.default_rng(3)
    k = 32 // np.dtype(TYPES[type_]).itemsize
    A, B = matrix(rng, (m, k), type_), matrix(rng, (n, k), type_)
    memories, (_, second) = place_operands(A, B, type_, type_, group, (0, 0), 128)
    for cta, memory in enumerate(memories):
        rows = np.ascontiguousarray(np.split(A, group)[cta]).view(np.uint8)
        if group == 2 and m == 128:
            rows = np.tile(rows, (2, 1))
        lanes = 32 * (np.arange(64) // 16) + np.arange(64) % 16 if m == 64 else np.arange(128)
        image = np.zeros((128, 32), np.uint8)
        image[lanes] = rows
        memory[SHARED - 8192 : SHARED - 4096] = image.reshape(-1)
    load = "shl.b32 %r6, %r0, 5;\nadd.u32 %r6, %r6, %r8;\n"
    load += "".join(f"ld.shared.v4.u32 {registers(11 + 4 * i, 4)}, [%r6+{SHARED - 8192 + 16 * i}];\n" for i in (0, 1))
    store = f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r2+256], {registers(11, 8)};\ntcgen05.wait::st.sync.aligned;\n"
    store += "tcgen05.fence::before_thread_sync;\nadd.u32 %r19, %r1, 256;\n"
    idesc = instruction_descriptor(m, n, type_, type_, "f32")
    columns = n // 2 if group == 2 and m == 128 else n
    line = multiply("[%r19]", second, idesc, 0, group, KINDS[type_])
    body = only_thread_0([line, commit(group, 3 if group == 2 else None)], group == 2) + finish(columns)
    out = execute("\n".join([load, store, "bar.sync 0;", SYNC if group == 2 else "", body]), memories, columns, group)
    assert np.array_equal(out[where_d_lies(m, n, group)].view(np.float32), A.astype(np.float64) @ B.astype(np.float64).T)


def simple(rounding=False):
    """A (128 x 32) B (64 x 32), two steps of K in a 64-byte swizzle; (memories, exact). ``rounding``: sums that float32 must round."""
    rng = np.random.default_rng(5)
    A, B = matrix(rng, (128, 32), "bf16"), matrix(rng, (64, 32), "bf16")
    if rounding:
        A, B = (rng.standard_normal(x.shape).astype(x.dtype) for x in (A, B))
    memory = np.zeros(SHARED, np.uint8)
    for values, at in ((A, A_AT), (B, B_AT)):
        place(memory, MatrixDescriptor(at, 16, 512, 64), Operand("A", *values.shape, 2, False), values)
    return [memory], A.astype(np.float64) @ B.astype(np.float64).T


def step(i, **options):
    a, b = (MatrixDescriptor(at + 32 * i, 16, 512, 64).encode(True) for at in (A_AT, B_AT))
    return multiply(a, b, instruction_descriptor(128, 64, "bf16", "bf16", "f32"), **{"accumulate": i, **options})


@pytest.mark.parametrize(("schedule", "seed"), [("round_robin", 0), ("random", 0), ("random", 1), ("priority", 0), ("priority", 1)])
def test_steps_of_k_add_up_in_every_schedule(schedule, seed):
    memories, exact = simple()
    out = execute(only_thread_0([step(0), step(1), commit()]) + finish(64), memories, 64, schedule=schedule, seed=seed)
    assert np.array_equal(out[0].view(np.float32), exact)
    early = execute(only_thread_0([step(0), step(1), commit()]) + finish(64), memories, 64, delay="early")
    assert np.array_equal(early, out)


@pytest.mark.parametrize("delay", ["late", "early"])
def test_what_is_carried_out_together_does_not_change_a_bit(delay):
    """Late, both steps wait in the engine and are done together; early, each when it is issued. The same as each alone, added up."""
    memories, _ = simple(rounding=True)
    out = execute(only_thread_0([step(0), step(1), commit()]) + finish(64), memories, 64, delay=delay)
    first = execute(only_thread_0([step(0), commit()]) + finish(64), memories, 64).view(np.float32)
    second = execute(only_thread_0([step(1, accumulate=0), commit()]) + finish(64), memories, 64).view(np.float32)
    assert np.array_equal(out, (first + second).view(U32))


@pytest.mark.parametrize("hint", ["fill", "use", "lastuse", "discard"])
def test_hints_for_the_collector_change_nothing(hint):
    memories, exact = simple()
    plain = execute(only_thread_0([step(0), step(1), commit()]) + finish(64), memories, 64)
    hinted = [line.replace(" [", f".collector::a::{hint} [", 1) for line in (step(0), step(1))]
    assert all(".collector::a::" in line for line in hinted)
    out = execute(only_thread_0([*hinted, commit()]) + finish(64), memories, 64)
    assert np.array_equal(out, plain)
    assert np.array_equal(out[0].view(np.float32), exact)


def test_scale_and_disabled_lanes():
    memories, exact = simple()
    ones = "".join(f"mov.b32 %r{20 + i}, 0f3F800000;\n" for i in range(64))
    start = ones + f"tcgen05.st.sync.aligned.32x32b.x64.b32 [%r2], {registers(20, 64)};\ntcgen05.wait::st.sync.aligned;\nbar.sync 0;\n"
    words = "mov.b32 %r11, 0;\nmov.b32 %r12, 5;\nmov.b32 %r13, -1;\nmov.b32 %r14, 0x80000000;"
    first = [words, step(0, accumulate="{%r11, %r12, %r13, %r14}, 1")]
    second = step(1, tail=", 3")
    out = execute(start + only_thread_0([*first, commit()]) + finish(64), memories, 64)[0].view(np.float32)
    plain = execute(start + only_thread_0([step(0), commit()]) + finish(64), memories, 64)[0].view(np.float32)
    disabled = np.zeros(128, bool)
    disabled[[32, 34, 127]] = True
    disabled[64:96] = True
    assert np.array_equal(out, np.where(disabled[:, None], 1, plain + 1))
    out = execute(start + only_thread_0([second, commit()]) + finish(64), memories, 64)[0].view(np.float32)
    assert np.array_equal(out, exact - plain + 0.125)


def test_the_tensor_core_is_late_and_reads_what_is_there_then():
    """Without a wait D is not there; what overwrites A before the commit has arrived changes D."""
    memories, exact = simple()
    lines = only_thread_0([step(0), step(1), commit()])
    without = (lines + finish(64)).replace("@!%p3 bra WAIT;", "").replace(READY, "") + f"\nLATE:\n{READY}\n@!%p3 bra LATE;\n"
    assert np.isnan(execute(without, memories, 64)[0].view(np.float32)).all()
    overwrite = (
        f"shl.b32 %r6, %r0, 4;\nadd.u32 %r6, %r6, %r8;\nmov.b32 %r11, 0;\nst.shared.v4.u32 [%r6+{A_AT}], {{%r11, %r11, %r11, %r11}};\n"
    )
    changed = execute(lines + overwrite + finish(64), memories, 64)[0].view(np.float32)
    assert not np.array_equal(changed, exact)
    after = finish(64).replace("tcgen05.wait::ld.sync.aligned;", overwrite)
    assert np.array_equal(execute(lines + after, memories, 64)[0].view(np.float32), exact)


GOOD = instruction_descriptor(128, 64, "bf16", "bf16", "f32")


@pytest.mark.parametrize(
    ("idesc", "kind", "error", "message"),
    [
        (GOOD | 1 << 2, "f16", UnsupportedInstructionError, "a sparse A"),
        (GOOD | 1 << 6, "f16", MatrixDescriptorError, "must be 0"),
        (GOOD | 2 << 7, "f16", MatrixDescriptorError, "type 3 of A"),
        (GOOD | 2 << 4, "f16", MatrixDescriptorError, "type 3 of D"),
        (GOOD ^ 1 << 10, "f16", MatrixDescriptorError, "A of bf16 and B of f16"),
        (GOOD | 8, "f16", MatrixDescriptorError, "only integers can be saturated"),
        (GOOD ^ 24 << 24, "f16", MatrixDescriptorError, "M must be 64 or 128"),
        (GOOD ^ 1 << 17, "f16", MatrixDescriptorError, "N a multiple of 16"),
        (GOOD, "tf32", MatrixDescriptorError, "type 1 of A"),
        (instruction_descriptor(128, 64, "e4m3", "e4m3", "f32") | 5 << 7, "f8f6f4", UnsupportedInstructionError, "A of type e2m1"),
        (instruction_descriptor(128, 64, "s8", "s8", "s32", (1, 0)), "i8", MatrixDescriptorError, "integers cannot be negated"),
    ],
)
def test_wrong_instruction_descriptors(idesc, kind, error, message):
    memories, _ = simple()
    body = only_thread_0([multiply(*(MatrixDescriptor(at, 16, 512, 64).encode(True) for at in (A_AT, B_AT)), idesc, kind=kind), commit()])
    with pytest.raises(error, match=message) as caught:
        execute(body + finish(64), memories, 64)
    assert "tcgen05.mma" in caught.value.place.ptx_text
    assert caught.value.place.lane == 0


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        (step(0, d="%r1+449"), TensorMemoryError, "D of tcgen05.mma: columns 449 to 512; there are 512"),
        (step(0, d="%r1+0x200000"), TensorMemoryError, "D of tcgen05.mma at lane 32"),
        (
            multiply("[%r1+505]", MatrixDescriptor(B_AT, 16, 512, 64).encode(True), GOOD),
            TensorMemoryError,
            "A of tcgen05.mma: columns 505 to 512",
        ),
        (
            multiply("[%r1+64]", MatrixDescriptor(B_AT, 16, 512, 64).encode(True), GOOD | 1 << 15),
            MatrixDescriptorError,
            "cannot be MN-major",
        ),
        (
            multiply(MatrixDescriptor(A_AT, 16, 512, 64).encode(False), 1 << 46, GOOD),
            MatrixDescriptorError,
            "descriptor of A.*version of sm_100",
        ),
        (
            multiply(1 << 46, MatrixDescriptor(B_AT, 16, 512, 64).encode(True) | 1 << 52, GOOD),
            UnsupportedInstructionError,
            "descriptor of B",
        ),
        (multiply(MatrixDescriptor(100 * 1024, 16, 512, 64).encode(True), 1 << 46, GOOD), VgpuError, "A: 16 bytes at shared address"),
        (
            multiply(MatrixDescriptor(A_AT, 16, 512, 64).encode(True), 1 << 46 | 99328 // 16, GOOD),
            UninitializedError,
            "B: byte .* never written",
        ),
        (step(0, group=2), TensorMemoryError, "cta_group::2 in a CTA that uses cta_group::1"),
    ],
)
def test_operands_out_of_reach(line, error, message):
    memories, exact = simple()
    memories = [memories[0][: 96 * 1024]]
    with pytest.raises(error, match=message) as caught:
        execute(only_thread_0([line, commit()]) + finish(64), memories, 64)
    assert "tcgen05.mma" in caught.value.place.ptx_text
    good = execute(only_thread_0([step(0, d="%r1+448"), step(0), step(1), commit()]) + finish(64), memories, 64)
    assert np.array_equal(good[0].view(np.float32), exact)


def test_a_later_step_is_blamed_for_its_own_fault():
    """Steps are carried out together, and the one at fault is named all the same."""
    memories, _ = simple()
    beyond = multiply(MatrixDescriptor(100 * 1024, 16, 512, 64).encode(True), 1 << 46, GOOD, 1)
    with pytest.raises(VgpuError, match="A: 16 bytes at shared address") as caught:
        execute(only_thread_0([step(0), step(1), beyond, commit()]) + finish(64), memories, 64)
    assert caught.value.place.ptx_text == beyond


def test_a_cta_must_not_end_before_its_multiplications():
    memories, exact = simple()
    lines = only_thread_0([step(0), step(1), commit()])
    with pytest.raises(TensorMemoryError, match="ends before a multiplication that uses its memory is complete") as caught:
        execute(lines, memories, 64)
    assert caught.value.place.ptx_text == step(0)
    assert np.array_equal(execute(lines + finish(64), memories, 64)[0].view(np.float32), exact)


def test_no_bit_depends_on_what_is_carried_out_together():
    """Values whose sum depends on the order: three instructions in the queue together ("late"), and each at its issue."""
    rng = np.random.default_rng(7)
    A, B = (rng.standard_normal((rows, 16)).astype(TYPES["bf16"]) for rows in (128, 64))
    memories, (first, second) = place_operands(A, B, "bf16", "bf16", 1, (0, 0), 128)
    idesc = instruction_descriptor(128, 64, "bf16", "bf16", "f32")
    body = only_thread_0([*(multiply(first, second, idesc, int(i > 0)) for i in range(3)), commit()]) + finish(64)
    late, early = (execute(body, memories, 64, delay=delay)[0].view(np.float32) for delay in ("late", "early"))
    assert np.array_equal(late, early)
    left, right = (np.tile(x.astype(np.float32), (1, 3)) for x in (A, B))
    longer = left @ right.T
    assert np.allclose(late, longer, atol=1e-4)
    assert not np.array_equal(late, longer), "one sum over all of K has other bits"
