"""Reading what nvdisasm prints: instructions, labels, and the source line of each instruction."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fa4.errors import InspectionError
from fa4.inspection.classes import sass_class

_FUNCTION = re.compile(r"^\.text\.(\S+):$")
_LABEL = re.compile(r"^([.\w$]+):$")
_LINE = re.compile(r'^\s*//## File "(?P<file>[^"]*)", line (?P<line>\d+)')
_ADDRESS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/")
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P[T\d]\s+)?(?P<opcode>[A-Z][\w.]*)(?:\s+(?P<operands>[^;]*?))??"
    r"\s*(?:\(\*(?P<note>.*?)\*\))?\s*;\s*$"
)


@dataclass(frozen=True)
class Instruction:
    """One instruction at a byte ``address`` of its function.

    ``guard`` is its predicate ("@!P0") or empty, ``note`` what nvdisasm says about it ('"SpillRefill"', branch targets). ``file`` and
    ``line`` say which source line it implements: None and 0 where the compiler recorded none.
    """

    address: int
    guard: str
    opcode: str
    operands: str
    note: str
    file: str | None
    line: int

    @property
    def kind(self) -> str:
        """Its class, see ``fa4.inspection.classes``."""
        return sass_class(self.opcode)

    @property
    def text(self) -> str:
        """As nvdisasm writes it, without padding."""
        words = (self.guard, self.opcode, self.operands, f"(*{self.note}*)" if self.note else "")
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Function:
    """One function's code. ``labels`` maps a name to the address of the instruction that it precedes, ``text`` is the listing."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    text: str


def parse(listing: str) -> dict[str, Function]:
    """The functions of a listing that ``nvdisasm -c -g`` made, by name.

    Raises:
        InspectionError: a line with an instruction is not understood: better no numbers than wrong ones.
    """
    functions = {}
    current: _Builder | None = None
    for number, line in enumerate(listing.splitlines(), start=1):
        if start := _FUNCTION.match(line):
            current = functions[start[1]] = _Builder(start[1])
        elif line.startswith("//--------"):
            current = None
        elif current is not None:
            current.add(line, number)
    return {name: builder.finish() for name, builder in functions.items()}


class _Builder:
    """The lines of one function so far."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._instructions: list[Instruction] = []
        self._waiting: list[str] = []  # labels that no instruction has followed yet
        self._labels: dict[str, int] = {}
        self._text: list[str] = [f".text.{name}:"]
        self._source: tuple[str | None, int] = (None, 0)

    def add(self, line: str, number: int) -> None:
        if source := _LINE.match(line):
            self._source = source["file"], int(source["line"])
            return
        self._text.append(line)
        if label := _LABEL.match(line):
            self._waiting.append(label[1])
        elif _ADDRESS.match(line):
            match = _INSTRUCTION.match(line)
            if match is None:
                raise InspectionError(f"line {number} of nvdisasm's listing is not understood: {line.strip()!r}; please report it")
            address = int(match["address"], 16)
            self._labels.update(dict.fromkeys(self._waiting, address))
            self._waiting.clear()
            guard, operands, note = ((match[name] or "").strip() for name in ("guard", "operands", "note"))
            self._instructions.append(Instruction(address, guard, match["opcode"], operands, note, *self._source))

    def finish(self) -> Function:
        return Function(self._name, tuple(self._instructions), self._labels, "\n".join(self._text).rstrip("\n") + "\n")
