"""Moves, special registers and addresses (PTX ISA 9.7.9.1 to 9.7.9.3, 9.7.9.20, 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu import memory
from fa4.vgpu.errors import UnsupportedInstructionError
from fa4.vgpu.isa.registry import Mods, instruction
from fa4.vgpu.memory import spread
from fa4.vgpu.program import Op, Register, Special, Symbol, Tuple

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]

LANE_SPECIALS = (
    *(
        f"%{name}.{axis}"
        for name in ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
        for axis in "xyz"
    ),
    *("%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid", "%dynamic_smem_size", "%total_smem_size", "%aggr_smem_size"),
    *("%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster"),
    *(f"%lanemask_{name}" for name in ("eq", "le", "lt", "ge", "gt")),
)
"""Special registers whose value does not change while a CTA runs."""

CLOCKS = ("%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")


def special_register(e: Emitter, o: Special, type_: str) -> str:
    """The value of a special register: 32 or 64 bits, zero-extended or cut to the type."""
    bits = int(type_[1:]) if type_ != "pred" else 1
    if o.name == "WARP_SZ":
        return e.constant(32, f"uint{bits}")
    if o.name in CLOCKS:
        return f"g.clock({o.name!r}, {bits})"
    if o.name == "%is_explicit_cluster" and bits == 1:
        return f"S[{o.name!r}].astype(bool)"
    if o.name not in LANE_SPECIALS:
        raise UnsupportedInstructionError(f"special register {o.name}")
    value = f"S[{o.name!r}]"
    kind = "int" if type_[0] == "s" else "uint"
    return value if bits == 32 and kind == "uint" else f"{value}.astype(np.{kind}{bits})"


def split(value: Array, parts: int, n: int) -> Array:
    """A register as ``parts`` narrower ones: row i is part i, the lowest first."""
    value = np.ascontiguousarray(spread(value, n))
    return np.asarray(value.view(f"u{value.dtype.itemsize // parts}").reshape(n, parts).T)


def join(n: int, *parts: Array) -> Array:
    """Narrow registers as one, the first lowest."""
    joined = np.empty((n, len(parts)), parts[0].dtype)
    for i, part in enumerate(parts):
        joined[:, i] = part
    return joined.view(f"u{joined.dtype.itemsize * len(parts)}").reshape(n)


@instruction(
    "mov",
    section="9.7.9.3, 9.7.9.4",
    forms="pred, b u s f of 16 32 64, b128 from and to two of b64; {..} on either side; special registers; addresses",
    lanewise=True,
)
def _mov(e: Emitter, op: Op, mods: Mods) -> None:
    d, a = op.operands
    type_ = mods.type()
    if type_ == "b128":
        if not (isinstance(d, Tuple) and isinstance(a, Tuple) and len(d.items) == len(a.items) == 2):
            raise mods.unsupported("operands")
        halves = [e.temporary(f"{e.source(item, 'b64')}.copy()") for item in a.items]
        for item, half in zip(d.items, halves, strict=True):
            e.assign(item, "b64", half)
    elif type_.endswith("64") and isinstance(d, Tuple) and isinstance(a, Register) and len(d.items) == 2:
        for item, half in zip(d.items, ("lo", "hi"), strict=True):
            e.assign(item, "u32", f"{half}[{a.index}]")
    elif type_.endswith("64") and isinstance(a, Tuple) and isinstance(d, Register) and len(a.items) == 2:
        where = f", where={e.mask}" if e.mask else ""
        for item, half in zip(a.items, ("lo", "hi"), strict=True):
            e.line(f"copyto({half}[{d.index}], {e.source(item, 'u32')}{where})")
    elif isinstance(d, Tuple):
        part = f"u{int(type_[1:]) // len(d.items)}"
        rows = e.temporary(f"{e.helper(split)}({e.source(a, 'u' + type_[1:])}, {len(d.items)}, g.n)")
        for i, item in enumerate(d.items):
            e.assign(item, part, f"{rows}[{i}]")
    elif isinstance(a, Tuple):
        part = f"u{int(type_[1:]) // len(a.items)}"
        values = ", ".join(e.source(item, part) for item in a.items)
        e.assign(d, "u" + type_[1:], f"{e.helper(join)}(g.n, {values})")
    else:
        e.assign(d, type_, e.source(a, type_))


@instruction("cvta", section="9.7.9.20", forms="to and from; shared local const param global, u32 u64")
def _cvta(e: Emitter, op: Op, mods: Mods) -> None:
    d, a = op.operands
    type_ = mods.type("u32", "u64")
    to = mods.take("to")
    space = mods.take("global", "shared::cta", "shared::cluster", "shared", "local", "const", "param::entry", "param").split("::")[0]
    if not space or (type_ == "u32" and space != "global"):
        raise mods.unsupported("generic addresses have 64 bits")
    value = e.source(a, "u64" if isinstance(a, Symbol) else type_)
    window = e.constant(memory.WINDOWS[space], "uint64")
    e.call("subtract" if to else "add", d, type_, value, window)


def in_window(g: Any, address: Array, space: str) -> Array:
    """Isspacep."""
    top = address >> np.uint64(memory.WINDOW_SHIFT)
    if space == "global":
        return np.asarray(top == 0)
    inside = top == memory.WINDOWS[space.split("::", maxsplit=1)[0]] >> memory.WINDOW_SHIFT
    if space == "shared::cta":
        inside &= (address.astype(np.uint32) ^ g.base) >> np.uint32(memory.RANK_SHIFT) == 0
    return np.asarray(inside)


@instruction("isspacep", section="9.7.9.19", forms="global shared::cta shared::cluster local const param, b64")
def _isspacep(e: Emitter, op: Op, mods: Mods) -> None:
    space = mods.take("global", "shared::cta", "shared::cluster", "shared", "local", "const", "param::entry", "param")
    space = "shared::cta" if space == "shared" else space
    e.assign(op.operands[0], "pred", f"{e.helper(in_window)}(g, {e.source(op.operands[1], 'u64')}, {space!r})")
