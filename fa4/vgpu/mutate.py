"""Mutation score: one synchronising instruction is removed or altered at a time, and the checks must notice.

A mutant is caught by an error, by a run that does not end, or by results that differ by more than schedules do. One that survives is
``equivalent`` where the unchanged kernel shows why: in every schedule tried, each time the instruction was executed everything that it
orders was ordered already, so that without it no edge of happens-before and no wait is lost. Instructions that never ran are
``not executed``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.capture import Capture
from fa4.vgpu.errors import VgpuError
from fa4.vgpu.program import Op, Program

Array = npt.NDArray[Any]

Schedules = Sequence[tuple[str, int]]


def schedules(count: int) -> Schedules:
    """The fastest one, then strict priorities."""
    return [("round_robin", 0), *(("priority", seed) for seed in range(1, count))]


_PATIENCE = 30
"""How many times more blocks than the unchanged kernel a mutant may execute."""


@dataclass(frozen=True)
class Mutant:
    """One change: of which kind of instruction, what was done to it, where, and the text that stands there instead."""

    kind: str
    change: str
    line: int
    text: str
    source: str
    replacement: str


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. ``schedules``: how many it took, or all that were tried; ``how`` is the error, or why nothing shows."""

    mutant: Mutant
    outcome: str
    schedules: int
    how: str = ""


def mutants(program: Program, kernel: str, ptx: str) -> Iterator[Mutant]:
    """Every change that is tried, in the order of the text.

    Instructions that share a line with others are left out; ``bar.warp.sync`` is, since lanes of a warp are not told apart.
    """
    lines = ptx.splitlines()
    for block in program.kernel(kernel).blocks:
        for op in block.ops if block.end is None else (*block.ops, block.end):
            if op.line <= len(lines) and lines[op.line - 1].count(";") == 1:
                for kind, change, replacement in _changes(op, lines[op.line - 1], ptx):
                    yield Mutant(kind, change, op.line, op.text, op.source, replacement)


_GUARD = re.compile(r"^\s*(@!?\S+\s+)?")


def _changes(op: Op, line: str, text: str) -> Iterator[tuple[str, str, str]]:
    """(kind, change, replacement) of one instruction on a ``line`` of ``text``."""
    words = op.opcode
    guard = (_GUARD.match(line) or [""])[0]
    if words.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        target, parity = re.split(r"[\s,]+", line[len(guard) :].split(None, 1)[1].replace(";", ""))[0], _operand(line, 2)
        yield "wait", "removed", f"{guard}setp.eq.u32 {target}, 0, 0;"
        if "parity" in op.mods:
            altered = line.replace(f", {parity}", ", mutant_parity", 1)
            yield "phase", "flipped", f"{{ .reg .b32 mutant_parity; xor.b32 mutant_parity, {parity}, 1; {altered} }}"
    elif words.startswith("mbarrier.init"):
        count = _operand(line, 1)
        altered = line.replace(f", {count}", ", mutant_count", 1)
        yield "count", "one more", f"{{ .reg .b32 mutant_count; add.u32 mutant_count, {count}, 1; {altered} }}"
    elif words.startswith(("mbarrier.arrive", "cp.async.mbarrier.arrive")):
        yield "arrive", "removed", ""
        if "expect_tx" in op.mods:
            yield "arrive", "expects no bytes", re.sub(r"\.expect_tx", "", line.rsplit(",", 1)[0]) + ";"
    elif words.startswith(("bar.sync", "barrier.sync", "barrier.cta.sync", "bar.arrive", "barrier.arrive", "barrier.cta.arrive")):
        yield "barrier", "removed", ""
        used = set(re.findall(r"\b(?:bar|barrier(?:\.cta)?)\.(?:sync|arrive)\S*\s+(\d+)", text))
        number = line[len(guard) :].split(None, 1)[1].split(",", maxsplit=1)[0].strip(" ;\t")
        if number.isdigit():
            other = next((n for n in sorted(used, key=int) if n != number), str((int(number) + 1) % 16))
            kind = f"id {other}" + (", used elsewhere" if other in used else "")
            yield "barrier", kind, re.sub(rf"(\s){number}(\s*[,;])", rf"\g<1>{other}\g<2>", line, count=1)
    elif words.startswith("barrier.cluster"):
        yield "barrier", "removed", ""
    elif "commit" in words:
        yield "commit", "removed", ""
    elif "wait_group" in words or words.startswith(("cp.async.wait_all", "tcgen05.wait")):
        yield "wait", "removed", ""
        keep = re.search(r"\s(\d+)\s*;", line)
        if keep is not None and "wait_group" in words:
            yield "stage", "one group more in flight", line[: keep.start(1)] + str(int(keep[1]) + 1) + ";"
    elif words.startswith(("fence", "membar", "tcgen05.fence", "wgmma.fence")):
        yield "fence", "removed", ""
    elif op.name in ("ld", "st", "red", "atom") and {"acquire", "release", "acq_rel"} & set(op.mods):
        yield "semaphore", "relaxed", re.sub(r"\.(acq_rel|acquire|release)\b", ".relaxed", line, count=1)


