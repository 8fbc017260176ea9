"""Sharing rows changes no result: kernels as they are written against the same with a row for every register."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_text import A, B, C, kernel, run

from fa4.vgpu import Gpu, Program, liveness, program
from fa4.vgpu.program import Kernel


def rows_of(body: str) -> dict[str, int]:
    """Rows of the 32-bit registers of a body, by name."""
    found = {}
    for block in Program.parse(kernel(body)).kernels["k"].blocks:
        for op in block.ops if block.end is None else (*block.ops, block.end):
            found |= {r.name: r.index for r in op.read + op.written if r.bits == 32}
    return found


def test_values_that_are_not_needed_together_share_a_row():
    stores = "add.u32 %r1, %r0, 1;\nst.global.u32 [%d11], %r1;\nadd.u32 %r2, %r0, 2;\nst.global.u32 [%d12], %r2;\n"
    rows = rows_of(stores + "add.u32 %r3, %r0, %r2;\nst.global.u32 [%d12], %r3;")
    assert rows["%r1"] == rows["%r2"]
    assert rows["%r2"] != rows["%r3"]
    assert rows["%r0"] not in (rows["%r1"], rows["%r3"])


def test_what_a_loop_needs_again_keeps_its_row():
    body = """
    mov.u32 %r1, 0;
    mov.u32 %r2, 7;
    LOOP:
    add.u32 %r3, %r1, %r2;
    mov.u32 %r4, %r3;
    add.u32 %r1, %r4, 1;
    setp.lt.u32 %p1, %r1, 100;
    @%p1 bra LOOP;
    st.global.u32 [%d11], %r1;
    """
    rows = rows_of(body)
    assert rows["%r2"] not in (rows["%r1"], rows["%r3"], rows["%r4"])
    assert run(body)[0][0] == 104


def test_a_guarded_write_keeps_what_was_there():
    body = """
    mov.u32 %r1, 5;
    setp.lt.u32 %p1, %r0, 4;
    mov.u32 %r2, 3;
    @%p1 mov.u32 %r1, %r2;
    st.global.u32 [%d11], %r1;
    """
    assert rows_of(body)["%r1"] != rows_of(body)["%r2"]
    assert run(body)[0][:32].tolist() == [3] * 4 + [5] * 28


def test_a_guarded_write_in_a_loop_needs_what_was_there():
    body = """
    mov.u32 %r1, 5;
    mov.u32 %r2, 0;
    mov.u32 %r3, 0;
    LOOP:
    setp.gt.u32 %p1, %r2, 1000;
    @%p1 mov.u32 %r1, %r2;
    add.u32 %r3, %r3, %r1;
    add.u32 %r4, %r2, 9;
    add.u32 %r3, %r3, %r4;
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p1, %r2, 3;
    @%p1 bra LOOP;
    st.global.u32 [%d11], %r3;
    """
    assert run(body)[0][0] == 3 * 5 + 9 + 10 + 11


def test_vectors_stay_side_by_side():
    rows = rows_of("ld.global.v4.u32 {%r9, %r5, %r7, %r6}, [%d0];\nst.global.v4.u32 [%d1], {%r6, %r7, %r5, %r9};")
    assert [rows[name] - rows["%r9"] for name in ("%r9", "%r5", "%r7", "%r6")] == [0, 1, 2, 3]


REGISTERS = 8
steps = st.one_of(
    st.tuples(st.just("add"), *[st.integers(1, REGISTERS)] * 3),
    st.tuples(st.just("guarded"), *[st.integers(1, REGISTERS)] * 3),
    st.tuples(st.just("swap"), *[st.integers(1, REGISTERS)] * 4),
    st.tuples(
        st.just("skip"), st.integers(1, REGISTERS), st.lists(st.tuples(st.just("add"), *[st.integers(1, REGISTERS)] * 3), max_size=4)
    ),
)


def text_of(program_steps, trips: int) -> str:
    """A loop of instructions, some in branches that only a part of the lanes take; two registers are stored in the end."""
    labels = iter(range(1000))

    def lines(items):
        for kind, *rest in items:
            if kind == "add":
                yield "mad.lo.u32 %r{}, %r{}, 3, %r{};".format(*rest)
            elif kind == "guarded":
                yield "setp.gt.u32 %p2, %r{1}, %r{2};\n@%p2 add.u32 %r{0}, %r{1}, 77;".format(*rest)
            elif kind == "swap":
                yield "mov.b64 %d20, {{%r{}, %r{}}};\nmov.b64 {{%r{}, %r{}}}, %d20;".format(*rest) if rest[2] != rest[3] else ""
            else:
                label = f"SKIP{next(labels)}"
                yield f"and.b32 %r30, %r{rest[0]}, 1;\nsetp.eq.u32 %p3, %r30, 0;\n@%p3 bra {label};"
                yield from lines(rest[1])
                yield f"{label}:"

    start = "".join(f"mad.lo.u32 %r{i}, %r0, {i * i + 1}, {7 * i};\n" for i in range(1, REGISTERS + 1))
    end = "mul.wide.u32 %d21, %r0, 32;\nadd.u64 %d21, %d21, %d0;\n" + "".join(
        f"st.global.u32 [%d21+{4 * i}], %r{i + 1};\n" for i in range(2)
    )
    loop = f"add.u32 %r31, %r31, 1;\nsetp.lt.u32 %p1, %r31, {trips};\n@%p1 bra LOOP;\n"
    return start + "mov.u32 %r31, 0;\nLOOP:\n" + "\n".join(lines(program_steps)) + "\n" + loop + end


def outcome(entry: Kernel) -> np.ndarray:
    gpu = Gpu()
    out = gpu.register_buffer(A, np.zeros(4096, np.uint32), "a")
    gpu.register_buffer(B, 16, "b")
    gpu.register_buffer(C, 16, "c")
    gpu.launch(Program("sm_80", {"k": entry}), "k", (1,), (64,), 0, [x.to_bytes(8, "little") for x in (A, B, C)])
    return out.view(np.uint32)


@settings(max_examples=100, deadline=None)
@given(st.lists(steps, min_size=1, max_size=12), st.integers(1, 3))
def test_random_kernels_compute_the_same(program_steps, trips):
    text = kernel(text_of(program_steps, trips))
    module = program.parse(text)
    (function,) = module.functions
    alone = program._Lowering(module, function, text.splitlines()).kernel()
    shared = liveness.share_rows(alone)
    assert sum(shared.registers.values()) < sum(alone.registers.values())
    assert np.array_equal(outcome(shared), outcome(alone))
