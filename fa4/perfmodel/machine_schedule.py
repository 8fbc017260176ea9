"""The order in which ptxas had each warp issue, with its stall counts and scoreboards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from fa4.errors import ModelError
from fa4.inspection.sass import Instruction
from fa4.perfmodel.align import Aligner, AlignmentError, Path, kind_of
from fa4.perfmodel.list_schedule import cost, ptx_schedule
from fa4.perfmodel.machine_code import SCOREBOARDS, MachineCode, machine_code
from fa4.perfmodel.schedule import SILENT, Schedule, Step, WarpSchedule
from fa4.perfmodel.trace import Event, Trace, WarpTrace
from fa4.vgpu.decode import access_words
from fa4.vgpu.program import Block, Op

_PIPE_NAMES = {
    "fma": "FADD FMUL FFMA FFMA32I FADD32I FMUL32I HADD2 HMUL2 HFMA2",
    "fma2": "FADD2 FMUL2 FFMA2 IMAD IMUL IDP IDP4A",
    "mufu": "MUFU F2F F2I I2F FRND POPC FLO BREV",
    "convert": "F2FP I2FP I2IP F2IP",
    "lsu": "LDS STS LDSM STSM LDG STG LD ST LDL STL ATOM ATOMS ATOMG RED REDG LDGSTS SHFL STAS REDAS",
    "tmem load": "LDTM",
    "tmem store": "STTM",
    "mma": "HMMA IMMA QMMA BMMA",
    "other": (
        "BRA BRX BRXU EXIT RET CALL BSSY BSYNC NOP WARPSYNC YIELD BAR SYNCS FENCE MEMBAR DEPBAR LDGDEPBAR S2R S2UR CS2R R2UR LDC LDCU "
        "ELECT VOTE VOTEU NANOSLEEP USETMAXREG UCGABAR_ARV UCGABAR_WAIT REDUX CREDUX ERRBAR CCTL "
        "WARPGROUP HGMMA QGMMA IGMMA ACQBULK ARRIVES MATCH"
    ),
}
_PIPES = {name: pipe for pipe, names in _PIPE_NAMES.items() for name in names.split()}
_LATENCIES = {
    "mufu": "mufu_latency",
    "fma": "fma_latency",
    "fma2": "fma_latency",
    "alu": "alu_latency",
    "convert": "alu_latency",
    "uniform": "uniform_latency",
    "tmem load": "tmem load",
    "tmem store": "tmem store",
    "mma": "mma_latency",
}
_BY_NAME = {
    **dict.fromkeys(("LDS", "LDSM", "SHFL", "ATOMS", "REDUX"), "lds_latency"),
    **dict.fromkeys(("LDG", "LD", "ATOM", "ATOMG", "RED", "REDG"), "global_latency"),
    **dict.fromkeys(("LDC", "LDCU", "S2R", "S2UR"), "constant_latency"),
    **dict.fromkeys(("FENCE", "MEMBAR"), "fence"),
    "SYNCS": "try_wait",
}
_STREAMS = {
    "LDS": "lds",
    "LDSM": "lds",
    "STS": "sts",
    "STSM": "sts",
    "LDG": "ldg",
    "LD": "ldg",
    "STG": "stg",
    "ST": "stg",
    "ATOM": "atom",
    "ATOMG": "atom",
    "RED": "atom",
    "REDG": "atom",
}
"""Accesses of memory that are not anchors: the n-th of a stream, and of a width in shared memory, in SASS is the n-th in PTX, where there
are as many: ptxas adds a narrow load or store of its own here and there."""

_SHARED = ("lds", "sts")
_STREAM_OF_EVENT = {"lds": "lds", "sts": "sts", "ldg": "ldg", "poll": "ldg", "stg": "stg", "signal": "atom", "atom": "atom"}
_TMEM_SHAPES = {"16dp128bit": 2, "16dp256bit": 4}


def pipe_of(opcode: str) -> str:
    """Where an instruction is issued to."""
    base = opcode.partition(".")[0]
    found = _PIPES.get(base)
    if found is None:
        found = "other" if base.startswith(("UTC", "UTMA", "UBLK", "ULD", "UVIRT")) else "uniform" if base.startswith("U") else "alu"
    return found


@cache
def _work(opcode: str) -> int:
    """Registers of a copy of tensor memory, FLOP of an mma, wavefronts of a full-width access to shared memory without conflicts."""
    base, *words = opcode.split(".")
    if base in ("LDTM", "STTM"):
        times = next((int(w[1:]) for w in words if re.fullmatch(r"x\d+", w)), 1)
        return times * next((n for shape, n in _TMEM_SHAPES.items() if shape in words), 1)
    if base in ("HMMA", "IMMA", "QMMA"):
        shape = next((w for w in words if w.isdecimal() and len(w) in (3, 4, 5)), "16816")
        m, n, k = (16, 8, int(shape[3:] or 8)) if shape.startswith("168") else (16, 8, 8)
        return 2 * m * n * k
    if base in ("LDSM", "STSM"):
        return next((int(w) for w in words if w in ("2", "4")), 1)
    return {"128": 4, "64": 2}.get(next((w for w in words if w in ("64", "128")), ""), 1)


@dataclass
class _Builder:
    """Steps of the machine code, made when they are first needed."""

    code: MachineCode

    def __post_init__(self) -> None:
        self.table: list[Step] = []
        self.known: dict[tuple[int, bool, bool], int] = {}
        self.floating = -1

    def step(self, position: int, event: bool, taken: bool) -> int:
        key = position, event, taken
        found = self.known.get(key)
        if found is None:
            made = _step(self.code, position)._replace(events=int(event), taken=taken)
            self.table.append(made)
            found = self.known[key] = len(self.table) - 1
        return found

    def lone_event(self) -> int:
        """A step that only has an event."""
        if self.floating < 0:
            self.table.append(Step("none", 0, events=1, text="no instruction of its own"))
            self.floating = len(self.table) - 1
        return self.floating


def _step(code: MachineCode, position: int) -> Step:
    instruction, control = code.instructions[position], code.controls[position]
    opcode = instruction.opcode
    base = opcode.partition(".")[0]
    pipe = pipe_of(opcode)
    waits = control.waits
    if base == "DEPBAR" and (match := re.match(r"SB(\d), 0x0\b", instruction.operands)):
        waits = (*waits, int(match[1]))
    return Step(
        pipe,
        max(control.stall, 1),
        waits,
        () if control.result is None else (control.result,),
        () if control.read is None else (control.read,),
        _BY_NAME.get(base) or _LATENCIES.get(pipe, ""),
        _work(opcode),
        spill=base in ("LDL", "STL"),
        place=f"{instruction.file}:{instruction.line}" if instruction.file else "",
        text="tensor stores" if opcode.startswith("FENCE.VIEW.ASYNC.T") else _text(instruction),
    )


def _text(instruction: Instruction) -> str:
    return f"{instruction.opcode} {instruction.operands}".strip()


def sass_schedule(trace: Trace, cubin: bytes | None = None) -> Schedule:
    """The order of the machine code for every recorded warp; that of a PTX list schedule for those that cannot be aligned.

    ``cubin`` is what ptxas made of the trace's PTX; None: the one that the trace has.

    A warp that spends its time in a loop without synchronisation cannot be aligned: nothing says how often it goes round.

    Raises:
        ModelError: the cubin is not that of the trace: it lacks the kernel, or no warp that synchronises can be aligned.
        InspectionError: nvdisasm is missing or fails.
    """
    code = machine_code(trace.cubin if cubin is None else cubin, trace.kernel)
    aligner, builder = Aligner(code, trace.code), _Builder(code)
    aligner.prefer(_executed(trace))
    work = [_work_of(block) for block in trace.code.blocks]
    warps: dict[tuple[int, int], WarpSchedule] = {}
    unaligned: dict[tuple[int, int], str] = {}
    paths: dict[tuple[tuple[str, int], ...], Path | str] = {}
    for cta in trace.ctas:
        for i, warp in enumerate(cta.warps):
            anchors = [e for e in warp.events if kind_of(e)]
            key = tuple((e.kind, e.op) for e in anchors)
            if key not in paths:
                try:
                    paths[key] = aligner.align(anchors)
                except AlignmentError as error:
                    paths[key] = str(error)
            path = paths[key]
            reason = path if isinstance(path, str) else _difference(work, warp, code, path)
            if isinstance(path, str) or reason:
                unaligned[cta.index, i] = reason
            else:
                warps[cta.index, i] = _warp(builder, trace.code.ops, path, warp.events)
    if not any(isinstance(path, Path) for path in paths.values()):
        reason = next(iter(unaligned.values()), "there are no warps")
        raise ModelError("cubin", trace.kernel, f"does not fit the trace: {reason}", "pass the cubin that was compiled with the PTX")
    return _merged(trace, builder, warps, unaligned)


def _executed(trace: Trace) -> dict[str, list[int]]:
    """Instructions of the PTX by kind of anchor, in the order of the text."""
    kinds: dict[int, str] = {}
    for cta in trace.ctas:
        for warp in cta.warps:
            for event in warp.events:
                if event.op not in kinds:
                    kinds[event.op] = kind_of(event)
    return _static(trace, kinds)


def _static(trace: Trace, executed: dict[int, str]) -> dict[str, list[int]]:
    """All instructions with an opcode that was executed as an anchor, also those that were not."""
    by_opcode = {_head(trace.code.ops[number].opcode): kind for number, kind in executed.items() if kind}
    found: dict[str, list[int]] = {}
    for number, op in enumerate(trace.code.ops):
        kind = by_opcode.get(_head(op.opcode))
        if kind:
            found.setdefault(kind, []).append(number)
    return found


def _head(opcode: str) -> str:
    words = opcode.split(".")
    return ".".join(words[: 4 if words[0] == "cp" else 2])


def _warp(builder: _Builder, ops: Sequence[Op], path: Path, events: Sequence[Event]) -> WarpSchedule:
    positions = path.positions
    here: dict[int, Event] = {}
    after: dict[int, list[Event]] = {}
    anchors = iter(path.at)
    streams: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        if kind_of(event):
            index, own = next(anchors)
            if own:
                here[index] = event
            else:
                after.setdefault(index, []).append(event)
        elif event.kind in _STREAM_OF_EVENT:
            stream = _STREAM_OF_EVENT[event.kind]
            width = access_words(ops[event.op]) if stream in _SHARED else 0
            streams.setdefault((stream, width), []).append(event)
    matched = _match_streams(builder.code, positions, streams)
    steps: list[int] = []
    used: list[Event] = []
    for event in after.get(-1, ()):
        steps.append(builder.lone_event())
        used.append(event)
    for i, position in enumerate(positions):
        taken = i + 1 < len(positions) and positions[i + 1] != position + 1
        found = here.get(i) or matched.get(i)
        consumes = found is not None and found.kind not in SILENT
        steps.append(builder.step(position, consumes, taken))
        if consumes and found is not None:
            used.append(found)
        for event in after.get(i, ()):
            steps.append(builder.lone_event())
            used.append(event)
    return WarpSchedule(tuple(steps), tuple(used))


def _match_streams(code: MachineCode, positions: Sequence[int], streams: dict[tuple[str, int], list[Event]]) -> dict[int, Event]:
    """Accesses of memory on the path with the events that they are."""
    places: dict[tuple[str, int], list[int]] = {}
    for i, position in enumerate(positions):
        opcode = code.instructions[position].opcode
        stream = _STREAMS.get(opcode.partition(".")[0])
        if stream:
            places.setdefault((stream, _work(opcode) if stream in _SHARED else 0), []).append(i)
    matched: dict[int, Event] = {}
    for key, where in places.items():
        events = streams.get(key, [])
        if len(events) == len(where):
            matched.update(zip(where, events, strict=True))
    return matched


def _merged(trace: Trace, builder: _Builder, warps: dict[tuple[int, int], WarpSchedule], unaligned: dict[tuple[int, int], str]) -> Schedule:
    """With the list schedule for warps that were not aligned."""
    table, slots = tuple(builder.table), SCOREBOARDS
    if unaligned:
        other = ptx_schedule(trace)
        for key in unaligned:
            warp = other.warps[key]
            warps[key] = WarpSchedule(tuple(len(table) + s for s in warp.steps), warp.events)
        table, slots = table + other.table, max(slots, other.slots)
    return Schedule("sass", table, warps, slots, unaligned)


def _work_of(block: Block) -> tuple[int, int]:
    """(instructions that the machine has, special functions) of a block of PTX."""
    pipes = [cost(op).pipe for op in block.all]
    return sum(pipe != "none" for pipe in pipes), pipes.count("mufu")


_PROLOGUE = 100
"""Instructions at the start of a kernel that ptxas may move to the warps that need them."""


def _difference(work: Sequence[tuple[int, int]], warp: WarpTrace, code: MachineCode, path: Path) -> str:
    """Why a path cannot be what a warp executed, though it synchronises alike: it does not do the work, as in a loop without anchors."""
    instructions, special = (sum(work[index][i] for index in warp.path) for i in (0, 1))
    found = sum(code.instructions[position].opcode.startswith("MUFU") for position in path.positions)
    if abs(found - special) > 2 + special // 20:
        return f"the path has {found} special functions, the PTX {special}"
    if len(path.positions) + _PROLOGUE < instructions // 2:
        return f"the path has {len(path.positions)} instructions, the PTX {instructions}: a loop without synchronisation"
    return ""
