"""Basic blocks to Python: every block becomes a function over numpy arrays that hold one value for each lane of a gang of warps.

A block is generated twice: for gangs whose lanes are all active (no masks at all, results written in place), and for the rest, where
every write takes the mask ``m``. What a single instruction becomes is the business of ``fa4.vgpu.isa``; this module gives its
emitters the operands as expressions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu import isa
from fa4.vgpu.defined import Watch, is_copy
from fa4.vgpu.errors import UnsupportedInstructionError
from fa4.vgpu.hazards import SITE_NAMES, Sites
from fa4.vgpu.lexer import integer
from fa4.vgpu.observe import looks, observed, tell, values_of
from fa4.vgpu.program import Address, Immediate, Inverse, Kernel, Op, Operand, Register, Sink, Special, Symbol, Tuple
from fa4.vgpu.tensor_order import register_bit
from fa4.vgpu.warpgroup import Multiplications

Array = npt.NDArray[Any]
BlockFunction = Callable[[Any, Any], Any]

NUMPY_TYPES: dict[str, type[np.generic]] = {
    "pred": np.bool_,
    **{f"u{n}": getattr(np, f"uint{n}") for n in (8, 16, 32, 64)},
    **{f"s{n}": getattr(np, f"int{n}") for n in (8, 16, 32, 64)},
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
}

# Types whose registers are only carried as bits; their arithmetic unpacks them.
_AS_BITS = {"bf16": "u16", "f16x2": "u32", "bf16x2": "u32", "tf32": "u32", "u16x2": "u32", "s16x2": "u32", "e4m3x2": "u16", "e5m2x2": "u16"}

_UFUNCS = [
    "add",
    "subtract",
    "multiply",
    "negative",
    "absolute",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_not",
    "left_shift",
    "right_shift",
    "minimum",
    "maximum",
    "equal",
    "not_equal",
    "less",
    "less_equal",
    "greater",
    "greater_equal",
    "copyto",
    "where",
    "logical_and",
    "logical_or",
    "logical_not",
    "logical_xor",
    "copysign",
]
_NAMESPACE: dict[str, Any] = {"np": np, **{name: getattr(np, name) for name in _UFUNCS}}
_VIEWS = ("u8", "s8", "u16", "s16", "f16", "u32", "s32", "f32", "u64", "s64", "f64", "x2", "lo", "hi", "p", "D", "S")
_BANKS = ("R32", "LO", "HI", "P")  # the rows of some of them as one array
_INDEXED = re.compile(r"\b(\w+)\[")


def view_name(type_: str) -> str:
    """The list of register views that holds values of a PTX type."""
    if type_ == "pred":
        return "p"
    type_ = _AS_BITS.get(type_, type_)
    return "u" + type_[1:] if type_[0] == "b" else type_


def bits_of(type_: str) -> int:
    """Width of a PTX type in a register."""
    name = view_name(type_)
    return 1 if name == "p" else int(name[1:])


def immediate_bits(text: str, type_: str) -> Any:
    """The value of a literal as an operand of ``type_`` (PTX ISA 4.5)."""
    name = view_name(type_)
    dtype = np.dtype(NUMPY_TYPES["pred" if name == "p" else name])
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    if digits[:2].lower() in ("0f", "0d"):
        width = "32" if digits[1] in "fF" else "64"
        bits = np.array(int(digits[2:], 16), f"uint{width}")
        if dtype.kind != "f":  # raw bits in an untyped register
            if sign < 0:
                bits = bits ^ np.array(1 << int(width) - 1, f"uint{width}")
            return np.asarray(bits.astype(f"u{dtype.itemsize}").view(dtype))[()]
        return np.asarray((sign * bits.view(f"float{width}")).astype(dtype))[()]
    if digits[:2].lower() != "0x" and any(c in digits for c in ".eE"):
        value = np.array(sign * float(digits), dtype if dtype.kind == "f" else f"f{dtype.itemsize}")
        return np.asarray(value.view(dtype))[()]
    invert = text.startswith("~")
    number = integer(digits.lstrip("~")) * sign
    number = ~number if invert else number
    if dtype.kind == "b":
        return np.bool_(number != 0)
    if dtype.kind == "f":
        return np.asarray(np.array(number, dtype))[()]
    masked = number & (1 << 8 * dtype.itemsize) - 1
    return np.asarray(np.array(masked, f"u{dtype.itemsize}").view(dtype))[()]


class EmitError(Exception):
    """The instruction at ``position`` of a block is not modelled."""

    def __init__(self, position: int, message: str) -> None:
        super().__init__(message)
        self.position, self.message = position, message


@dataclass
class Compiled:
    """One generated function; ``positions`` gives for each of its lines the instruction, by position in the block."""

    run: BlockFunction
    source: str
    positions: list[int]
    bytes_per_warp: dict[str, int]


@dataclass
class Emitter:
    """Writes one block. ``mask`` names the lanes of the instruction at hand; None: all of them."""

    kernel: Kernel
    watch: Watch
    base_mask: str | None
    shared_base: int
    clustered: bool = False
    sites: Sites | None = None
    observed: bool = False
    lines: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    namespace: dict[str, Any] = field(default_factory=lambda: dict(_NAMESPACE))
    bytes_per_warp: dict[str, int] = field(default_factory=dict)
    mask: str | None = None
    position: int = 0
    temporaries: int = 0
    constants: dict[tuple[str, bytes], str] = field(default_factory=dict)
    used: set[Register] = field(default_factory=set)
    touched: tuple[set[Register], set[Register]] = field(default_factory=lambda: (set(), set()))

    # Lines and names

    def line(self, text: str) -> None:
        """Add a line of Python that belongs to the instruction at hand."""
        self.lines.append("    " + text)
        self.positions.append(self.position)

    def temporary(self, expression: str) -> str:
        """A new local name for ``expression``."""
        self.temporaries += 1
        name = f"t{self.temporaries}"
        self.line(f"{name} = {expression}")
        return name

    def helper(self, function: Callable[..., Any]) -> str:
        """Make a Python function known to the generated code."""
        self.namespace[function.__name__] = function
        return function.__name__

    def constant(self, value: Any, dtype: Any = None) -> str:
        """A constant as an array of one element: numpy takes those faster than scalars."""
        array = np.array([value], dtype)
        key = (str(array.dtype), array.tobytes())
        if key not in self.constants:
            self.constants[key] = f"k{len(self.constants)}"
            self.namespace[self.constants[key]] = array
        return self.constants[key]

    def fixed(self, value: Any) -> str:
        """Any other constant object."""
        name = f"o{len(self.namespace)}"
        self.namespace[name] = value
        return name

    @property
    def masked(self) -> str:
        """The mask as an argument."""
        return self.mask or "None"

    # Operands

    def source(self, o: Operand, type_: str) -> str:
        """An array expression of the operand's value, one element a lane (or one for all lanes)."""
        name = view_name(type_)
        if isinstance(o, Register):
            if o.bits == bits_of(type_):
                return f"{name}[{o.index}]"
            if o.bits > bits_of(type_) > 1:  # the low part
                return f"u{o.bits}[{o.index}].astype(np.uint{name[1:]}).view(np.{NUMPY_TYPES[name].__name__})"
        elif isinstance(o, Inverse) and o.register.bits == 1 == bits_of(type_):
            return f"logical_not(p[{o.register.index}])"
        elif isinstance(o, Immediate):
            return self.constant(immediate_bits(o.text, type_))
        elif isinstance(o, Special):
            return isa.special_register(self, o, type_)
        elif isinstance(o, Symbol):
            value = self.constant(self.symbol(o), NUMPY_TYPES[name])
            return f"({value} + g.base)" if self._ranked(o) else value
        raise UnsupportedInstructionError(f"operand {o} as {type_}")

    def symbol(self, o: Symbol) -> int:
        """Address of a variable in its own space."""
        if o.space == "dynamic":
            base = -(-(self.shared_base + self.kernel.static_shared) // self.kernel.dynamic_align) * self.kernel.dynamic_align
            return base + o.offset
        if o.space == "shared":
            return self.shared_base + o.offset
        if o.space in ("label", "function"):
            raise UnsupportedInstructionError(f"the address of {o.name.split('#')[0]!r}")
        return o.offset

    def _ranked(self, o: Operand) -> bool:
        """Whether it is an address that has the rank of the CTA in its upper byte."""
        return self.clustered and isinstance(o, Symbol) and o.space in ("shared", "dynamic")

    def address(self, o: Operand, bits: int = 64) -> str:
        """The address inside brackets, as unsigned integers."""
        assert isinstance(o, Address), o
        if not isinstance(o.base, Register):
            base = self.symbol(o.base) if isinstance(o.base, Symbol) else integer(o.base.text)
            value = self.constant(base + o.offset, f"uint{bits}")
            return f"({value} + g.base)" if self._ranked(o.base) else value
        value = f"u{o.base.bits}[{o.base.index}]"
        if o.offset:
            value = f"({value} + {self.constant(o.offset % 2**o.base.bits, f'uint{o.base.bits}')})"
        return value if o.base.bits == bits else f"{value}.astype(np.uint{bits})"

    def items(self, o: Operand) -> tuple[Operand, ...]:
        """Elements of a vector, or the operand itself."""
        return o.items if isinstance(o, Tuple) else (o,)

    def site(self, op: Op) -> None:
        """Say which instruction the next access of memory belongs to."""
        if self.sites is not None and op.name in SITE_NAMES:
            self.line(f"g.site = {self.sites.number(op)}")

    def observe(self, op: Op, position: int, block: int) -> str:
        """Tell the observer of an instruction before it is executed, or give the call that tells what it loaded."""
        if not (self.observed and observed(op)):
            return ""
        place = "(g.cta.index, g.first, g.warps)"
        call = f"{self.helper(tell)}(g.cta.launch, {place}, {(block, position)}, {values_of(self, op)}, {self.masked})"
        if looks(op):
            return call
        self.line(call)
        return ""

    def check_loads(self, op: Op) -> None:
        """Whoever reads what a tcgen05.ld brings waits for it."""
        if self.sites is None:
            return
        written = self.sites.loads.intersection(op.written)
        read = self.sites.loads.intersection(op.read)
        if op.name == "mov" and read:
            rows, to = (self.fixed(sum(register_bit(r) for r in registers)) for registers in (read, written))
            self.line(f"if g.cta.hazards.tensor.loading: g.cta.hazards.tensor.moved(g, {rows}, {to})")
        elif read - self.used:
            rows = self.fixed(sum(register_bit(r) for r in read - self.used))
            self.line(f"if g.cta.hazards.tensor.loading: g.cta.hazards.tensor.used(g, {rows})")
            self.used |= read
        self.used -= written

    # Results

    def call(self, ufunc: str, o: Operand, type_: str, *arguments: str) -> None:
        """``o = ufunc(*arguments)`` in place; the result has exactly the type."""
        if isinstance(o, Sink):
            return
        assert isinstance(o, Register), o
        if o.bits != bits_of(type_):
            self.assign(o, type_, f"{ufunc}({', '.join(arguments)})")
        elif self.mask is None:
            out = "out=" if ufunc in ("minimum", "maximum") else ""  # numpy asks for the keyword there
            self.line(f"{ufunc}({', '.join(arguments)}, {out}{view_name(type_)}[{o.index}])")
        else:
            self.line(f"{ufunc}({', '.join(arguments)}, out={view_name(type_)}[{o.index}], where={self.mask})")

    def assign(self, o: Operand, type_: str, value: str) -> None:
        """``o = value``; where the register is wider than the type, signed values are extended by their sign, others by zeros."""
        if isinstance(o, Sink):
            return
        assert isinstance(o, Register), o
        where = f", where={self.mask}" if self.mask else ""
        name = view_name(type_)
        if o.bits == bits_of(type_):
            self.line(f"copyto({name}[{o.index}], {value}{where})")
        elif o.bits > bits_of(type_) > 1:
            kind = "s" if name[0] == "s" else "u"
            if name[0] == "f":
                value = f"({value}).view(np.uint{name[1:]})"
            self.line(f"copyto({kind}{o.bits}[{o.index}], {value}, casting='unsafe'{where})")
        else:
            raise UnsupportedInstructionError(f"a result of type {type_} in register {o.name} of {o.bits} bits")

    def scatter(self, o: Operand, type_: str, value: str) -> None:
        """``o = value`` where ``value`` has an element for each lane of the mask only."""
        if self.mask is None:
            self.assign(o, type_, value)
        elif isinstance(o, Register):
            kind = view_name(type_)
            if o.bits != bits_of(type_):
                value = f"{value}.view(np.uint{kind[1:]})" if kind[0] == "f" else value
                kind = ("s" if kind[0] == "s" else "u") + str(o.bits)
            self.line(f"{kind}[{o.index}][{self.mask}] = {value}")

    def count(self, space: str, size: int) -> None:
        """Account for an access of ``size`` bytes a lane."""
        if self.mask is None:
            self.bytes_per_warp[space] = self.bytes_per_warp.get(space, 0) + 32 * size
        else:
            self.line(f"g.count({space!r}, {size}, {self.mask})")

    # Blocks

    def op(self, op: Op, position: int, block: int) -> None:
        """One instruction: guard, watched registers, and what its family emits."""
        self.position = position
        self.begin(op)
        self.check(op, (block, position))
        self.check_multiplications(op)
        self.site(op)
        self.check_loads(op)
        later = self.observe(op, position, block)
        isa.emit(self, op)
        if later:
            self.line(later)
        for register in op.written:
            row = self.watch.rows.get(register)
            if row is not None:
                where = f", where={self.mask}" if self.mask else ""
                state = "True"
                if is_copy(op) and op.read[-1] in self.watch.rows:
                    state = f"D[{self.watch.rows[op.read[-1]]}]"
                self.line(f"copyto(D[{row}], {state}{where})")

    def check_multiplications(self, op: Op) -> None:
        """What wgmma instructions on their way use may not be touched, except by other wgmma instructions, which run in order."""
        if not self.watch.results:
            return
        if op.name == "wgmma":
            self.tell_touched()
            return
        read = self.watch.results.intersection(op.read)
        written = (self.watch.results | self.watch.factors).intersection(op.written)
        if read or written:
            rows = (_rows(self, registers) for registers in (read, written))
            self.line(f"if {self.pending()}.busy: pending.check(g, {', '.join(rows)}, {self.masked})")
            if self.sites is not None:
                self.touched[0].update(read)
                self.touched[1].update(written)
                if op.guard is not None:
                    self.tell_touched()

    def pending(self) -> str:
        """The multiplications of the CTA, by a name that is assigned once a block."""
        if "pending" not in self.namespace:
            self.namespace["pending"] = None
            self.line(f"pending = g.cta.unit({self.helper(Multiplications)})")
        return "pending"

    def tell_touched(self) -> None:
        """Registers that were read and written since this was last told: a wgmma that uses them needs a wgmma.fence first."""
        if any(self.touched):
            self.line(f"{self.pending()}.touch(g, {_rows(self, self.touched[0])}, {_rows(self, self.touched[1])}, {self.masked})")
            for registers in self.touched:
                registers.clear()

    def check(self, op: Op, where: tuple[int, int]) -> None:
        """Watched registers that the op reads: the guard in all lanes, others in those where the guard holds."""
        for register in self.watch.reads.get(where, ()):
            is_guard = op.guard is not None and register == op.guard[0]
            if is_guard or not is_copy(op):
                mask = (self.base_mask or "None") if is_guard else self.masked
                self.line(f"g.check_defined({self.watch.rows[register]}, {register.name!r}, {mask})")

    def begin(self, op: Op) -> None:
        """Set the mask for an instruction."""
        self.mask = self.base_mask
        if op.guard is not None:
            register, negated = op.guard
            value = f"p[{register.index}]"
            value = f"logical_not({value})" if negated else value
            self.mask = self.temporary(f"logical_and({value}, {self.base_mask})" if self.base_mask else value)
            if not negated and self.base_mask is None and register in op.written:  # it overwrites its own guard
                self.line(f"{self.mask} = {self.mask}.copy()")

    def finish(self, name: str) -> Compiled:
        """Compile what was written."""
        text = "\n".join(self.lines)
        indexed = set(_INDEXED.findall(text))
        prologue = [f"    {view} = g.{view}" for view in (*_VIEWS, *_BANKS) if view in indexed]
        source = "\n".join(["def run(g, m):", *prologue, text or "    pass"])
        exec(compile(source, f"<vgpu {name}>", "exec"), self.namespace)
        positions = [-1] * (1 + len(prologue)) + self.positions
        return Compiled(self.namespace["run"], source, positions, self.bytes_per_warp)


def _rows(e: Emitter, registers: set[Register] | frozenset[Register]) -> str:
    """The rows of some registers, as an array."""
    return e.fixed(np.array(sorted(r.index for r in registers), int))


def sources(e: Emitter, operands: Sequence[Operand], type_: str) -> list[str]:
    """``Emitter.source`` of several operands."""
    return [e.source(o, type_) for o in operands]
