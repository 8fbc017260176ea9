# ruff: noqa: E501 -- kernels and rows of tables in one line
from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ptx_text import kernel, run

from fa4.vgpu import PtxSyntaxError
from fa4.vgpu.lexer import integer, tokenize
from fa4.vgpu.parser import parse
from fa4.vgpu.program import Address, Program, Register
from fa4.vgpu.syntax import (
    Declaration,
    Directive,
    Function,
    Group,
    Guard,
    Instruction,
    Label,
    Location,
    Memory,
    Module,
    Name,
    Not,
    Number,
    Pair,
    Scope,
    Vector,
)

# What a printed tree may hold. Words that begin a directive or an instruction differ, so that no text has two readings.
names = st.from_regex(r"[%$]?[a-zA-Z_][a-zA-Z0-9_]{0,6}", fullmatch=True).filter(
    lambda s: s != "_" and "inlined_at" not in s and "function_name" not in s
)
numbers = st.one_of(
    st.integers(-(2**31), 2**32).map(lambda n: Number(str(n))),
    st.integers(0, 2**32 - 1).map(lambda n: Number(f"0f{n:08X}")),
    st.integers(0, 2**64 - 1).map(lambda n: Number(f"0x{n:x}")),
    st.sampled_from([Number("1.5"), Number("-2.25"), Number("1e10"), Number("7U")]),
)
atoms = st.one_of(st.builds(Name, names, st.integers(-64, 64)), numbers)
memory = st.builds(Memory, st.builds(Name, names), st.integers(-512, 512), st.lists(atoms, max_size=2).map(tuple))
vectors = st.builds(Vector, st.lists(atoms, min_size=1, max_size=4).map(tuple))
operands = st.one_of(
    atoms,
    memory,
    vectors,
    st.builds(Group, st.lists(atoms, min_size=1, max_size=2).map(tuple)),
    st.builds(Not, st.builds(Name, names)),
    st.builds(Pair, st.builds(Name, names), st.builds(Name, names)),
)
opcodes = st.from_regex(r"[a-z]{2,5}(\.[a-z][a-z0-9]{1,4}|\.L2::128B|\.shared::cta){0,4}", fullmatch=True)
instructions = st.builds(
    Instruction, opcodes, st.lists(operands, max_size=4).map(tuple), st.none() | st.builds(Guard, names, st.booleans())
)
types = st.sampled_from([".b8", ".u32", ".f32", ".b64", ".pred"])
declarations = st.one_of(
    st.builds(Declaration, st.just(".reg"), types, names, count=st.none() | st.integers(1, 99)),
    st.builds(
        Declaration,
        st.sampled_from([".shared", ".local"]),
        types,
        names,
        align=st.none() | st.just(16),
        dims=st.lists(st.integers(1, 9), max_size=2).map(tuple),
    ),
)
locations = st.builds(
    Location,
    st.integers(1, 9),
    st.integers(1, 999),
    st.integers(0, 99),
    st.just("") | names,
    st.none() | st.tuples(*[st.integers(1, 99)] * 3),
)
directives = st.builds(Directive, st.just(".pragma"), st.just(('"nounroll"',)))
statements = st.recursive(
    st.one_of(instructions, declarations, st.builds(Label, names), locations, directives),
    lambda inner: st.builds(Scope, st.lists(inner, max_size=4).map(tuple)),
    max_leaves=12,
)
parameters = st.lists(
    st.builds(
        Declaration,
        st.just(".param"),
        st.sampled_from([".b8", ".u64", ".f32"]),
        names,
        align=st.none() | st.just(8),
        dims=st.lists(st.integers(1, 64), max_size=1).map(tuple),
    ),
    max_size=3,
).map(tuple)
functions = st.builds(
    Function,
    st.just(".entry"),
    names,
    parameters,
    limits=st.lists(
        st.tuples(st.sampled_from([".reqntid", ".maxntid"]), st.lists(st.integers(1, 99), min_size=1, max_size=3).map(tuple)), max_size=1
    ).map(tuple),
    body=st.builds(Scope, st.lists(statements, max_size=8).map(tuple)),
    linkage=st.sampled_from(["", ".visible"]),
)
variables = st.builds(
    Declaration,
    st.sampled_from([".global", ".const"]),
    st.just(".u32"),
    names,
    dims=st.just((3,)),
    init=st.just(("1", "-2", "0x3")),
    linkage=st.sampled_from(["", ".visible", ".extern"]),
)
modules = st.builds(
    Module, st.just("8.8"), st.just(("sm_80",)), st.just(64), st.lists(variables, max_size=2).map(tuple), st.lists(functions, max_size=2).map(tuple),
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["a.py", "b/c d.py"])), max_size=2).map(tuple),
)  # fmt: skip