def _operand(line: str, number: int) -> str:
    return line.rstrip(" ;\t").split(",")[number].strip(" ;\t")


def changed(ptx: str, mutant: Mutant) -> str:
    """The text of a mutant."""
    lines = ptx.splitlines()
    lines[mutant.line - 1] = mutant.replacement
    return "\n".join(lines)


class _Limit:
    """An observer that ends a run which does not end by itself."""

    def __init__(self, blocks: int) -> None:
        self.left = blocks

    def launch(self, *_: Any) -> None:
        pass

    def block(self, *_: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise VgpuError("the kernel does not end")

    def event(self, *_: Any) -> None:
        pass


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
        for schedule, seed in self.schedules:
            limit = _Limit(1 << 62)
            results = capture.replay(self.program, limit, schedule=schedule, seed=seed, checks=checks)
            self.blocks = max(self.blocks, (1 << 62) - limit.left)
            self.results.append(results)
        for code in self.program.code.values():
            assert code.sites is not None
            for index, _ in code.blocks:
                block = code.kernel.blocks[index]
                self.executed |= {op.line for op in (*block.ops, block.end) if op is not None}
            for site, op in enumerate(code.sites.ops):
                if op is not None and site in code.sites.effective:
                    self.effective.add(op.line)
                if op is not None and site in code.sites.mixed:
                    self.mixed.add(op.line)
        self.limits = {name: _noise([r[name] for r in self.results]) for name in self.results[0]}

    def mutants(self) -> list[Mutant]:
        """All of them."""
        return list(mutants(self.program, self.capture.kernel, self.capture.ptx))

    def judge(self, mutant: Mutant) -> Verdict:
        """Try a mutant in one schedule after the other until it is caught."""
        if mutant.line not in self.executed:
            return Verdict(mutant, "not executed", 0)
        program = Program.parse(changed(self.capture.ptx, mutant))
        for number, (schedule, seed) in enumerate(self.schedules, start=1):
            limit = _Limit(_PATIENCE * self.blocks)
            try:
                results = self.capture.replay(program, limit, schedule=schedule, seed=seed, checks=self.checks)
            except VgpuError as error:
                where = f"{schedule} {seed}: {error.message.splitlines()[0]}"
                return Verdict(mutant, "caught", number, f"{type(error).__name__}, {where}")
            wrong = [name for name, data in results.items() if not self._close(name, data)]
            if wrong:
                return Verdict(mutant, "caught", number, f"wrong values in {wrong[0]}, {schedule} {seed}")
        if mutant.change == "removed" and mutant.line not in self.effective and _can_be_redundant(mutant):
            return Verdict(mutant, "equivalent", len(self.schedules), "whenever it ran, all that it orders was ordered already")
        if (
            mutant.kind == "barrier"
            and mutant.change.startswith("id ")
            and not mutant.change.endswith("elsewhere")
            and mutant.line not in self.mixed
        ):
            return Verdict(mutant, "equivalent", len(self.schedules), "no other instruction ever arrived at either barrier with it")
        return Verdict(mutant, "survived", len(self.schedules), "every conflicting access is still ordered")

    def _close(self, name: str, data: Array) -> bool:
        kind, limit = self.limits[name]
        before, after = _decoded(self.results[0][name], kind), _decoded(data, kind)
        return bool((np.isfinite(before) == np.isfinite(after)).all() and _difference(before, after) <= limit)


def _can_be_redundant(mutant: Mutant) -> bool:
    """Whether its effect is one of those that are traced."""
    return mutant.kind in ("wait", "barrier", "fence") and not mutant.text.lstrip("@!%p0123456789 ").startswith(
        ("tcgen05.fence", "wgmma.fence", "bar.arrive")
    )


_KINDS = ("bf16", "f16", "f32")


def _decoded(data: Array, kind: str) -> Array:
    whole = data[: len(data) // 4 * 4]
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
