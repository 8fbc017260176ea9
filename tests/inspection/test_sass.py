"""The parser, the classes and the loops, on listings small enough to check by hand."""

from __future__ import annotations

import pytest

from fa4.errors import InspectionError
from fa4.inspection import ptx
from fa4.inspection.classes import CLASSES, ptx_class, sass_class
from fa4.inspection.graph import natural_loops
from fa4.inspection.histogram import Histogram, count
from fa4.inspection.sass import parse

# Two loops in one another, written for this test in nvdisasm's format; the outer one is left by a call, as ptxas does.
NESTED = """\
	.headerflags	@"EF_CUDA_SM80"

//--------------------- .text.nested --------------------------
	.section	.text.nested,"ax",@progbits
        .global         nested
nested:
.text.nested:
	//## File "/somewhere/fa4/kernels/a.py", line 10
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P6 EXIT ;
.L_outer:
	//## File "/somewhere/fa4/kernels/a.py", line 11
        /*0020*/                   LDSM.16.M88.4 R4, [R2+0x80] ;
.L_spill:
        /*0030*/                   STL.64 [R1+0x8], R6                                   (*"SpillRefill"*);
.L_inner:
	//## File "/somewhere/fa4/kernels/b.py", line 5
        /*0040*/                   HMMA.16816.F32.BF16 R8, R4.reuse, R6, R8 ;
        /*0050*/                   UIADD3 UR4, UR4, -0x1, URZ ;
        /*0060*/               @P0 BRA `(.L_skip) ;
        /*0070*/                   MUFU.EX2 R9, R9 ;
.L_skip:
        /*0080*/             @!UP0 BRA `(.L_inner) ;
        /*0090*/              @!P1 CALL.REL.NOINC `(.L_done) ;
        /*00a0*/                   BRA `(.L_outer) ;
.L_done:
	//## File "/somewhere/fa4/kernels/a.py", line 12
        /*00b0*/                   BSSY B0, `(.L_end) ;
        /*00c0*/                   BSYNC B0 ;
.L_end:
        /*00d0*/                   EXIT ;
.L_trap:
        /*00e0*/                   BRA `(.L_trap);
        /*00f0*/                   NOP;
.L_last:

//--------------------- .nv.constant0 --------------------------
"""


def function(*lines: str):
    """A function of these instructions, 16 bytes apart; lines that end in a colon are labels."""
    listing, address = [".text.f:"], 0
    for line in lines:
        if line.endswith(":"):
            listing.append(line)
        else:
            listing.append(f"        /*{address:04x}*/  {line} ;")
            address += 16
    return parse("\n".join(listing))["f"]


def spans(code) -> list[tuple[int, int, int, int | None]]:
    return [(loop.start, loop.end, loop.depth, loop.parent) for loop in natural_loops(code)]


def test_every_part_of_an_instruction_is_read():
    code = parse(NESTED)["nested"]
    assert len(code.instructions) == 16
    spill = code.instructions[3]
    assert (spill.address, spill.guard, spill.opcode, spill.operands) == (0x30, "", "STL.64", "[R1+0x8], R6")
    assert (spill.note, spill.file, spill.line, spill.kind) == ('"SpillRefill"', "/somewhere/fa4/kernels/a.py", 11, "local")
    assert [i.guard for i in code.instructions if i.guard] == ["@!P6", "@P0", "@!UP0", "@!P1"]
    assert code.instructions[1].text == "@!P6 EXIT"
    assert code.labels[".L_skip"] == 0x80
    assert ".L_last" not in code.labels, "nothing follows it"
    assert "//##" not in code.text
    assert code.text.count("/*") == 16


def test_nested_loops_are_found():
    assert spans(parse(NESTED)["nested"]) == [(0x20, 0xA0, 1, None), (0x40, 0x80, 2, 0x20)]


def test_instructions_of_a_loop_are_those_of_its_paths():
    outer, inner = natural_loops(parse(NESTED)["nested"])
    assert inner.addresses == {0x40, 0x50, 0x60, 0x70, 0x80}
    assert outer.addresses == inner.addresses | {0x20, 0x30, 0x90, 0xA0}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["a:", "NOP", "BRA `(a)"], [(0, 0x10, 1, None)]),
        (["a:", "BRA `(a)"], [(0, 0, 1, None)]),
        (["a:", "NOP", "BRA.U !UP0, `(a)", "EXIT"], [(0, 0x10, 1, None)]),
        (["NOP", "EXIT", "a:", "NOP", "BRA `(a)"], []),  # cannot be reached
        (["BRA `(b)", "a:", "NOP", "BRA `(a)", "b:", "EXIT"], []),
        (["@P0 BRA `(b)", "a:", "NOP", "b:", "@P1 BRA `(a)", "EXIT"], []),  # a cycle with two entries
        (["a:", "@P0 BRA `(a)", "@P1 BRA `(a)", "EXIT"], [(0, 0x10, 1, None)]),  # two back edges, one loop
        (["BSSY B0, `(a)", "NOP", "a:", "BSYNC B0", "EXIT"], []),
        (['BRX R4 -0x10 (*"BRANCH_TARGETS a,b"*)', "a:", "NOP", "b:", "EXIT"], []),
        (["b:", "NOP", 'BRX R4 -0x10 (*"BRANCH_TARGETS a,b"*)', "a:", "EXIT"], [(0, 0x10, 1, None)]),
        ([], []),
    ],
)
def test_loops(lines, expected):
    assert spans(function(*lines)) == expected


