"""What an observer is told: launches, block entries, and the instructions that synchronise or move memory, with their operands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from fa4.vgpu import isa
from fa4.vgpu.program import Address, Immediate, Inverse, Op, Operand, Register, Special, Symbol

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter
    from fa4.vgpu.machine import Launch
    from fa4.vgpu.program import Program

Array = npt.NDArray[Any]
Values = tuple[Array | None, ...]

_FAMILIES = ("mbarrier", "bar", "barrier", "tcgen05", "wgmma", "cp", "fence", "ldmatrix", "stmatrix", "setmaxnreg", "clusterlaunchcontrol")
_MEMORY = ("ld", "st", "atom", "red")
_UNSHARED = ("local", "param", "param::entry", "const")
_ORDERED = frozenset(("acquire", "relaxed", "volatile", "mmio"))


class Observer(Protocol):
    """Told what happens, in program order for each warp. One with a true attribute ``blocks_only`` is not told of events."""

    def launch(self, launch: Launch, program: Program) -> None:
        """A kernel begins."""

    def block(self, cta: int, warp: int, block: int, lanes: int) -> None:
        """A warp begins a basic block with so many lanes."""

    def event(self, cta: int, warp: int, op: int, lanes: int, values: Values) -> None:
        """A warp executes an instruction that synchronises or moves memory; ``op`` is its number in ``Kernel.ops``.

        ``values`` has an entry for each operand: what ``lanes`` lanes give (one element for a constant), for an address what it
        evaluates to, None for vectors, results and what stands behind an address in its brackets. Of a load of global memory that
        others may write meanwhile (acquire, relaxed, volatile) the first entry is what was loaded.
        """


def observed(op: Op) -> bool:
    """Whether observers are told of an instruction."""
    if op.name in _FAMILIES:
        return op.mods[:1] != ("warp",)
    return op.name in _MEMORY and not set(_UNSHARED) & set(op.mods)


def looks(op: Op) -> bool:
    """Whether it loads from memory that others may write at the same time, so that what it found says whether a loop goes on."""
    return op.name == "ld" and not _ORDERED.isdisjoint(op.mods) and not any(m.startswith("shared") for m in op.mods)


def values_of(e: Emitter, op: Op) -> str:
    """Expressions of all operands as a tuple; addresses that the instruction may overwrite are evaluated now."""
    wide = not any(m.startswith("shared") for m in op.mods) or op.name == "cp"
    parts = [_value(e, operand, wide) for operand in op.operands]
    if looks(op):
        address = e.temporary(f"{parts[1]}.copy()")
        parts = [_value(e, op.operands[0], wide), address]
    return f"({', '.join(parts)},)" if parts else "()"


def _value(e: Emitter, o: Operand, wide: bool) -> str:
    if isinstance(o, Address):
        base = o.base
        bits = base.bits if isinstance(base, Register) else 64 if wide and isinstance(base, Symbol) and base.space == "param" else 32
        return e.address(o, bits)
    if isinstance(o, Register):
        return f"p[{o.index}]" if o.bits == 1 else f"u{o.bits}[{o.index}]"
    if isinstance(o, Inverse):
        return f"logical_not(p[{o.register.index}])"
    if isinstance(o, Immediate):
        return "None" if o.is_float else e.source(o, "b64")
    if isinstance(o, Symbol) and o.space in ("shared", "dynamic"):
        return e.source(o, "b32")
    if isinstance(o, Special):
        return isa.special_register(e, o, "u32")
    return "None"


def tell(launch: Launch, place: tuple[int, int, int], at: tuple[int, int], values: Values, mask: Array | None) -> None:
    """Tell the observer what the warps of a gang do; ``place`` is (CTA, first warp, number of warps), ``at`` (block, position in it)."""
    observer = launch.observer
    if observer is None:
        return
    op = launch.kernel.starts[at[0]] + at[1]
    cta, first, warps = place
    for i in range(warps):
        here = slice(32 * i, 32 * i + 32)
        if mask is None:
            count, part = 32, tuple(v if v is None or v.size == 1 else v[here] for v in values)
        else:
            lanes = np.flatnonzero(mask[here])
            count = len(lanes)
            if not count:
                continue
            part = tuple(v if v is None or v.size == 1 else v[here][lanes] for v in values)
        observer.event(cta, first + i, op, count, part)
