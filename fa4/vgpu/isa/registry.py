"""Who emits which instruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from fa4.vgpu.errors import UnsupportedInstructionError
from fa4.vgpu.program import Op

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

_WORDS = {"f32", "f32x2", "b32", "u32", "s32", "pred", "b64", "u64", "s64", "f64"}

EmitFunction = Callable[["Emitter", Op, "Mods"], None]

_TYPES = {
    *(f"{kind}{bits}" for kind in "bus" for bits in (8, 16, 32, 64)),
    *("f16", "f32", "f64", "bf16", "f16x2", "bf16x2", "tf32", "pred", "b1", "u4", "s4", "e4m3", "e5m2", "e4m3x2", "e5m2x2", "b128"),
    *("u16x2", "s16x2", "f32x2", "e2m3x2", "e3m2x2", "e2m1x2", "ue8m0x2"),
}


class Mods:
    """The modifiers of one instruction; whatever is left when its emitter is done is a form that is not modelled."""

    def __init__(self, op: Op, skip: int = 0) -> None:
        self.op = op
        self.left = list(op.mods[skip:])
        self.types = [m for m in self.left if m in _TYPES]
        self.left = [m for m in self.left if m not in _TYPES]

    def take(self, *names: str) -> str:
        """The first of ``names`` that is present, removed; else an empty string."""
        for name in names:
            if name in self.left:
                self.left.remove(name)
                return name
        return ""

    def ignore(self, *prefixes: str) -> None:
        """Remove hints, by how they begin."""
        self.left = [m for m in self.left if not m.startswith(prefixes)]

    def type(self, *allowed: str) -> str:
        """The one type, which must be among ``allowed`` where any are given."""
        if len(self.types) != 1 or (allowed and self.types[0] not in allowed):
            raise self.unsupported()
        return self.types[0]

    def done(self) -> None:
        """Check that every modifier was understood."""
        if self.left:
            raise self.unsupported(f"modifier {'.' + self.left[0]}")

    def unsupported(self, what: str = "") -> UnsupportedInstructionError:
        """The error for a form that is not modelled."""
        return UnsupportedInstructionError(f"unsupported form {self.op.opcode}{': ' if what else ''}{what}")


@dataclass(frozen=True)
class Form:
    """One instruction: its section of the PTX ISA (numbers of version 8.8), the forms that are modelled, and the emitter.

    ``lanewise``: with operands of 32 bits its code works on arrays of any shape; a set: with these modifiers only.
    """

    name: str
    section: str
    forms: str
    emit: EmitFunction
    lanewise: bool | frozenset[str] = False


FORMS: dict[str, Form] = {}
ENDINGS: dict[str, Form] = {}


def kind_of(types: list[str]) -> str:
    """Which family a type belongs to: int, float, half, pred or packed, decided by the first type of an instruction."""
    first = types[0] if types else ""
    if first == "pred":
        return "pred"
    if first in ("f16", "bf16", "f16x2", "bf16x2"):
        return "half"
    if first in ("f32", "f64"):
        return "float"
    return "packed" if first == "f32x2" else "int"


def instruction(
    *names: str, section: str, forms: str = "", kind: str = "", lanewise: bool | frozenset[str] = False
) -> Callable[[EmitFunction], EmitFunction]:
    """Register an emitter for instructions inside a block; ``kind`` where families share a name (``kind_of``); ``lanewise``: see ``Form``.

    A name may have up to four modifiers ("tcgen05.ld"), which the emitter then does not see; the longest that fits is chosen.
    """

    def register(function: EmitFunction) -> EmitFunction:
        for name in names:
            key = f"{name}:{kind}" if kind else name
            assert key not in FORMS, key
            FORMS[key] = Form(name, section, forms, function, lanewise)
        return function

    return register


def ending(*names: str, section: str, forms: str = "") -> Callable[[EmitFunction], EmitFunction]:
    """Register an emitter for instructions that end a block (``program.ENDS``); names as for ``instruction``.

    Jumps return from the block where they go. Anything else just acts; the warps go on behind it, unless it parked them.
    """

    def register(function: EmitFunction) -> EmitFunction:
        for name in names:
            ENDINGS[name] = Form(name, section, forms, function)
        return function

    return register


@lru_cache(maxsize=4096)
def lanewise(name: str, mods: tuple[str, ...]) -> bool:
    """Whether the code of an instruction on registers of 32 bits works on arrays of any shape, see ``Form``."""
    form = FORMS.get(form_key(".".join((name, *mods)), FORMS)[0])
    if form is None:
        return False
    if isinstance(form.lanewise, frozenset):
        return ".".join(mods) in form.lanewise
    return form.lanewise and {m for m in mods if m in _TYPES} <= _WORDS


def emit(e: Emitter, op: Op) -> None:
    """Write the code of an instruction.

    Raises:
        UnsupportedInstructionError: it is not modelled in this form.
    """
    _emit(e, op, FORMS)


def emit_end(e: Emitter, op: Op) -> None:
    """Write the code of an instruction that ends a block.

    Raises:
        UnsupportedInstructionError: it is not modelled in this form.
    """
    _emit(e, op, ENDINGS)


def form_key(opcode: str, forms: dict[str, Form]) -> tuple[str, int]:
    """The key of an opcode's form, and how many of its modifiers the key has; an empty key where there is none."""
    name, *mods = opcode.split(".")
    for words in range(min(len(mods), 4), 0, -1):
        key = ".".join((name, *mods[:words]))
        if key in forms:
            return key, words
    key = f"{name}:{kind_of([m for m in mods if m in _TYPES])}"
    return key if key in forms else name if name in forms else "", 0


def _emit(e: Emitter, op: Op, forms: dict[str, Form]) -> None:
    key, words = form_key(op.opcode, forms)
    if not key:
        raise UnsupportedInstructionError(f"unknown instruction {op.opcode}")
    mods = Mods(op, words)
    forms[key].emit(e, op, mods)
    mods.done()
