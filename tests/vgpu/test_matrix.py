"""ldmatrix, stmatrix, movmatrix and mma.sync, each fragment placed by the formulas of the PTX ISA, element by element."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from ptx_text import run

from fa4.vgpu import DivergenceError, UnsupportedInstructionError
from fa4.vgpu.isa.matrix import SHAPES, group
from fa4.vgpu.program import Program

U32 = np.uint32
TYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "s8": np.int8,
    "u8": np.uint8,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


def random_matrix(rng, shape, type_):
    if type_ in ("s8", "u8"):
        info = np.iinfo(TYPES[type_])
        return rng.integers(info.min, info.max + 1, shape).astype(TYPES[type_])
    values = rng.standard_normal(shape).astype(TYPES[type_])
    if type_ == "tf32":
        values = (values.view(U32) & U32(0xFFFFE000)).view(np.float32)
    return values


def fragments(matrix, rows, columns):
    """Registers (lanes, count) from element positions: ``rows`` and ``columns`` are (lanes, registers, elements)."""
    return np.ascontiguousarray(matrix[rows, columns]).view(U32).reshape(32, -1)


def positions_a(count, per):
    lane, r, i = np.ogrid[:32, :count, :per]
    return lane // 4 + 8 * (r % 2) + 0 * i, lane % 4 * per + i + 4 * per * (r // 2)


def positions_b(count, per):
    lane, r, i = np.ogrid[:32, :count, :per]
    return lane % 4 * per + i + 4 * per * r, lane // 4 + 0 * (r + i)


def positions_c(count, per):
    lane, r, i = np.ogrid[:32, :count, :per]
    if per == 2:
        return lane // 4 + 8 * r + 0 * i, lane % 4 * 2 + i + 0 * r
    return lane // 4 + 8 * (r // 2) + 0 * i, lane % 4 * 2 + r % 2 + 0 * i


def registers(first, count):
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def load(first, count, pointer):
    lines = [f"mul.lo.u32 %r1, %r0, {4 * count};", "cvt.u64.u32 %d3, %r1;", f"add.u64 %d3, %d3, {pointer};"]
    return "\n".join(lines + [f"ld.global.u32 %r{first + i}, [%d3+{4 * i}];" for i in range(count)])


def store(first, count, pointer):
    lines = [f"mul.lo.u32 %r1, %r0, {4 * count};", "cvt.u64.u32 %d3, %r1;", f"add.u64 %d3, %d3, {pointer};"]
    return "\n".join(lines + [f"st.global.u32 [%d3+{4 * i}], %r{first + i};" for i in range(count)])


def forms():
    for (shape, kind), (a, b) in SHAPES.items():
        if kind == "8":
            for x in ("s8", "u8"):
                for y in ("s8", "u8"):
                    yield shape, x, y, "s32", "", a, b
            yield shape, "s8", "s8", "s32", "satfinite.", a, b
        elif kind == "fp8":
            for x, y in (("e4m3", "e4m3"), ("e5m2", "e4m3")):
                yield shape, x, y, "f32", "", a, b
        else:
            yield shape, kind, kind, "f32", "", a, b
            if kind == "f16":
                yield shape, kind, kind, "f16", "", a, b


@pytest.mark.parametrize(("shape", "x", "y", "accumulator", "clamp", "count_a", "count_b"), list(forms()))
def test_mma(shape, x, y, accumulator, clamp, count_a, count_b):
    rng = np.random.default_rng(1)
    k = int(shape.split("k")[1])
    per = {1: 4, 2: 2, 4: 1}[np.dtype(TYPES[x]).itemsize]
    A, B = random_matrix(rng, (16, k), x), random_matrix(rng, (k, 8), y)
    C = {
        "f32": lambda: rng.standard_normal((16, 8)).astype(np.float32),
        "f16": lambda: rng.standard_normal((16, 8)).astype(np.float16),
        "s32": lambda: rng.choice([2**31 - 1, -(2**31), 5], (16, 8)).astype(np.int32),
    }[accumulator]()
    count_c, per_c = (2, 2) if accumulator == "f16" else (4, 1)
    c = fragments(C, *positions_c(count_c, per_c))
    body = "\n".join(
        [
            load(10, count_a, "%d0"),
            load(20, count_b, "%d1"),
            load(30, count_c, "%d2"),
            f"mma.sync.aligned.{shape}.row.col.{clamp}{accumulator}.{x}.{y}.{accumulator} {registers(40, count_c)}, "
            f"{registers(10, count_a)}, {registers(20, count_b)}, {registers(30, count_c)};",
            store(40, count_c, "%d2"),
        ]
    )
    arrays = [np.zeros(4096, U32) for _ in range(3)]
    for array, data in zip(arrays, (fragments(A, *positions_a(count_a, per)), fragments(B, *positions_b(count_b, per)), c), strict=True):
        array[: data.size] = data.reshape(-1)
    out = run(body, arrays=arrays)[2][: c.size].reshape(32, count_c)
    wide = np.int64 if accumulator == "s32" else np.float64
    exact = A.astype(np.float32).astype(wide) @ B.astype(np.float32).astype(wide) + C.astype(wide)
    if clamp:
        exact = exact.clip(-(2**31), 2**31 - 1)
    D = exact.astype(np.uint64).astype(U32).view(np.int32) if accumulator == "s32" else exact.astype(C.dtype)
    assert np.array_equal(out, fragments(D, *positions_c(count_c, per_c)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(count, transposed):
    """Row addresses in any order; the matrices come back through the inverse."""
    rng = np.random.default_rng(2)
    source = rng.integers(0, 2**32, 4096, dtype=U32)
    order = rng.permutation(32)
    table = np.zeros(4096, U32)
    table[:32] = order * 16
    trans = ".trans" if transposed else ""
    body = f"""
    mul.wide.u32 %d3, %r0, 16;
    add.u64 %d4, %d0, %d3;
    ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%d4];
    mul.lo.u32 %r5, %r0, 16;
    st.shared.v4.u32 [%r5], {{%r1, %r2, %r3, %r4}};
    bar.sync 0;
    ld.global.u32 %r6, [%d12];
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers(10, count)}, [%r6];
    {store(10, count, "%d2")}
    add.u32 %r6, %r6, 512;
    stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r6], {registers(10, count)};
    setp.ge.u32 %p1, %r0, {8 * count};
    @%p1 exit;
    ld.shared.v4.u32 {{%r1, %r2, %r3, %r4}}, [%r6];
    ld.shared.v4.u32 {{%r20, %r21, %r22, %r23}}, [%r6+-512];
    xor.b32 %r1, %r1, %r20;
    xor.b32 %r2, %r2, %r21;
    xor.b32 %r3, %r3, %r22;
    xor.b32 %r4, %r4, %r23;
    or.b32 %r1, %r1, %r2;
    or.b32 %r1, %r1, %r3;
    or.b32 %r1, %r1, %r4;
    st.global.u32 [%d12], %r1;
    """
    _, difference, out = run(body, shared=1024, arrays=(source, table, None))
    shared = source[:128].view(np.uint16).reshape(32, 8)
    got = out[: 32 * count].reshape(32, count).view(np.uint16).reshape(32, count, 2)
    for lane in range(32):
        for i in range(count):
            matrix = shared[order[8 * i : 8 * i + 8]]
            matrix = matrix.T if transposed else matrix
            assert got[lane, i].tolist() == matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2].tolist()
    assert not difference[: 8 * count].any()


def test_movmatrix():
    source = np.random.default_rng(3).integers(0, 2**32, 4096, dtype=U32)
    _, out, _ = run(
        "ld.global.u32 %r1, [%d11];\nmovmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1;\nst.global.u32 [%d12], %r2;",
        arrays=(source, None, None),
    )
    assert np.array_equal(out[:32].view(np.uint16).reshape(8, 8), source[:32].view(np.uint16).reshape(8, 8).T)


MMA = "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {d}, {a}, {b}, {c};"


def mma(d, a, b, c):
    return MMA.format(d=registers(d, 4), a=registers(a, 2), b=registers(b, 1), c=registers(c, 4))


def test_batches_keep_every_dependence():
    """Chains, shared operands and a result that overwrites an operand give the same as one instruction at a time."""
    chain = [mma(30, 10, 12, 20), mma(40, 10, 13, 20), mma(50, 10, 14, 30), mma(20, 11, 12, 40), mma(10, 20, 12, 50), mma(60, 10, 12, 20)]
    begin = "\n".join(f"add.u32 %r{i}, %r0, {0x3F803F80 + 65539 * i};" for i in range(10, 30))
    end = store(10, 4, "%d1") + "\n" + store(50, 16, "%d2")
    whole = (
        begin
        + "\n"
        + "\n".join(chain)
        + "\n"
        + "mov.b32 %r54, 0;"
        + "".join(f"mov.b32 %r{i}, 0;" for i in (55, 56, 57, 58, 59, 64, 65))
        + end
    )
    apart = whole
    for i, line in enumerate(chain):
        apart = apart.replace(line, line + f"\nbra.uni L{i};\nL{i}:\n")
    results = [run(text, threads=64) for text in (whole, apart)]
    assert np.array_equal(results[0][1], results[1][1])
    assert np.array_equal(results[0][2], results[1][2])
    from ptx_text import kernel

    ops = Program.parse(kernel("\n".join(chain))).kernels["k"].blocks[0].ops
    batches = [g for g in group(ops) if len(g) > 1]
    assert batches, "the first two are independent"


def test_parts_of_a_warp_cannot_multiply():
    body = (
        "setp.lt.u32 %p1, %r0, 5;\n@%p1 bra L;\nldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [dynamic];\nL:\nst.global.u32 [%d12], %r0;"
    )
    with pytest.raises(DivergenceError, match="all lanes of the warp must execute this together") as caught:
        run(body, shared=128)
    assert caught.value.place.lane == 5


def test_forms_that_are_not_modelled_say_so():
    for opcode in ("m16n8k16.row.col.f32.bf16.f16.f32", "m8n8k4.row.col.f32.f16.f16.f32", "m16n8k16.row.col.f16.bf16.bf16.f16"):
        with pytest.raises(UnsupportedInstructionError, match=f"mma.sync.aligned.{opcode}") as caught:
            run(f"mov.u32 %r1, 0;\nmma.sync.aligned.{opcode} {{%r2,%r3,%r4,%r5}}, {{%r1,%r1,%r1,%r1}}, {{%r1,%r1}}, {{%r1,%r1,%r1,%r1}};")
        assert caught.value.place.ptx_line


@pytest.mark.parametrize(
    "text",
    [
        "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r1], {%r2};",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r2, %r3}, [%r1];",
        "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {%r2}, [%r1];",
        "cvt.rs.bf16x2.f32 %r2, %r1, %r1, %r1;",
    ],
)
def test_forms_of_sm_100_that_are_not_modelled_say_so(text):
    with pytest.raises(UnsupportedInstructionError, match=text.split()[0]):
        run("mov.u32 %r1, 0;\nmov.u32 %r2, 0;\n" + text, shared=512)