@given(modules)
def test_parsing_inverts_printing(module):
    assert parse(str(module)) == module


def test_lines_are_counted_through_comments_and_strings():
    tokens = tokenize('// one\n/* two\nthree */ add.s32\n.pragma "x // y";\n%tid.x 0f3F800000 ;\0\0')
    assert [(t.kind, t.text, t.line) for t in tokens] == [
        ("word", "add.s32", 3),
        ("directive", ".pragma", 4),
        ("string", '"x // y"', 4),
        ("mark", ";", 4),
        ("word", "%tid.x", 5),
        ("number", "0f3F800000", 5),
        ("mark", ";", 5),
    ]


def test_integer_literals():
    assert [integer(s) for s in ("10", "0x1F", "017", "0b101", "42U", "0xFFU", "0")] == [10, 31, 15, 5, 42, 255, 0]


def test_scopes_declare_names_and_labels_again():
    block = "{{\n.reg .pred P1;\n.reg .b32 x<2>;\nmov.u32 x1, {0};\nsetp.eq.u32 P1, x1, x1;\n@P1 bra DONE;\nmov.u32 %r1, 99;\nDONE:\nadd.u32 %r1, %r1, x1;\n}}"
    _, out, _ = run("mov.u32 %r1, 0;\n" + "\n".join(block.format(n) for n in (1, 20, 300)) + "\nst.global.u32 [%d12], %r1;")
    assert (out[:32] == 321).all()


def test_registers_declared_without_braces_live_on():
    _, out, _ = run(
        ".reg .b32 late;\nmov.u32 late, 5;\n{\n.reg .b32 other;\nadd.u32 other, late, 1;\nmov.u32 late, other;\n}\nst.global.u32 [%d12], late;"
    )
    assert (out[:32] == 6).all()


def test_names_are_gone_behind_their_scope():
    with pytest.raises(PtxSyntaxError, match=r"unknown label"):
        Program.parse(kernel("{\nL:\nmov.u32 %r1, 0;\n}\nbra L;"))


def test_results_of_a_vector_load_lie_side_by_side():
    program = Program.parse(kernel("ld.global.v4.u32 {%r90, %r80, %r70, %r60}, [%d0+16];"))
    (block,) = program.kernels["k"].blocks
    load = block.ops[-1]
    rows = [r.index for r in load.written]
    assert rows == list(range(rows[0], rows[0] + 4))
    assert load.operands[1] == Address(Register(64, 0, "%d0"), 16)
    assert program.kernels["k"].registers[32] == 4


def test_parameters_are_laid_out_in_order_with_alignment():
    text = kernel("").replace(".param .u64 p0", ".param .u8 flag, .param .align 8 .b8 p0[12], .param .f32 scale")
    kernel_ = Program.parse(text).kernels["k"]
    assert [(p.name, p.offset, p.size) for p in kernel_.parameters] == [
        ("flag", 0, 1),
        ("p0", 8, 12),
        ("scale", 20, 4),
        ("p1", 24, 8),
        ("p2", 32, 8),
    ]
    assert kernel_.parameter_bytes == 40


def test_printed_nodes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Label("x").name = "y"  # type: ignore[misc]
