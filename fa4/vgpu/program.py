"""From the syntax tree to something executable: names resolved to numbered registers and addresses, bodies cut into basic blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

from fa4._collector import no_collection
from fa4.vgpu import syntax
from fa4.vgpu.errors import LaunchError, PtxSyntaxError
from fa4.vgpu.lexer import integer, is_float
from fa4.vgpu.parser import parse

JUMPS = ("bra", "brx", "ret", "exit")

ENDS = {
    *JUMPS,
    "bar",
    "barrier",
    "mbarrier",
    "setmaxnreg",
    "st.async",
    "red.async",
    "cp.async.bulk",
    "cp.async.mbarrier",
    "cp.reduce.async",
    "clusterlaunchcontrol.try_cancel",
    "tcgen05.alloc",
    "tcgen05.commit",
}
"""Operations that end a basic block, as an opcode begins: jumps, whatever may have to wait, and what others may wait for, so that the
scheduler can let others run in between."""

_NO_RESULT = {
    *JUMPS,
    "st",
    "red",
    "prefetch",
    "prefetchu",
    "membar",
    "fence",
    "trap",
    "nanosleep",
    "pmevent",
    "brkpt",
    "discard",
    "applypriority",
}

_ON_128_BITS = ("mov.b128", "clusterlaunchcontrol.query_cancel")
"""What takes registers of 128 bits, as opcodes begin: each is a pair of 64, low bits first."""

GLOBAL_BASE = 1 << 52
"""Address of the first module-scope global variable; far above any host address, below the generic windows."""


class Register(NamedTuple):
    """Row ``index`` of the registers of ``bits`` bits (1: predicates); ``number`` tells those apart that share a row and a name."""

    bits: int
    index: int  # type: ignore[assignment]  # not what tuples call index, which nobody asks a register for
    name: str
    number: int = 0


@dataclass(frozen=True)
class Immediate:
    """A literal; what bits it means depends on the type of the instruction."""

    text: str

    @property
    def is_float(self) -> bool:
        """Whether it is written as a floating-point number."""
        return is_float(self.text.lstrip("-"))


@dataclass(frozen=True)
class Symbol:
    """The address of a variable: ``offset`` inside ``space``."""

    space: str
    offset: int
    name: str


@dataclass(frozen=True)
class Special:
    """A special register, for example ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Address:
    """``[base + offset]``, with what follows it inside the brackets."""

    base: Register | Symbol | Immediate
    offset: int
    extra: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Tuple:
    """``{a, b}``, ``a|b`` or ``(a, b)``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Inverse:
    """``!p``."""

    register: Register


@dataclass(frozen=True)
class Target:
    """A label, as the number of its block; filled in when all blocks are known."""

    block: int


@dataclass(frozen=True)
class Sink:
    """``_``: a result that nobody wants."""


Operand: TypeAlias = Register | Immediate | Symbol | Special | Address | Tuple | Inverse | Target | Sink


@dataclass(frozen=True)
class Op:
    """One instruction: ``name`` and ``mods`` are its opcode cut at the dots; ``source`` comes from the line table."""

    name: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None
    line: int
    text: str
    source: str

    def results(self) -> tuple[Operand, ...]:
        """The operands it writes."""
        if self.name in _NO_RESULT or (self.name in ("bar", "barrier") and "red" not in self.mods):
            return ()
        if self.name == "cp" or not self.operands or isinstance(self.operands[0], Address):
            return ()
        if self.name == "tcgen05":
            return self.operands[: {("dealloc",): 0, ("ld", "red"): 2}.get(self.mods[: 1 + ("red" in self.mods)], 1)]
        return self.operands[:1]

    @cached_property
    def written(self) -> tuple[Register, ...]:
        """Registers it writes."""
        return tuple(_registers(self.results()))

    @cached_property
    def read(self) -> tuple[Register, ...]:
        """Registers it reads, its guard included."""
        guard = [self.guard[0]] if self.guard else []
        return tuple(guard + _registers(self.operands[len(self.results()) :]))

    @property
    def opcode(self) -> str:
        """As written."""
        return ".".join((self.name, *self.mods))

    @property
    def ends(self) -> bool:
        """Whether it ends a basic block."""
        return any(".".join((self.name, *self.mods[:n])) in ENDS for n in range(min(len(self.mods), 2) + 1))


def _registers(operands: tuple[Operand, ...]) -> list[Register]:
    found: list[Register] = []
    for operand in operands:
        if isinstance(operand, Register):
            found.append(operand)
        elif isinstance(operand, Tuple):
            found += _registers(operand.items)
        elif isinstance(operand, Inverse):
            found.append(operand.register)
        elif isinstance(operand, Address):
            found += _registers((operand.base, *operand.extra))
    return found


@dataclass(frozen=True)
class Block:
    """Instructions executed one after the other; ``end`` is the one that ends them, None where the next block just follows.

    ``exit`` as a successor is the number of blocks. ``live`` are the rows, with the bits of their registers, still needed behind it;
    None: all.
    """

    index: int
    ops: tuple[Op, ...]
    end: Op | None
    targets: tuple[int, ...]
    live: frozenset[tuple[int, int]] | None = None

    @property
    def all(self) -> tuple[Op, ...]:
        """All its instructions, ``end`` included."""
        return self.ops if self.end is None else (*self.ops, self.end)


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter in the parameter space."""

    name: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True)
