"""What kind of work an instruction does: one set of classes for SASS and for PTX.

Classes go by function, not by the pipe that executes them. SASS names are those of CUDA Binary Utilities, "Instruction Set
Reference" (Ampere, Hopper, Blackwell), PTX names those of PTX ISA 9. A name that is not listed gets the class ``other``, and is
reported by name, so that a new instruction is noticed rather than lost.
"""

from __future__ import annotations

import re

# In the order in which tables show them.
CLASSES = {
    "mma": "tensor-core products",
    "mufu": "special functions: exp2, log2, reciprocal, ...",
    "fma": "float add, multiply, fused multiply-add",
    "compare": "float minimum, maximum, compare, select",
    "integer": "integers, logic, addresses, predicates",
    "conversion": "between element types",
    "move": "register to register, special registers",
    "shuffle": "between lanes",
    "ldmatrix": "matrices between shared memory and registers",
    "shared": "loads and stores of shared memory",
    "global": "loads and stores of global memory",
    "local": "loads and stores of the stack: spills",
    "constant": "loads of parameters and constants",
    "async copy": "copies that run beside the program",
    "tensor memory": "loads, stores and allocation of Tensor Memory",
    "barrier": "barriers, fences, waits",
    "control": "branches, calls, padding",
    "other": "not classified",
}

_SASS = {
    "mma": "HMMA IMMA DMMA BMMA QMMA OMMA HGMMA IGMMA QGMMA BGMMA UTCHMMA UTCIMMA UTCQMMA UTCOMMA UTCMXQMMA",
    "mufu": "MUFU",
    "fma": "FADD FADD2 FADD32I FMUL FMUL2 FMUL32I FFMA FFMA2 FFMA32I HADD2 HMUL2 HFMA2 DADD DMUL DFMA FSWZADD",
    "compare": "FMNMX FMNMX3 FSEL FSET FSETP FCHK HMNMX2 HSET2 HSETP2 DMNMX DSETP",
    "integer": (
        "IADD IADD2 IADD3 IADD32I IMAD IMUL IABS IDP IDP4A IMNMX ISETP ISCADD ISUB LEA LOP LOP3 LOP32I SEL SHF SHL SHR SGXT BMSK BREV FLO "
        "POPC PRMT PLOP3 PSETP VABSDIFF VABSDIFF4 VIADD VIADDMNMX VIMNMX VIMNMX3 VHMNMX CREDUX"
    ),
    "conversion": "F2F F2FP F2I F2IP FRND I2F I2FP I2I I2IP",
    "move": "MOV MOV32I MOVM CS2R S2R S2UR R2UR R2P P2R B2R R2B GETLMEMBASE SETLMEMBASE LEPC VOTE2R",
    "shuffle": "SHFL VOTE VOTEU MATCH REDUX ELECT",
    "ldmatrix": "LDSM STSM",
    "shared": "LDS STS ATOMS",
    "global": "LD ST LDG STG ATOM ATOMG RED REDG REDAS STAS",
    "local": "LDL STL",
    "constant": "LDC LDCU",
    "async copy": "LDGSTS LDGDEPBAR UTMALDG UTMASTG UTMAREDG UTMAPF UTMACMDFLUSH UTMACCTL UBLKCP UBLKRED UBLKPF UGETNEXTWORKID",
    "tensor memory": "LDTM STTM UTCCP UTCSHIFT UTCATOMSWS LDT STT UVIRTCOUNT",
    "barrier": (
        "BAR DEPBAR SYNCS ARRIVES MEMBAR FENCE ERRBAR CCTL CCTLL CCTLT WARPSYNC NANOSLEEP WARPGROUP WARPGROUPSET WARPGROUP_ARRIVE "
        "WARPGROUP_DEPBAR UCGABAR_ARV UCGABAR_WAIT ACQBULK ACQSHMINIT PREEXIT UTCBAR"
    ),
    "control": (
        "BRA BRX BRXU JMP JMX JMXU CALL RET EXIT BSSY BSYNC BREAK BMOV YIELD NOP KILL BPT RTT RPCMOV WARPEXIT ENDCOLLECTIVE COLLECTIVE "
        "USETMAXREG USETSHMSZ"
    ),
}
_SASS_CLASS = {name: kind for kind, names in _SASS.items() for name in names.split()}

_PTX_MATRIX = {
    "mma": "mma",
    "mma_async": "mma",
    **dict.fromkeys(("ld", "st", "cp", "shift", "alloc", "dealloc", "relinquish_alloc_permit"), "tensor memory"),
    **dict.fromkeys(("wait", "commit", "fence", "commit_group", "wait_group"), "barrier"),
}
_PTX = {
    "mufu": "ex2 lg2 rcp rsqrt sqrt sin cos tanh",
    "integer": "and or xor cnot not shl shr shf bfe bfi bfind bmsk szext prmt lop3 popc clz brev rem sad mad24 mul24 madc dp2a dp4a fns",
    "conversion": "cvt",
    "move": "mov cvta mapa isspacep istypep getctarank createpolicy",
    "shuffle": "shfl vote match redux activemask elect",
    "ldmatrix": "ldmatrix stmatrix movmatrix",
    "barrier": "bar barrier mbarrier fence membar nanosleep griddepcontrol",
    "control": "bra brx call ret exit trap brkpt setmaxnreg pmevent",
    "async copy": "prefetch prefetchu",
}
_PTX_CLASS = {name: kind for kind, names in _PTX.items() for name in names.split()}
_PTX_ARITHMETIC = {"add", "sub", "mul", "mad", "fma", "div", "abs", "neg", "addc", "subc"}
_PTX_SELECTION = {"min", "max", "set", "setp", "selp", "slct", "testp", "copysign"}
_PTX_MEMORY = {"ld", "ldu", "st", "atom", "red"}
_PTX_SPACES = {"shared": "shared", "local": "local", "param": "constant", "const": "constant"}
_PTX_FLOAT = re.compile(r"b?f\d|e\dm\d")


def sass_class(opcode: str) -> str:
    """The class of a SASS instruction such as ``IMAD.MOV.U32``; instructions of the uniform datapath (``UIADD3``) as their twins."""
    if opcode.startswith(("IMAD.MOV", "UIMAD.MOV")):  # a move that borrows the multiplier's pipe
        return "move"
    base = opcode.partition(".")[0]
    return _SASS_CLASS.get(base) or (_SASS_CLASS.get(base[1:]) if base.startswith("U") else None) or "other"


def ptx_class(opcode: str) -> str:
    """The class of a PTX instruction such as ``ld.shared.b32``."""
    head, *modifiers = opcode.split(".")
    if head in ("mma", "wgmma", "tcgen05"):
        return "mma" if head == "mma" else _PTX_MATRIX.get(modifiers[0].partition("::")[0] if modifiers else "", "other")
    if head == "clusterlaunchcontrol":
        return "async copy" if modifiers[:1] == ["try_cancel"] else "integer"
    if head == "cp":
        return "barrier" if any(word.startswith("wait") for word in modifiers) else "async copy"
    if head in _PTX_MEMORY:
        spaces = (_PTX_SPACES.get(word.partition("::")[0]) for word in modifiers)
        return next((space for space in spaces if space), "global")  # a generic address, too, is taken for a global one
    is_float = bool(modifiers) and _PTX_FLOAT.match(modifiers[-1]) is not None
    if head in _PTX_ARITHMETIC:
        return "fma" if is_float else "integer"
    if head in _PTX_SELECTION:
        return "compare" if is_float else "integer"
    return _PTX_CLASS.get(head, "other")
