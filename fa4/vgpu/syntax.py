"""The syntax tree of a PTX module. ``str`` of every node is PTX again; nodes compare without regard to line numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True)
class Name:
    """A register, variable, label or function, with a constant byte offset where one is added to a variable."""

    text: str
    offset: int = 0

    def __str__(self) -> str:
        """As written."""
        return self.text + (f"{self.offset:+d}" if self.offset else "")


@dataclass(frozen=True)
class Number:
    """A literal; a sign is part of its text."""

    text: str

    def __str__(self) -> str:
        """As written."""
        return self.text


@dataclass(frozen=True)
class Vector:
    """``{a, b}``."""

    items: tuple[Operand, ...]

    def __str__(self) -> str:
        """As written."""
        return "{" + ", ".join(map(str, self.items)) + "}"


@dataclass(frozen=True)
class Group:
    """``(a, b)``: arguments or results of a call."""

    items: tuple[Operand, ...]

    def __str__(self) -> str:
        """As written."""
        return "(" + ", ".join(map(str, self.items)) + ")"


@dataclass(frozen=True)
class Memory:
    """``[base+offset]``, or ``[base, {coordinates}]`` with further items."""

    base: Operand
    offset: int = 0
    extra: tuple[Operand, ...] = ()

    def __str__(self) -> str:
        """As written."""
        first = str(self.base) + (f"{self.offset:+d}" if self.offset else "")
        return "[" + ", ".join([first, *map(str, self.extra)]) + "]"


@dataclass(frozen=True)
class Pair:
    """``p|q``: two results."""

    first: Operand
    second: Operand

    def __str__(self) -> str:
        """As written."""
        return f"{self.first}|{self.second}"


@dataclass(frozen=True)
class Not:
    """``!p``: a predicate, negated."""

    item: Operand

    def __str__(self) -> str:
        """As written."""
        return f"!{self.item}"


Operand: TypeAlias = Name | Number | Vector | Group | Memory | Pair | Not


@dataclass(frozen=True)
class Guard:
    """``@p`` or ``@!p``."""

    name: str
    negated: bool = False

    def __str__(self) -> str:
        """As written, with a blank behind."""
        return f"@{'!' if self.negated else ''}{self.name} "


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``opcode`` with all its modifiers."""

    opcode: str
    operands: tuple[Operand, ...] = ()
    guard: Guard | None = None
    line: int = field(default=0, compare=False)

    def __str__(self) -> str:
        """As written."""
        operands = ", ".join(map(str, self.operands))
        return f"{self.guard or ''}{self.opcode}{' ' if operands else ''}{operands};"


@dataclass(frozen=True)
class Label:
    """``name:``."""

    name: str
    line: int = field(default=0, compare=False)

    def __str__(self) -> str:
        """As written."""
        return f"{self.name}:"


@dataclass(frozen=True)
class Location:
    """``.loc``: what follows implements ``line`` of ``file``; ``inlined_at`` is (file, line, column) of the call (PTX ISA 11.5.3)."""

    file: int
    line: int
    column: int
    function: str = ""
    inlined_at: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        """As written."""
        tail = f", function_name {self.function}" if self.function else ""
        if self.inlined_at is not None:
            tail += ", inlined_at {} {} {}".format(*self.inlined_at)
        return f".loc {self.file} {self.line} {self.column}{tail}"


@dataclass(frozen=True)
class Directive:
    """A directive that changes nothing here: ``.pragma``, ``.branchtargets`` and the like, as its words."""

    name: str
    words: tuple[str, ...] = ()
    line: int = field(default=0, compare=False)

    def __str__(self) -> str:
        """As written."""
        return " ".join([self.name, ", ".join(self.words)]) + ";"


@dataclass(frozen=True)
class Declaration:
    """Registers or a variable. ``count`` is N of ``name<N>``, ``dims`` the array sizes (None where open), ``init`` literal texts."""

    space: str
    type: str
    name: str
    align: int | None = None
    vector: int = 1
    count: int | None = None
    dims: tuple[int | None, ...] = ()
    init: tuple[str, ...] | None = None
    linkage: str = ""
    pointer: str = ""
    line: int = field(default=0, compare=False)

    def text(self) -> str:
        """Without the semicolon."""
        words = [self.linkage, self.space]
        words += [f".align {self.align}" if self.align is not None else "", f".v{self.vector}" if self.vector > 1 else "", self.type]
        words += [self.pointer]
        name = self.name + (f"<{self.count}>" if self.count is not None else "")
        name += "".join(f"[{'' if d is None else d}]" for d in self.dims)
        tail = f" = {{{', '.join(self.init)}}}" if self.init is not None else ""
        return " ".join([w for w in words if w] + [name]) + tail

    def __str__(self) -> str:
        """As written."""
        return self.text() + ";"


@dataclass(frozen=True)
class Scope:
    """``{ ... }``: a body, or a block inside one with names of its own."""

    statements: tuple[Statement, ...]

    def __str__(self) -> str:
        """One statement a line."""
        return "{\n" + "\n".join(map(str, self.statements)) + "\n}"


Statement: TypeAlias = Instruction | Label | Location | Directive | Declaration | Scope


@dataclass(frozen=True)
class Function:
    """``.entry`` or ``.func``; ``limits`` are directives such as ``.reqntid`` with their numbers; a prototype has no body."""

    kind: str
    name: str
    parameters: tuple[Declaration, ...] = ()
    results: tuple[Declaration, ...] = ()
    limits: tuple[tuple[str, tuple[int, ...]], ...] = ()
    body: Scope | None = None
    linkage: str = ""

    def __str__(self) -> str:
        """Header and body."""
        results = "(" + ", ".join(d.text() for d in self.results) + ") " if self.results else ""
        head = f"{self.linkage} {self.kind} {results}{self.name}(" + ",\n".join(d.text() for d in self.parameters) + ")"
        limits = "".join(f"\n{name} {', '.join(map(str, numbers))}" for name, numbers in self.limits)
        return head.strip() + limits + ("\n" + str(self.body) if self.body is not None else ";")


@dataclass(frozen=True)
class Module:
    """A whole PTX text. ``files`` are (number, name) of ``.file``."""

    version: str
    target: tuple[str, ...]
    address_size: int
    variables: tuple[Declaration, ...]
    functions: tuple[Function, ...]
    files: tuple[tuple[int, str], ...] = ()

    def __str__(self) -> str:
        """A module that parses to the same tree."""
        parts = [f".version {self.version}", f".target {', '.join(self.target)}", f".address_size {self.address_size}"]
        parts += [f'.file {number} "{name}"' for number, name in self.files]
        parts += map(str, self.variables)
        parts += map(str, self.functions)
        return "\n".join(parts) + "\n"