class Variable:
    """A module-scope variable in global or constant memory with its initial bytes."""

    name: str
    space: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class Kernel:
    """One entry. ``registers`` counts rows by width in bits; ``static_shared`` ends where dynamic shared memory begins."""

    name: str
    parameters: tuple[Parameter, ...]
    block: tuple[int, int, int] | None
    max_threads: int | None
    max_registers: int | None
    min_ctas: int
    cluster: tuple[int, int, int] | None
    blocks: tuple[Block, ...]
    registers: dict[int, int]
    static_shared: int
    dynamic_align: int
    local_bytes: int
    variables: tuple[Variable, ...]

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """Every instruction in the order of the text; observers know them by their number here."""
        return tuple(op for block in self.blocks for op in block.all)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Number of the first instruction of each block."""
        return tuple(accumulate((len(block.all) for block in self.blocks), initial=0))

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameter block."""
        return max((p.offset + p.size for p in self.parameters), default=0)


@dataclass(frozen=True)
class Program:
    """A PTX module ready to be executed."""

    target: str
    kernels: dict[str, Kernel]
    text: str = field(default="", compare=False, repr=False)
    code: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What the machine generated for it: kept here, so that it lives as long as the program and serves every launch."""
    cubin: bytes = field(default=b"", compare=False, repr=False)
    """What ptxas made of it, where that is known: not executed, but observers may want it."""

    @classmethod
    def parse(cls, ptx: str, cubin: bytes = b"") -> Program:
        """Read PTX text; ``cubin`` is kept for observers.

        Raises:
            PtxSyntaxError: it is not PTX, uses syntax that is not known here, or names what is not declared.
        """
        from fa4.vgpu.liveness import share_rows

        with no_collection():
            module = parse(ptx)
            lines = ptx.splitlines()
            entries = [f for f in module.functions if f.kind == ".entry" and f.body is not None]
            kernels = {f.name: share_rows(_Lowering(module, f, lines).kernel()) for f in entries}
        return cls(module.target[0], kernels, ptx, cubin=cubin)

    def kernel(self, name: str) -> Kernel:
        """The entry ``name``.

        Raises:
            LaunchError: there is none; the message lists those there are.
        """
        if name not in self.kernels:
            raise LaunchError(f"no kernel {name!r}; there are: {', '.join(self.kernels) or 'none'}")
        return self.kernels[name]


def _dim3(numbers: tuple[int, ...] | None) -> tuple[int, int, int] | None:
    if not numbers:
        return None
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def type_bits(name: str) -> int:
    """Width of a PTX type: ``.pred`` is 1."""
    match = re.search(r"(\d+)(x2)?$", name)
    if name.lstrip(".") == "pred":
        return 1
    if match is None:
        raise PtxSyntaxError(f"unknown type {name!r}")
    return int(match[1]) * (2 if match[2] else 1)


def _size(declaration: syntax.Declaration) -> int:
    size = type_bits(declaration.type) // 8 * declaration.vector
    for dim in declaration.dims:
        size *= dim or 0
    return size


def _align(declaration: syntax.Declaration) -> int:
    return declaration.align or type_bits(declaration.type) // 8 * declaration.vector


def aligned(offset: int, align: int) -> int:
    """``offset`` rounded up."""
    return -(-offset // align) * align


def literal_bytes(declaration: syntax.Declaration) -> bytes:
    """Initial content of a variable, zeros behind the initialiser (PTX ISA 5.4.5)."""
    import numpy as np

    size, width = _size(declaration), type_bits(declaration.type) // 8
    values = []
    for text in declaration.init or ():
        digits = text.lstrip("-")
        if digits[:2].lower() in ("0f", "0d"):
            bits = int(digits[2:], 16)
        elif is_float(digits):
            bits = int(np.array(float(digits), f"f{width}").view(f"u{width}"))
        else:
            bits = integer(digits)
        if text.startswith("-"):
            bits = bits ^ 1 << 8 * width - 1 if is_float(digits) else -bits
        values.append((bits & (1 << 8 * width) - 1).to_bytes(width, "little"))
    return b"".join(values).ljust(size, b"\0")


class _Lowering:
    """One function to a ``Kernel``."""

    def __init__(self, module: syntax.Module, function: syntax.Function, lines: list[str]) -> None:
        self.module, self.function, self.lines = module, function, lines
        self.files = dict(module.files)
        self.rows: dict[int, int] = {}
        self.names: list[dict[str, Register | Tuple | Symbol | syntax.Declaration | str]] = [{}]
        self.opcode = ""
        self.shared = self.local = self.label_count = 0
        self.dynamic_align = 1
        self.source = ""
        self.flat: list[Op | str] = []  # a string is a label, made unique
        self.variables: list[Variable] = []

    def kernel(self) -> Kernel:
        places = {"global": 0, "const": 0}
        used = _words(self.function.body)
        for d in self.module.variables:
            if d.space == ".shared":
                if d.name in used:
                    self.declare(d)
                continue
            space = d.space[1:]
            places[space] = aligned(places[space], _align(d))
            base = GLOBAL_BASE if space == "global" else 0
            self.names[0][d.name] = Symbol(space, base + places[space], d.name)
            self.variables.append(Variable(d.name, space, base + places[space], literal_bytes(d)))
            places[space] += _size(d)
        parameters, offset = [], 0
        for p in self.function.parameters:
            offset = aligned(offset, _align(p))
            parameters.append(Parameter(p.name, offset, _size(p), _align(p)))
            self.names[0][p.name] = Symbol("param", offset, p.name)
            offset += _size(p)
        assert self.function.body is not None
        self.scope(self.function.body)
        limits = dict(self.function.limits)
        maximum = 1
        for n in limits.get(".maxntid", ()):
            maximum *= n
        blocks = self.blocks()
        return Kernel(
            name=self.function.name,
            parameters=tuple(parameters),
            block=_dim3(limits.get(".reqntid")),
            max_registers=limits.get(".maxnreg", (None,))[0],
            min_ctas=limits.get(".minnctapersm", (1,))[0],
            cluster=_dim3(limits.get(".reqnctapercluster")),
            max_threads=maximum if ".maxntid" in limits else None,
            blocks=blocks,
            registers=self.rows,
            static_shared=self.shared,
            dynamic_align=self.dynamic_align,
            local_bytes=aligned(self.local, 16),
            variables=tuple(self.variables),
        )

    def declare(self, d: syntax.Declaration) -> None:
        names = self.names[-1]
        if d.space == ".reg":
            every = [d.name] if d.count is None else [f"{d.name}{i}" for i in range(d.count)]
            if d.vector > 1:
                raise PtxSyntaxError(f"PTX line {d.line}: vector registers are not supported")
            names.update(dict.fromkeys(every, d))
        elif d.space == ".shared":
            if d.linkage == ".extern":
                self.dynamic_align = max(self.dynamic_align, _align(d))
                names[d.name] = Symbol("dynamic", 0, d.name)
            else:
                self.shared = aligned(self.shared, _align(d))
                names[d.name] = Symbol("shared", self.shared, d.name)
                self.shared += _size(d)
        elif d.space == ".local":
            self.local = aligned(self.local, _align(d))
            names[d.name] = Symbol("local", self.local, d.name)
            self.local += _size(d)
        else:
            raise PtxSyntaxError(f"PTX line {d.line}: {d.space} inside a body is not supported")

    def scope(self, scope: syntax.Scope) -> None:
        names: dict[str, Register | Tuple | Symbol | syntax.Declaration | str] = {}
        for statement in scope.statements:  # labels may be used before they are defined
            if isinstance(statement, syntax.Label):
                self.label_count += 1
                names[statement.name] = f"{statement.name}#{self.label_count}"
            elif isinstance(statement, syntax.Directive) and ".branchtargets" in statement.name:
                names[statement.name.split(":")[0]] = "targets:" + ",".join(statement.words)
        self.names.append(names)
        for statement in scope.statements:
            if isinstance(statement, syntax.Scope):
                self.scope(statement)
            elif isinstance(statement, syntax.Declaration):
                self.declare(statement)
            elif isinstance(statement, syntax.Label):
                self.flat.append(str(names[statement.name]))
            elif isinstance(statement, syntax.Location):
                self.source = self.location(statement)
            elif isinstance(statement, syntax.Instruction):
                self.flat.append(self.op(statement))
        self.names.pop()

    def location(self, at: syntax.Location) -> str:
        text = f"{self.files.get(at.file, '?')}:{at.line}"
        if at.inlined_at is not None:
            text += f" inlined at {self.files.get(at.inlined_at[0], '?')}:{at.inlined_at[1]}"
        return text

    def op(self, i: syntax.Instruction) -> Op:
        name, *mods = i.opcode.split(".")
        self.opcode = i.opcode
        guard = None
        if i.guard is not None:
            register = self.lookup(i.guard.name, i.line)
            if not isinstance(register, Register) or register.bits != 1:
                raise PtxSyntaxError(f"PTX line {i.line}: {i.guard.name} is no predicate")
            guard = register, i.guard.negated
        operands = tuple(self.operand(o, i.line) for o in i.operands)
        text = self.lines[i.line - 1].strip() if i.line <= len(self.lines) else str(i)
        if not text.endswith(";"):
            text = str(i)
        return Op(name, tuple(mods), operands, guard, i.line, text, self.source)

    def operand(self, o: syntax.Operand, line: int) -> Operand:
        if isinstance(o, syntax.Name):
            if o.text == "_":
                return Sink()
            found = self.lookup(o.text, line)
            if isinstance(found, Symbol) and o.offset:
                return Symbol(found.space, found.offset + o.offset, found.name)
            return found
        if isinstance(o, syntax.Number):
            return Immediate(o.text)
        if isinstance(o, syntax.Vector | syntax.Group):
            return Tuple(tuple(self.operand(item, line) for item in o.items))
        if isinstance(o, syntax.Pair):
            return Tuple((self.operand(o.first, line), self.operand(o.second, line)))
        if isinstance(o, syntax.Not):
            item = self.operand(o.item, line)
            if not isinstance(item, Register):
                raise PtxSyntaxError(f"PTX line {line}: ! needs a predicate")
            return Inverse(item)
        base = self.operand(o.base, line)
        if not isinstance(base, Register | Symbol | Immediate):
            raise PtxSyntaxError(f"PTX line {line}: {o} is no address")
        if isinstance(base, Symbol):
            base, offset = Symbol(base.space, base.offset + o.offset, base.name), 0
        else:
            offset = o.offset
        return Address(base, offset, tuple(self.operand(item, line) for item in o.extra))

    def lookup(self, name: str, line: int) -> Operand:
        for names in reversed(self.names):
            found = names.get(name)
            if found is None:
                continue
            if isinstance(found, syntax.Declaration):
                names[name] = found = self.register(type_bits(found.type), name, line)
            if isinstance(found, Tuple) and not self.opcode.startswith(_ON_128_BITS):
                raise PtxSyntaxError(f"PTX line {line}: {self.opcode} with a register of 128 bits is not supported")
            if isinstance(found, str):
                if found.startswith("targets:"):
                    return Tuple(tuple(self.lookup(label, line) for label in found[8:].split(",")))
                return Symbol("label", 0, found)
            return found
        if name.startswith("%") or name == "WARP_SZ":
            return Special(name)
        return Symbol("function", 0, name)

    def register(self, bits: int, name: str, line: int) -> Register | Tuple:
        """A new register; rows are numbered at first use, so that the results of a vector load lie side by side."""
        if bits == 128:
            low, high = (self.register(64, f"{name}.{half}", line) for half in ("lo", "hi"))
            return Tuple((low, high))
        if bits not in (1, 8, 16, 32, 64):
            raise PtxSyntaxError(f"PTX line {line}: registers of {bits} bits are not supported")
        number = self.rows.setdefault(bits, 0)
        self.rows[bits] += 1
        return Register(bits, number, name, number)

    # Basic blocks

    def blocks(self) -> tuple[Block, ...]:
        groups: list[list[Op]] = [[]]
        labels: dict[str, int] = {}
        for item in self.flat:
            if isinstance(item, str):
                if groups[-1]:
                    groups.append([])
                labels[item] = len(groups) - 1
            else:
                groups[-1].append(item)
                if item.ends:
                    groups.append([])
        # A body always ends in a block without a barrier, so that a warp that waits is always at some block.
        if not groups[-1] and groups[:-1] and groups[-2][-1].name in ("ret", "exit") and len(groups) - 1 not in labels.values():
            groups.pop()
        return tuple(self.block(index, ops, labels, len(groups)) for index, ops in enumerate(groups))

    def block(self, index: int, ops: list[Op], labels: dict[str, int], count: int) -> Block:
        end = ops[-1] if ops and ops[-1].ends else None
        follow = (index + 1,)
        if end is None:
            return Block(index, tuple(ops), None, follow)
        if end.name in ("bra", "brx"):
            names = [o for operand in end.operands for o in (operand.items if isinstance(operand, Tuple) else (operand,))]
            jumps = []
            for o in names:
                if isinstance(o, Symbol):
                    if o.name not in labels:
                        raise PtxSyntaxError(f"PTX line {end.line}: unknown label in {end.text}")
                    jumps.append(labels[o.name])
            targets = tuple(jumps) + (follow if end.guard else ())
        elif end.name in ("ret", "exit"):
            targets = (count,) + (follow if end.guard else ())
        else:
            targets = follow
        return Block(index, tuple(ops[:-1]), end, targets)


def _words(scope: syntax.Scope | None) -> set[str]:
    """Every name that a body uses: only the shared variables among them take space."""
    found: set[str] = set()

    def visit(o: syntax.Operand) -> None:
        if isinstance(o, syntax.Name):
            found.add(o.text)
        elif isinstance(o, syntax.Vector | syntax.Group):
            for item in o.items:
                visit(item)
        elif isinstance(o, syntax.Memory):
            for item in (o.base, *o.extra):
                visit(item)

    for statement in scope.statements if scope else ():
        if isinstance(statement, syntax.Scope):
            found |= _words(statement)
        elif isinstance(statement, syntax.Instruction):
            for operand in statement.operands:
                visit(operand)
    return found
