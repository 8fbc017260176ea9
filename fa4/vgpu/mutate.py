"""Mutation score: one synchronising instruction is removed or altered at a time, and the checks must notice.

A mutant is caught by an error, by a run that does not end, by results that differ by more than schedules do, or, where the unchanged kernel
fixes the order in which it adds up floating-point numbers in global memory, by an addition that is no longer ordered. One that survives is
``equivalent`` where the unchanged kernel shows why: in every schedule tried, each time the instruction was executed everything that it
orders was ordered already, so that without it no edge of happens-before and no wait is lost. Instructions that never ran are
``not executed``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.capture import Capture
from fa4.vgpu.errors import VgpuError
from fa4.vgpu.program import Block, Immediate, Kernel, Op, Program, Register
from fa4.vgpu.report import StepLimit
from fa4.vgpu.sums import Sums

Array = npt.NDArray[Any]

Schedules = Sequence[tuple[str, int]]


def schedules(count: int) -> Schedules:
    """The fastest one, then strict priorities."""
    return [("round_robin", 0), *(("priority", seed) for seed in range(1, count))]


_MORE_IN_FLIGHT = "one group more in flight"
_PATIENCE = 30
"""How many times more blocks than the unchanged kernel a mutant may execute."""


@dataclass(frozen=True)
class Mutant:
    """One change: of which kind of instruction, what was done to it, and where.

    ``block`` and ``position`` say which instruction of the kernel it is, ``instead`` what stands there.
    """

    kind: str
    change: str
    line: int
    text: str
    source: str
    block: int
    position: int
    instead: tuple[Op, ...]

    @property
    def key(self) -> str:
        """Names it among the mutants of a kernel."""
        return f"{self.kind} {self.change} {self.block}.{self.position} {self.line}"


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. ``schedules``: how many it took, or all that were tried; ``how`` is the error, or why nothing shows."""

    mutant: Mutant
    outcome: str
    schedules: int
    how: str = ""


def mutants(kernel: Kernel) -> Iterator[Mutant]:
    """Every change that is tried, in the order of the text. ``bar.warp.sync`` is left out, since lanes of a warp are not told apart."""
    ids = {o.text for block in kernel.blocks for op in _ops(block) if _named(op) for o in op.operands[:1] if isinstance(o, Immediate)}
    for block in kernel.blocks:
        for position, op in enumerate(_ops(block)):
            for kind, change, instead in _changes(op, kernel, ids):
                yield Mutant(kind, change, op.line, op.text, op.source, block.index, position, instead)


def _ops(block: Block) -> tuple[Op, ...]:
    return block.ops if block.end is None else (*block.ops, block.end)


def _named(op: Op) -> bool:
    """Whether it is at a named barrier."""
    return op.name in ("bar", "barrier") and bool({"sync", "arrive"} & set(op.mods)) and not {"warp", "cluster"} & set(op.mods)


def _changes(op: Op, kernel: Kernel, ids: set[str]) -> Iterator[tuple[str, str, tuple[Op, ...]]]:
    """(kind, change, what stands instead) of one instruction."""
    words = op.opcode
    if words.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        yield "wait", "removed", (replace(op, name="setp", mods=("eq", "u32"), operands=(op.operands[0], Immediate("0"), Immediate("0"))),)
        if "parity" in op.mods:
            yield "phase", "flipped", _computed(op, 2, "xor", "b32", kernel)
    elif words.startswith("mbarrier.init"):
        yield "count", "one more", _computed(op, 1, "add", "u32", kernel)
    elif words.startswith(("mbarrier.arrive", "cp.async.mbarrier.arrive")):
        yield "arrive", "removed", ()
        if "expect_tx" in op.mods:
            mods = tuple(m for m in op.mods if m != "expect_tx")
            yield "arrive", "expects no bytes", (replace(op, mods=mods, operands=op.operands[:-1]),)
    elif _named(op):
        yield "barrier", "removed", ()
        number = op.operands[0] if op.operands else None
        if isinstance(number, Immediate):
            other = next((n for n in sorted(ids, key=int) if n != number.text), str((int(number.text) + 1) % 16))
            change = f"id {other}" + (", used elsewhere" if other in ids else "")
            yield "barrier", change, (replace(op, operands=(Immediate(other), *op.operands[1:])),)
    elif words.startswith("barrier.cluster"):
        yield "barrier", "removed", ()
    elif "commit" in words:
        yield "commit", "removed", ()
    elif "wait_group" in words or words.startswith(("cp.async.wait_all", "tcgen05.wait")):
        yield "wait", "removed", ()
        if "wait_group" in words and isinstance(op.operands[0], Immediate):
            more = Immediate(str(int(op.operands[0].text) + 1))
            yield "stage", _MORE_IN_FLIGHT, (replace(op, operands=(more, *op.operands[1:])),)
    elif words.startswith(("fence", "membar", "tcgen05.fence", "wgmma.fence")):
        yield "fence", "removed", ()
    elif op.name in ("ld", "st", "red", "atom") and {"acquire", "release", "acq_rel"} & set(op.mods):
        mods = tuple("relaxed" if m in ("acquire", "release", "acq_rel") else m for m in op.mods)
        yield "semaphore", "relaxed", (replace(op, mods=mods),)


