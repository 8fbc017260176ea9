"""Machine code as data: instructions by class, by loop and by Python source line, and the listing with its source."""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import fa4
from fa4.compiler.artifact import Artifact
from fa4.errors import InspectionError
from fa4.inspection import nvdisasm, sass
from fa4.inspection.classes import sass_class
from fa4.inspection.graph import natural_loops
from fa4.inspection.histogram import Histogram, count
from fa4.inspection.sass import Instruction

_ROOT = Path(fa4.__file__).parents[1]


@dataclass(frozen=True)
class SourceCount:
    """``instructions`` implement ``line`` of ``file``, which reads ``text``; file None where the compiler recorded no line."""

    file: str | None
    line: int
    text: str
    instructions: int

    @property
    def place(self) -> str:
        """File and line in one word."""
        return f"{self.file}:{self.line}" if self.file is not None else "(no source line)"


@dataclass(frozen=True)
class Loop:
    """A natural loop from byte address ``start`` to ``end``, both of instructions.

    ``depth`` is 1 for an outermost loop, ``parent`` the start of the loop around it. ``addresses`` are those of its instructions.
    ``histogram`` and ``source_lines`` count each of them once, whatever branches skip in a trip, loops inside included.
    """

    start: int
    end: int
    depth: int
    parent: int | None
    addresses: tuple[int, ...]
    histogram: Histogram
    source_lines: tuple[SourceCount, ...]


@dataclass(frozen=True)
class MachineCode:
    """A kernel's SASS. ``text`` is nvdisasm's listing; the histogram counts all of it, padding included."""

    text: str
    instructions: tuple[Instruction, ...]
    histogram: Histogram
    loops: tuple[Loop, ...]
    source_lines: tuple[SourceCount, ...]

    @property
    def main_loop(self) -> Loop | None:
        """The loop that does the work: the innermost one with the most tensor-core products, or None where no loop has any.

        Of equals it is the shortest: a loop that exists twice, with and without a mask, spends its time in the latter.
        """
        found = [loop for loop in self.loops if loop.histogram["mma"]]
        outer = {loop.parent for loop in found}  # a loop inside that only waits does not count
        inner = [loop for loop in found if loop.start not in outer]
        return max(inner, key=lambda loop: (loop.histogram["mma"], -loop.histogram.total), default=None)

    @property
    def annotated(self) -> str:
        """The listing with the Python line above the instructions it became, and a bar per loop on the left."""
        return "\n".join(self._annotate()) + "\n"

    def _annotate(self) -> Iterator[str]:
        rows = {(row.file, row.line): row for row in self.source_lines}
        depths = Counter(address for loop in self.loops for address in loop.addresses)
        starts = {loop.start for loop in self.loops}
        source = None
        for instruction in self.instructions:
            here = (instruction.file, instruction.line)
            depth = depths[instruction.address]
            if instruction.address in starts:
                yield f"// loop, depth {depth}"
            if here != source:
                yield f"// {rows[here].place}  {rows[here].text}".rstrip()
                source = here
            yield f"{'|' * depth:<3} /*{instruction.address:04x}*/ {instruction.text}"


def machine_code(artifact: Artifact, kernel: str) -> MachineCode:
    """The machine code of one kernel of an artifact.

    Raises:
        InspectionError: nvdisasm is missing or fails, or its listing is not understood.
    """
    functions = sass.parse(nvdisasm.disassemble(artifact.cubin))
    if kernel not in functions:
        raise InspectionError(f"nvdisasm shows no function {kernel!r}, only {', '.join(functions) or 'none'}; please report it")
    function = functions[kernel]
    names = {row.file for row in artifact.line_table()}
    short = {file: _portable(file, names) for file in {instruction.file for instruction in function.instructions}}
    instructions = tuple(replace(instruction, file=short[instruction.file]) for instruction in function.instructions)
    loops = []
    for loop in natural_loops(function):
        inside = [instruction for instruction in instructions if instruction.address in loop.addresses]
        addresses = tuple(instruction.address for instruction in inside)
        loops.append(Loop(loop.start, loop.end, loop.depth, loop.parent, addresses, _histogram(inside), count_lines(inside)))
    return MachineCode(function.text, instructions, _histogram(instructions), tuple(loops), count_lines(instructions))


def _portable(file: str | None, names: Iterable[str]) -> str | None:
    """The name that PTX gives a file, which does not depend on where the kernel was compiled as a cubin's name does."""
    return next((name for name in names if file is not None and Path(file).as_posix().endswith(f"/{name}")), file)


def _histogram(instructions: Iterable[Instruction]) -> Histogram:
    return count((instruction.opcode for instruction in instructions), sass_class)


def count_lines(instructions: Iterable[Instruction]) -> tuple[SourceCount, ...]:
    """Instructions per source line, most first."""
    numbers = Counter((instruction.file, instruction.line) for instruction in instructions)
    rows = [SourceCount(file, line, _source_text(file, line), number) for (file, line), number in numbers.items()]
    return tuple(sorted(rows, key=lambda row: (-row.instructions, row.file or "", row.line)))


def _source_text(file: str | None, line: int) -> str:
    """A line of a source file as it is now; empty where there is none."""
    return "" if file is None else linecache.getline(str(_ROOT / file), line).strip()
