"""Atomic operations (PTX ISA 9.7.13.4 to 9.7.13.7): lane after lane, in an order that depends on nothing but the lane number."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu import numerics
from fa4.vgpu.isa.half import half_operation
from fa4.vgpu.isa.loadstore import access, address_bits, stack_lanes
from fa4.vgpu.isa.registry import Mods, instruction
from fa4.vgpu.program import Op

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter
    from fa4.vgpu.sums import Sums

Array = npt.NDArray[Any]

_HALF = ("f16", "f16x2", "bf16", "bf16x2")


def _wrap_increment(old: Any, limit: Any) -> Any:
    return old.dtype.type(0) if old >= limit else old + old.dtype.type(1)


def _wrap_decrement(old: Any, limit: Any) -> Any:
    return limit if old == 0 or old > limit else old - old.dtype.type(1)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda old, b: old + b,
    "and": lambda old, b: old & b,
    "or": lambda old, b: old | b,
    "xor": lambda old, b: old ^ b,
    "min": min,
    "max": max,
    "exch": lambda old, b: b,
    "inc": _wrap_increment,
    "dec": _wrap_decrement,
    "cas": lambda old, b, c: c if old == b else old,
}


def _size(type_: str) -> int:
    """Bytes of an element."""
    return 2 if type_ in ("f16", "bf16") else 4 if type_ in _HALF else int(type_[1:]) // 8


def atomic_update(g: Any, where: tuple[str, str, str, int], address: Array, values: tuple[Array, ...], mask: Array | None) -> Array:
    """Do ``old = [a]; [a] = operation(old, ...)`` for each lane in turn; the old values, one for each active lane.

    ``where`` is (space, operation, type, vector length).
    """
    space, name, type_, vector = where
    dtype = ("f" if type_ in ("f32", "f64") else "i" if type_[0] == "s" else "u") + str(_size(type_))
    active = np.arange(g.n) if mask is None else np.flatnonzero(mask)
    address = np.broadcast_to(address, g.n)
    old = np.zeros((len(active), vector) if vector > 1 else len(active), dtype)
    one = np.zeros(g.n, bool)
    for i, lane in enumerate(active):
        one[lane] = True
        before = g.load(space, address, dtype, vector, one)
        operands = [v[lane : lane + 1] for v in values]
        if type_ in _HALF:
            after = half_operation(name, type_, (), before.size, before.reshape(-1), operands[0].reshape(-1)).reshape(before.shape)
        elif vector > 1 or (dtype[0] == "f" and name == "add"):
            after = before + operands[0]
            if type_ == "f32" and not space.startswith("shared"):  # global float32 additions flush subnormals (9.7.13.6)
                after = numerics.flush(after)
        else:
            with np.errstate(all="ignore"):
                after = np.array([_OPERATIONS[name](before[0], *(v[0] for v in operands))], dtype)
        g.store(space, address, np.broadcast_to(after, (g.n, *after.shape[1:])), dtype, vector, one)
        old[i] = before[0]
        one[lane] = False
        sums = g.cta.launch.sums
        if sums is not None and dtype[0] == "f" and name == "add" and not space.startswith("shared"):
            _note(sums, g, int(address[lane]), operands[0])
    return old


def _note(sums: Sums, g: Any, address: int, value: Array) -> None:
    """Remember an addition to global memory; a generic address may lie elsewhere."""
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    buffer = g.memory.find(address, data.size)
    if buffer is not None:
        sums.note(g.cta.index, buffer, address, data)


_FORMS = (
    "add and or xor min max inc dec exch cas; b u s of 32 64, f32 f64, f16x2 bf16x2 f16 bf16 with noftz; global shared(::cluster) generic"
)


@instruction("atom", "red", section="9.7.13.5 to 9.7.13.7", forms=_FORMS)
def _atomic(e: Emitter, op: Op, mods: Mods) -> None:
    space, type_, vector = access(mods)
    mods.take("noftz")
    name = mods.take(*_OPERATIONS)
    operands = op.operands if op.name == "red" else op.operands[1:]
    if not name or space not in ("global", "shared", "shared::cluster", "generic"):
        raise mods.unsupported()
    if ((type_ in _HALF or type_ in ("f32", "f64")) and name not in ("add", "min", "max")) or (type_ in ("f32", "f64") and name != "add"):
        raise mods.unsupported()
    kind = {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}.get(type_, type_)
    e.helper(stack_lanes)
    values = "".join(
        f"stack_lanes(g.n, {', '.join(e.source(item, kind) for item in e.items(o))}), " for o in operands[1:][: 2 if name == "cas" else 1]
    )
    e.count(space, 2 * _size(type_) * vector)
    where = (space, name, type_, vector)
    call = f"{e.helper(atomic_update)}(g, {where}, {e.address(operands[0], address_bits(space))}, ({values}), {e.masked})"
    if op.name == "red":
        e.line(call)
        return
    old = e.temporary(call)
    bits = kind if kind[0] in "bus" else "b" + kind[1:]
    for i, item in enumerate(e.items(op.operands[0])):
        value = f"{old}[:, {i}]" if vector > 1 else old
        e.scatter(item, bits, f"{value}.view(np.{'int' if bits[0] == 's' else 'uint'}{bits[1:]})" if vector == 1 else value)