def _computed(op: Op, number: int, name: str, type_: str, kernel: Kernel) -> tuple[Op, ...]:
    """The instruction with one operand changed by 1, in a register of its own."""
    register = Register(32, kernel.registers.get(32, 0), "mutant")
    first = Op(name, (type_,), (register, op.operands[number], Immediate("1")), op.guard, op.line, op.text, op.source)
    return first, replace(op, operands=(*op.operands[:number], register, *op.operands[number + 1 :]))


def changed(program: Program, mutant: Mutant, kernel: Kernel) -> Program:
    """A program with a mutant of one kernel. It shares the code that was generated for all other blocks."""
    block = kernel.blocks[mutant.block]
    before, behind = _ops(block)[: mutant.position], _ops(block)[mutant.position + 1 :]
    ops = (*before, *mutant.instead, *behind)
    end = ops[-1] if ops and (ops[-1].ends or ops[-1] is block.end) else None
    new = replace(block, ops=ops if end is None else ops[:-1], end=end)
    blocks = (*kernel.blocks[: block.index], new, *kernel.blocks[block.index + 1 :])
    registers = {**kernel.registers, 32: kernel.registers.get(32, 0) + 1}
    other = replace(kernel, blocks=blocks, registers=registers)
    code = {}
    for key, known in program.code.items():
        kept = {where: compiled for where, compiled in known.blocks.items() if where[0] != block.index}
        code[key] = replace(known, kernel=other, blocks=kept)
    return Program(program.target, {kernel.name: other}, program.text, code)


