"""Loads and stores (PTX ISA 9.7.9.8 to 9.7.9.18)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.isa.registry import Mods, instruction
from fa4.vgpu.memory import spread
from fa4.vgpu.program import Op, Symbol

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]

SPACES = ("global", "shared::cta", "shared::cluster", "shared", "local", "param::entry", "param", "const")
_HINTS = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified", "volatile", "relaxed", "acquire", "release", "weak", "mmio")
_POLLS = frozenset(("volatile", "relaxed", "acquire", "mmio"))
_SCOPES = ("cta", "cluster", "gpu", "sys")


def access(mods: Mods) -> tuple[str, str, int]:
    """(space, element type, vector length) of a load, store or atomic; cache hints change nothing here."""
    space = {"shared::cta": "shared", "param::entry": "param", "": "generic"}.get(name := mods.take(*SPACES), name)
    vector = {"v2": 2, "v4": 4, "v8": 8, "": 1}[mods.take("v2", "v4", "v8")]
    mods.ignore("L1::", "L2::")
    mods.left = [m for m in mods.left if m not in _HINTS and m not in _SCOPES]
    return space, mods.type(), vector


def element(type_: str) -> str:
    """Numpy's name of what is moved."""
    return f"{'i' if type_[0] == 's' else 'u'}{int(type_[1:]) // 8}"


def address_bits(space: str) -> int:
    """Shared and similar addresses fit 32 bits."""
    return 64 if space in ("global", "generic") else 32


@instruction("ld", "ldu", section="9.7.9.8 to 9.7.9.10", forms="every space and width, v2 v4 v8; cache hints, volatile, acquire")
def _load(e: Emitter, op: Op, mods: Mods) -> None:
    d, a = op.operands[:2]
    polls = not _POLLS.isdisjoint(mods.left)
    space, type_, vector = access(mods)
    if polls and space in ("global", "generic"):
        e.line("g.look()")
    address = e.address(a, address_bits(space))
    e.count(space, int(type_[1:]) // 8 * vector)
    loaded = e.temporary(f"g.load({space!r}, {address}, {element(type_)!r}, {vector}, {e.masked})")
    whole = _uniform(a, space)
    kind = ("s" if type_[0] == "s" else "u") + type_[1:]
    for i, item in enumerate(e.items(d)):
        value = loaded if vector == 1 else f"{loaded}[:, {i}]"
        if whole:
            e.assign(item, kind, value)
        else:
            e.scatter(item, kind, value)


def _uniform(a: Any, space: str) -> bool:
    """One address for all lanes: the loaded value has one element, whatever the mask."""
    return isinstance(a.base, Symbol) and space in ("param", "const", "shared")


@instruction(
    "st", section="9.7.9.11", forms="global shared shared::cluster local generic, every width, v2 v4 v8; cache hints, volatile, release"
)
def _store(e: Emitter, op: Op, mods: Mods) -> None:
    a, value = op.operands[:2]
    space, type_, vector = access(mods)
    if space in ("param", "const"):
        raise mods.unsupported(f"a store to {space} memory")
    e.count(space, int(type_[1:]) // 8 * vector)
    kind = ("s" if type_[0] == "s" else "u") + type_[1:]
    values = ", ".join(e.source(item, kind) for item in e.items(value))
    e.helper(stack_lanes)
    data = f"stack_lanes(g.n, {values})"
    e.line(f"g.store({space!r}, {e.address(a, address_bits(space))}, {data}, {element(type_)!r}, {vector}, {e.masked})")


def stack_lanes(n: int, *values: Array) -> Array:
    """Registers as (lanes,) or (lanes, vector)."""
    if len(values) == 1:
        return spread(values[0], n)
    return np.stack([spread(v, n) for v in values], axis=1)


@instruction("prefetch", "prefetchu", "discard", "applypriority", section="9.7.9.15, 9.7.9.16", forms="no effect")
def _prefetch(e: Emitter, op: Op, mods: Mods) -> None:
    mods.ignore("")


@instruction("createpolicy", section="9.7.9.18", forms="no effect: a cache policy is 0")
def _policy(e: Emitter, op: Op, mods: Mods) -> None:
    mods.ignore("")
    e.assign(op.operands[0], "b64", e.constant(0, "uint64"))