@pytest.mark.parametrize("line", ["        /*0010*/ 0x0000 ;", "        /*0010*/  IADD3 R1, R2", "        /*0010*/  lower R1 ;"])
def test_a_line_that_is_not_understood_raises(line):
    with pytest.raises(InspectionError, match="line 2 of nvdisasm's listing is not understood"):
        parse(f".text.f:\n{line}\n")


def test_an_unknown_opcode_is_listed_not_lost():
    histogram = count([i.opcode for i in function("FROB.X R1", "FROB.X R2", "UFROB UR1", "NOP").instructions], sass_class)
    assert histogram == Histogram({"control": 1, "other": 3}, {"FROB.X": 2, "UFROB": 1})
    assert histogram.total == 4


def test_histogram_knows_its_classes():
    histogram = Histogram({"mma": 2})
    assert (histogram["mma"], histogram["mufu"]) == (2, 0)
    with pytest.raises(KeyError, match="'mmma' is not one of mma"):
        histogram["mmma"]


@pytest.mark.parametrize(
    ("kind", "opcodes"),
    {
        "mma": "HMMA.16816.F32.BF16 HGMMA.64x64x16.F32.BF16 UTCHMMA.2CTA",
        "mufu": "MUFU.EX2 MUFU.RCP",
        "fma": "FFMA FFMA.FTZ FFMA2 FADD HFMA2.BF16_V2",
        "compare": "FMNMX FMNMX3 FSEL FSETP.GEU.AND",
        "integer": "IMAD.WIDE IMAD.IADD UIMAD UISETP.NE.AND USHF.R.U32.HI LOP3.LUT VIADD",
        "conversion": "F2FP.BF16.F32.PACK_AB I2FP.F32.S32",
        "move": "MOV IMAD.MOV.U32 UMOV CS2R S2UR R2UR",
        "shuffle": "SHFL.BFLY VOTEU.ANY ELECT",
        "ldmatrix": "LDSM.16.MT88.4 STSM.16.M88.4",
        "async copy": "LDGSTS.E.BYPASS.128 UTMALDG.4D UBLKCP",
        "tensor memory": "LDTM.x32 STTM.x16 UVIRTCOUNT.DEALLOC.SMPOOL",
        "barrier": "BAR.SYNC.DEFER_BLOCKING DEPBAR.LE SYNCS.PHASECHK.TRANS64.TRYWAIT UCGABAR_WAIT WARPGROUP.ARRIVE",
        "local": "LDL.LU.64 STL",
        "constant": "ULDC.64 LDCU.128",
    }.items(),
)
def test_sass_classes(kind, opcodes):
    assert {opcode: sass_class(opcode) for opcode in opcodes.split()} == dict.fromkeys(opcodes.split(), kind)


@pytest.mark.parametrize(
    ("kind", "opcodes"),
    {
        "mma": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 wgmma.mma_async.sync.aligned tcgen05.mma.cta_group::1",
        "mufu": "ex2.approx.ftz.f32 rcp.approx.ftz.f32",
        "fma": "fma.rn.f32 add.f32 mul.bf16x2 fma.rn.ftz.f32x2",
        "compare": "max.f32 setp.eq.f32 selp.f32",
        "integer": "add.s32 mad.lo.s64 setp.lt.s32 selp.b32 lop3.b32",
        "conversion": "cvt.rn.bf16x2.f32",
        "ldmatrix": "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
        "shared": "ld.shared.v4.b32 st.shared::cta.b32",
        "global": "st.global.v4.b32 ld.b32",
        "local": "ld.local.b32",
        "constant": "ld.param.b64",
        "async copy": "cp.async.cg.shared.global cp.async.commit_group cp.async.bulk.tensor.4d.shared::cluster.global",
        "tensor memory": "tcgen05.ld.sync.aligned.32x32b.x32.b32",
        "barrier": "cp.async.wait_group cp.async.bulk.wait_group.read bar.sync mbarrier.try_wait.parity tcgen05.wait::ld tcgen05.commit",
        "control": "bra.uni ret setmaxnreg.inc.sync.aligned.u32",
        "other": "frob.b32 tcgen05.frob",
    }.items(),
)
def test_ptx_classes(kind, opcodes):
    assert {opcode: ptx_class(opcode) for opcode in opcodes.split()} == dict.fromkeys(opcodes.split(), kind)


PTX = """\
.version 8.8
.target sm_80
.visible .entry f(.param .b64 f_param_0) // a comment; with a semicolon
.reqntid 128, 1, 1
{
	.reg .pred 	%p<2>;
	.loc	1 145 0
	ld.param.b64 	%rd1, [f_param_0];
$L__BB0_1:
	@%p1 bra 	$L__BB0_1;
	// begin inline asm
	{ .reg .pred p; elect.sync _|p, -1; @p frob.b32 %r1, %r2; }
	// end inline asm
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
		{%f1, %f2}, {%r1}, {%r2}, {%f1, %f2};
	.pragma "nounroll";
	ret;
}
	.file	1 "fa4/kernels/a.py"
"""


def test_ptx_instructions_are_found():
    assert [opcode.partition(".")[0] for opcode in ptx.opcodes(PTX)] == ["ld", "bra", "elect", "frob", "mma", "ret"]
    histogram = ptx.histogram(PTX)
    assert histogram.total == 6
    assert histogram.other == {"frob.b32": 1}


def test_every_class_is_described():
    assert all(CLASSES.values())