class Mutation:
    """The unchanged kernel in all schedules, and what its mutants are compared with; with the strictest checks that it passes.

    Raises:
        VgpuError: from the constructor: the unchanged kernel fails.
    """

    def __init__(self, capture: Capture, schedules: Schedules) -> None:
        self.capture, self.schedules = capture, schedules
        try:
            self._begin("isa")
        except VgpuError:  # it is not that strict itself
            self._begin("hazards")

    def _begin(self, checks: str) -> None:
        """Run the unchanged kernel."""
        capture, self.checks = self.capture, checks
        self.program = Program.parse(capture.ptx)
        self.results: list[dict[str, Array]] = []
        self.executed: set[int] = set()
        self.effective: set[int] = set()
        self.mixed: set[int] = set()
        self.blocks = 0
        self.fixed = True  # additions to global memory, if there are any, have a fixed order
        for schedule, seed in self.schedules:
            limit = StepLimit(1 << 62)
            sums: list[Sums] = []
            results = capture.replay(self.program, limit, sums=sums, schedule=schedule, seed=seed, checks=checks)
            self.fixed = self.fixed and sums[0].unordered is None
            self.blocks = max(self.blocks, limit.done)
            self.results.append(results)
        for code in self.program.code.values():
            sites = code.how.sites
            assert sites is not None
            for index, _ in code.blocks:
                self.executed.add(index)
            for site, op in enumerate(sites.ops):
                if op is not None and site in sites.effective:
                    self.effective.add(id(op))
                if op is not None and site in sites.mixed:
                    self.mixed.add(id(op))
        self.limits = {name: _noise([r[name] for r in self.results]) for name in self.results[0]}

    def mutants(self) -> list[Mutant]:
        """All of them."""
        return list(mutants(self.program.kernel(self.capture.kernel)))

    def judge(self, mutant: Mutant) -> Verdict:
        """Try a mutant in one schedule after the other until it is caught."""
        if mutant.block not in self.executed:
            return Verdict(mutant, "not executed", 0)
        kernel = self.program.kernel(self.capture.kernel)
        original = id(_ops(kernel.blocks[mutant.block])[mutant.position])
        program = changed(self.program, mutant, kernel)
        for number, (schedule, seed) in enumerate(self.schedules, start=1):
            limit = StepLimit(_PATIENCE * self.blocks)
            sums: list[Sums] | None = [] if self.fixed else None
            try:
                results = self.capture.replay(program, limit, sums=sums, schedule=schedule, seed=seed, checks=self.checks)
            except VgpuError as error:
                where = f"{schedule} {seed}: {error.message.splitlines()[0]}"
                return Verdict(mutant, "caught", number, f"{type(error).__name__}, {where}")
            wrong = [name for name, data in results.items() if not self._close(name, data)]
            if wrong:
                return Verdict(mutant, "caught", number, f"wrong values in {wrong[0]}, {schedule} {seed}")
            if sums and sums[0].unordered is not None:
                return Verdict(mutant, "caught", number, f"nothing fixes the order of additions any more, {schedule} {seed}")
        why = self._equivalence(mutant, original)
        if why:
            return Verdict(mutant, "equivalent", len(self.schedules), why)
        return Verdict(mutant, "survived", len(self.schedules), "every conflicting access is still ordered")

    def _equivalence(self, mutant: Mutant, original: int) -> str:
        """Why a mutant that passed orders what the instruction with the identity ``original`` does; "" if nothing shows it."""
        if original not in self.effective and _traced(mutant, self.checks):
            if "cp.async.bulk.commit" in mutant.text:
                return "whatever waited for its group waited for the next one too"
            if mutant.kind in ("arrive", "commit", "count"):
                return "no wait that needed the mbarrier's phase ever followed"
            return "whenever it ran, all that it orders was ordered already, or nothing followed"
        if mutant.kind == "barrier" and mutant.change.startswith("id ") and original not in self.mixed:
            (op,) = mutant.instead
            if not any(code.how.sites.numbers.get(id(op)) in code.how.sites.mixed for code in self.program.code.values()):
                return "neither as it is nor so did any other instruction ever arrive in the same phase"
        return ""

    def _close(self, name: str, data: Array) -> bool:
        kind, limit = self.limits[name]
        before, after = _decoded(self.results[0][name], kind), _decoded(data, kind)
        return bool((np.isfinite(before) == np.isfinite(after)).all() and _difference(before, after) <= limit)


def _traced(mutant: Mutant, checks: str) -> bool:
    """Whether ``Sites.effective`` tells if its instruction ever mattered."""
    opcode = mutant.text.split(maxsplit=1)[-1] if mutant.text.startswith("@") else mutant.text
    if mutant.kind == "barrier":
        return mutant.change == "removed" and not opcode.startswith(("bar.arrive", "barrier.cta.arrive", "barrier.cluster.arrive"))
    if mutant.kind == "commit":
        return opcode.startswith(("tcgen05.commit", "cp.async.bulk.commit"))
    if opcode.startswith("tcgen05.fence"):
        return checks == "isa"
    return mutant.kind != "semaphore"


_KINDS = ("bf16", "f16", "f32")


def _decoded(data: Array, kind: str) -> Array:
    whole = data[: len(data) // 4 * 4]
    with np.errstate(invalid="ignore"):  # of signalling NaN
        if kind == "bf16":
            return (whole.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return whole.view(np.float16 if kind == "f16" else np.float32).astype(np.float64)


def _difference(a: Array, b: Array) -> float:
    both = np.isfinite(a) & np.isfinite(b)
    return float(np.abs(a[both] - b[both]).max(initial=0.0))


def _noise(runs: Sequence[Array]) -> tuple[str, float]:
    """As which type the runs differ least, relative to their greatest value; and the difference that a mutant must exceed.

    Where they do not differ, a type that makes some value absurdly great comes last.
    """
    found: list[tuple[float, bool, int, float]] = []
    for kind in _KINDS:
        decoded = [_decoded(run, kind) for run in runs]
        first = decoded[0]
        finite = first[np.isfinite(first)]
        size = float(np.abs(finite).max(initial=0.0)) or 1.0
        noise = max((_difference(first, other) for other in decoded[1:]), default=0.0)
        found.append((noise / size, size > 1e4, len(found), max(8 * noise, 0.01 * size)))
    _, _, number, limit = min(found)
    return _KINDS[number], limit
