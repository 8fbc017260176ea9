"""Instructions executed in groups compute what they compute one after the other, bit by bit, and so do reports and errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from backward_call import gradients
from forward_call import Options, attention
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_text import A, kernel
from test_peer import needs_peer

import fa4
from fa4.testing import AttentionShape, make_inputs, witness
from fa4.testing.witness import witnesses
from fa4.vgpu import Gpu, OutOfBoundsError, Program, UninitializedError, UnsupportedInstructionError, generate, grouping

REGISTERS = 12
register = st.integers(1, REGISTERS)
word = st.builds("%r{}".format, register)
long = st.builds("%d{}".format, st.integers(20, 23))
literal = st.sampled_from(["3", "0f3F800000", "-7", "0f7FC00000", "0x80000000"])
either = st.one_of(word, literal)


def line(pattern: str, *parts):
    return st.builds(pattern.format, *parts)


LINES = st.one_of(
    line("add.s32 {}, {}, {};", word, word, either),
    line("mad.lo.s32 {}, {}, {}, {};", word, word, word, either),
    line("shl.b32 {}, {}, {};", word, word, st.sampled_from(["%r1", "3", "23", "40"])),
    line("xor.b32 {}, {}, {};", word, word, either),
    line("fma.rn.f32 {}, {}, {}, {};", word, word, word, word),
    line("max.f32 {}, {}, {};", word, word, word),
    line("max.f32 {}, {}, {}, {};", word, word, word, word),
    line("ex2.approx.ftz.f32 {}, {};", word, word),
    line("cvt.rn.bf16x2.f32 {}, {}, {};", word, word, word),
    line("cvt.rn.f16x2.f32 {}, {}, {};", word, word, word),
    line("setp.lt.f32 %p{}, {}, {};", st.integers(1, 3), word, word),
    line("selp.b32 {}, {}, {}, %p{};", word, either, word, st.integers(1, 3)),
    line("@%p{} add.s32 {}, {}, 77;", st.integers(1, 3), word, word),
    line("mov.b32 {}, {};", word, either),
    line("mov.b64 {}, {{{}, {}}};", long, word, word),
    st.builds(lambda a, b, d: f"mov.b64 {{%r{a}, %r{b}}}, {d};" if a != b else f"mov.b64 {d}, {d};", register, register, long),
    line("mov.b64 {}, {};", long, long),
    line("fma.rn.f32x2 {}, {}, {}, {};", long, long, long, long),
    line("add.rm.f32x2 {}, {}, {};", long, long, long),
    line("add.s64 {}, {}, 5;", long, long),
    line("st.global.u32 [%d11+{}], {};", st.sampled_from([1024, 2048]), word),
    line("ld.global.v2.u32 {{%r3, %r4}}, [%d24+{}];", st.sampled_from([0, 2048])),
)


def text_of(lines) -> str:
    """A loop; all registers are stored in the end."""
    start = "mul.wide.u32 %d25, %r0, 8;\nadd.u64 %d24, %d0, %d25;\n"
    start += "".join(f"mad.lo.u32 %r{i}, %r0, {i * 0x1234567 % 2**31}, {7 * i};\n" for i in range(1, REGISTERS + 1))
    start += "".join(f"mov.b64 %d{20 + i}, {{%r{i + 1}, %r{i + 5}}};\n" for i in range(4))
    start += "".join(f"setp.gt.u32 %p{i}, %r{i}, %r7;\n" for i in range(1, 4))
    end = "mul.wide.u32 %d25, %r0, 128;\nadd.u64 %d25, %d1, %d25;\n"
    end += "".join(f"st.global.u32 [%d25+{4 * i}], %r{i};\n" for i in range(1, REGISTERS + 1))
    end += "".join(f"st.global.u64 [%d25+{64 + 8 * i}], %d{20 + i};\n" for i in range(4))
    loop = "add.u32 %r31, %r31, 1;\nsetp.lt.u32 %p9, %r31, 2;\n@%p9 bra LOOP;\n"
    return kernel(start + "mov.u32 %r31, 0;\nLOOP:\n" + "\n".join(lines) + "\n" + loop + end, "sm_100a")


def outcome(text: str, execution: str, live: bool = True, **options):
    """(buffers, report) of a kernel; without ``live`` nothing is known about what is needed behind a block."""
    program = Program.parse(text)
    if not live:
        entry = program.kernels["k"]
        program = Program("sm_100a", {"k": replace(entry, blocks=tuple(replace(b, live=None) for b in entry.blocks))})
    gpu = Gpu("sm_100a", execution=execution, **options)
    out = [gpu.register_buffer(A << 8 * i, np.arange(4096, dtype=np.uint32) * 0x01010101, f"{i}") for i in range(2)]
    report = gpu.launch(program, "k", (1,), (64,), 0, [(A << 8 * i).to_bytes(8, "little") for i in (0, 1, 1)])
    return [x.tobytes() for x in out], replace(report, seconds=0)


@pytest.fixture
def always(monkeypatch):
    """Group whatever can be grouped, also where it does not pay."""
    monkeypatch.setattr(generate, "candidates", lambda block: [grouping.takes_part(op) for op in block.ops])
    monkeypatch.setattr(grouping.Schedule, "pays", True)


@pytest.mark.usefixtures("always")
class TestRandomKernels:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(LINES, min_size=1, max_size=40), st.booleans())
    def test_agree(self, lines, live):
        text = text_of(lines)
        assert outcome(text, "grouped", live) == outcome(text, "plain")

    def test_deviations_agree(self):
        text = text_of(["ex2.approx.ftz.f32 %r1, %r2;", "ex2.approx.ftz.f32 %r3, %r4;", "tanh.approx.f32 %r5, %r6;"])
        assert outcome(text, "grouped", approximate="random", seed=3) == outcome(text, "plain", approximate="random", seed=3)

    def test_a_register_that_is_overwritten_is_saved_for_who_still_needs_it(self, monkeypatch):
        """And without that the comparison notices."""
        text = text_of(["mov.b32 %r2, %r1;", "ld.global.v2.u32 {%r1, %r4}, [%d24];", "add.s64 %d24, %d24, 8;"])
        assert outcome(text, "grouped") == outcome(text, "plain")
        monkeypatch.setattr(grouping.Schedule, "_save", lambda *_: None)
        assert outcome(text, "grouped") != outcome(text, "plain")


def body(lines, pattern: str = "fma.rn.f32 %r{0}, %r{0}, %r{1}, %r{2};", count: int = 30) -> str:
    sums = "\n".join(pattern.format(100 + i, 200, 201) for i in range(count))
    values = "\n".join(f"mov.b32 %r{i}, 0f3F800000;" for i in [*range(100, 100 + count), 200, 201])
    return kernel(values + "\n" + sums + "\n" + lines)


class TestGroups:
    def test_what_is_alike_is_one_call(self):
        program = Program.parse(body("st.global.u32 [%d11], %r105;"))
        gpu = Gpu()
        gpu.register_buffer(A, 4096, "a")
        gpu.launch(program, "k", (1,), (32,), 0, [A.to_bytes(8, "little")] * 3)
        (code,) = program.code.values()
        assert code.blocks[0, True].source.count("fma32") == 1

    def test_too_few_are_left_alone(self):
        program = Program.parse(body("st.global.u32 [%d11], %r101;", count=2))
        gpu = Gpu()
        gpu.register_buffer(A, 4096, "a")
        gpu.launch(program, "k", (1,), (32,), 0, [A.to_bytes(8, "little")] * 3)
        (code,) = program.code.values()
        assert code.blocks[0, True].source.count("fma32") == 2

    @pytest.mark.parametrize(
        ("line", "error"),
        [
            ("st.global.u32 [%d11+4000000], %r101;", OutOfBoundsError),
            ("add.s32 %r1, %r300, 1;\nst.global.u32 [%d11], %r1;", UninitializedError),
            ("vadd.u32.u32.u32 %r1, %r2, %r3;", UnsupportedInstructionError),
        ],
    )
    def test_errors_name_the_same_place(self, line, error):
        found = []
        for execution in ("grouped", "plain"):
            gpu = Gpu(execution=execution)
            gpu.register_buffer(A, 4096, "a")
            with pytest.raises(error) as raised:
                gpu.launch(Program.parse(body(line)), "k", (1,), (32,), 0, [A.to_bytes(8, "little")] * 3)
            found.append(str(raised.value))
        assert found[0] == found[1]


def forward(gpu):
    inputs = make_inputs(AttentionShape(1, 150, 200, 1, 1, 64))
    return attention(gpu, inputs.q, inputs.k, inputs.v, Options(causal=True))


def backward(gpu):
    return gradients(gpu, make_inputs(AttentionShape(1, 130, 200, 1, 1, 64)), Options(causal=True))


@pytest.mark.compile
@pytest.mark.vgpu
@pytest.mark.parametrize("how", [{"checks": "isa"}, {"schedule": "random", "seed": 1, "approximate": "random"}], ids=["isa", "random"])
@pytest.mark.parametrize(("arch", "kernel"), [("sm_80", forward), ("sm_100a", forward), ("sm_100a", backward)])
def test_kernels_of_this_project_agree(arch, kernel, how):
    found = []
    for execution in ("grouped", "plain"):
        gpu = Gpu(arch, execution=execution, **how)
        results = [x.contiguous().view(torch.uint8).numpy().tobytes() for x in kernel(gpu)]
        found.append((results, [replace(report, seconds=0) for report in gpu.reports]))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "backward"), [("sm_80", False), *((a, b) for a in ("sm_90a", "sm_100a", "sm_103a") for b in (False, True))]
)
class TestWitnesses:
    pytestmark = needs_peer

    @pytest.mark.parametrize("schedule", ["round_robin", "priority"])
    def test_agree(self, arch, backward, schedule):
        found = []
        for execution in ("grouped", "plain"):
            with fa4.settings(vgpu_execution=execution):
                answers = list(witness.run_witnesses(arch, witnesses(arch, backward), schedule, (0,)))
            assert all(answer.ok for answer in answers)
            found.append([replace(answer, seconds=0) for answer in answers])
        assert found[0] == found[1]
