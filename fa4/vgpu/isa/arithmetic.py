"""Integer arithmetic (PTX ISA 9.7.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.isa.registry import Mods, instruction
from fa4.vgpu.program import Op

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]


def wider(type_: str) -> str:
    """The type of twice the width."""
    return f"{type_[0]}{2 * int(type_[1:])}"


def numpy_name(type_: str) -> str:
    """``s32`` is ``np.int32``."""
    return f"np.{'int' if type_[0] == 's' else 'uint'}{type_[1:]}"


def multiply_high(a: Array, b: Array) -> Array:
    """Upper half of the product; a and b of one integer type."""
    if a.dtype.itemsize < 8:
        wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
        product = a.astype(wide) * b.astype(wide)
        return np.asarray((product >> wide.type(8 * a.dtype.itemsize)).astype(a.dtype))
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.astype(np.uint64), b.astype(np.uint64)
    x0, x1, y0, y1 = x & low, x >> shift, y & low, y >> shift
    middle = x1 * y0 + (x0 * y0 >> shift)
    high = x1 * y1 + (middle >> shift) + ((x0 * y1 + (middle & low)) >> shift)
    if a.dtype.kind == "i":  # two's complement: subtract what the sign bits added
        high = high - np.where(a < 0, y, 0).astype(np.uint64) - np.where(b < 0, x, 0).astype(np.uint64)
    return np.asarray(high.astype(a.dtype))


def divide(a: Array, b: Array) -> Array:
    """Quotient rounded towards zero; all ones where b is 0 (the ISA leaves that open)."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = (a - np.fmod(a, safe)) // safe
    return np.asarray(np.where(b == 0, ~np.zeros_like(quotient), quotient))


def remainder(a: Array, b: Array) -> Array:
    """Remainder with the sign of a; a itself where b is 0 (the ISA leaves that open)."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    return np.asarray(np.where(b == 0, a, np.fmod(a, safe)))


def saturated(a: Array, b: Array, operation: str) -> Array:
    """A + b or a - b of s32, clamped to its range."""
    wide = a.astype(np.int64) + b if operation == "add" else a.astype(np.int64) - b
    return wide.clip(-(2**31), 2**31 - 1).astype(np.int32)


def dot_product(a: Array, b: Array, c: Array, signed: tuple[bool, bool], second: int) -> Array:
    """Sum of c and products of the bytes of a and b (``second`` 0), or of 16-bit halves of a and the low (1) or high (2) bytes of b."""
    y = b.view(np.int8 if signed[1] else np.uint8).reshape(-1, 4).astype(np.int64)
    if second:
        x = a.view(np.int16 if signed[0] else np.uint16).reshape(-1, 2).astype(np.int64)
        y = y[:, :2] if second == 1 else y[:, 2:]
    else:
        x = a.view(np.int8 if signed[0] else np.uint8).reshape(-1, 4).astype(np.int64)
    return np.asarray(((x * y).sum(1) + c).astype(np.uint64).astype(np.uint32))


@instruction("add", "sub", kind="int", section="9.7.1.1, 9.7.1.2", forms="u16 s16 u32 s32 u64 s64, sat.s32, u16x2 s16x2", lanewise=True)
def _add(e: Emitter, op: Op, mods: Mods) -> None:
    d, a, b = op.operands
    type_ = mods.type("u16", "s16", "u32", "s32", "u64", "s64", "u16x2", "s16x2")
    name = {"add": "add", "sub": "subtract"}[op.name]
    if type_.endswith("x2"):
        pair = [f"np.ascontiguousarray(np.broadcast_to({e.source(o, type_)}, g.n)).view(np.uint16)" for o in (a, b)]
        e.assign(d, type_, f"{name}({pair[0]}, {pair[1]}).view(np.uint32)")
    elif mods.take("sat"):
        if type_ != "s32":
            raise mods.unsupported("sat needs s32")
        e.assign(d, type_, f"{e.helper(saturated)}({e.source(a, type_)}, {e.source(b, type_)}, {op.name!r})")
    else:
        e.call(name, d, type_, e.source(a, type_), e.source(b, type_))


@instruction(
    "mul", "mad", kind="int", section="9.7.1.3, 9.7.1.4", forms="lo hi wide; u16 s16 u32 s32 u64 s64; mad.hi.sat.s32", lanewise=True
)
def _multiply(e: Emitter, op: Op, mods: Mods) -> None:
    d, a, b, *c = op.operands
    type_ = mods.type("u16", "s16", "u32", "s32", "u64", "s64")
    x, y = e.source(a, type_), e.source(b, type_)
    which = mods.take("lo", "hi", "wide")
    saturate = mods.take("sat")
    result = type_
    if which == "wide":
        result = wider(type_)
        x, y = f"{x}.astype({numpy_name(result)})", f"{y}.astype({numpy_name(result)})"
    elif which == "hi":
        product = f"{e.helper(multiply_high)}({x}, {y})"
    elif which != "lo":
        raise mods.unsupported("lo, hi or wide is missing")
    if which != "hi":
        if not c:
            e.call("multiply", d, result, x, y)
            return
        product = f"multiply({x}, {y})"
    if saturate:
        if which != "hi" or type_ != "s32" or not c:
            raise mods.unsupported("sat needs mad.hi.s32")
        e.assign(d, result, f"{e.helper(saturated)}({product}, {e.source(c[0], result)}, 'add')")
    elif c:
        e.call("add", d, result, product, e.source(c[0], result))
    else:
        e.assign(d, result, product)


@instruction("mul24", "mad24", section="9.7.1.5, 9.7.1.6", forms="lo hi; u32 s32; mad24.hi.sat.s32")
def _multiply24(e: Emitter, op: Op, mods: Mods) -> None:
    """The low or high 32 bits of the 48-bit product of the low 24 bits."""
    d, a, b, *c = op.operands
    type_ = mods.type("u32", "s32")
    eight = e.constant(8, numpy_name(type_)[3:])
    x, y = (f"right_shift(left_shift({e.source(o, type_)}, {eight}), {eight}).astype({numpy_name(wider(type_))})" for o in (a, b))
    high, saturate = mods.take("hi"), mods.take("sat")
    if not high and not mods.take("lo"):
        raise mods.unsupported("lo or hi is missing")
    value = f"({x} * {y})"
    if high:
        value = f"right_shift({value}, {e.constant(16, numpy_name(wider(type_))[3:])})"
    value += f".astype({numpy_name(type_)})"
    if saturate and not (high and c and type_ == "s32"):
        raise mods.unsupported("sat needs mad24.hi.s32")
    if saturate:
        value = f"{e.helper(saturated)}({value}, {e.source(c[0], type_)}, 'add')"
    elif c:
        value = f"add({value}, {e.source(c[0], type_)})"
    e.assign(d, type_, value)


@instruction("sad", section="9.7.1.7", forms="u16 s16 u32 s32 u64 s64")
def _sad(e: Emitter, op: Op, mods: Mods) -> None:
    d, a, b, c = op.operands
    type_ = mods.type("u16", "s16", "u32", "s32", "u64", "s64")
    x, y = e.temporary(e.source(a, type_)), e.temporary(e.source(b, type_))
    e.call("add", d, type_, e.source(c, type_), f"subtract(maximum({x}, {y}), minimum({x}, {y}))")


@instruction("div", "rem", kind="int", section="9.7.1.8, 9.7.1.9", forms="u16 s16 u32 s32 u64 s64; by zero: all ones, and the dividend")
def _divide(e: Emitter, op: Op, mods: Mods) -> None:
    d, a, b = op.operands
    type_ = mods.type("u16", "s16", "u32", "s32", "u64", "s64")
    function = e.helper(divide if op.name == "div" else remainder)
    e.assign(d, type_, f"{function}({e.source(a, type_)}, {e.source(b, type_)})")


@instruction("abs", "neg", kind="int", section="9.7.1.10, 9.7.1.11", forms="s16 s32 s64", lanewise=True)
def _abs(e: Emitter, op: Op, mods: Mods) -> None:
    type_ = mods.type("s16", "s32", "s64")
    e.call("absolute" if op.name == "abs" else "negative", op.operands[0], type_, e.source(op.operands[1], type_))


@instruction(
    "min",
    "max",
    kind="int",
    section="9.7.1.12, 9.7.1.13",
    forms="u16 s16 u32 s32 u64 s64 u16x2 s16x2, relu.s32, relu.s16x2",
    lanewise=True,
)
def _minimum(e: Emitter, op: Op, mods: Mods) -> None:
    d, a, b = op.operands
    type_ = mods.type("u16", "s16", "u32", "s32", "u64", "s64", "u16x2", "s16x2")
    name = {"min": "minimum", "max": "maximum"}[op.name]
    x, y = e.source(a, type_), e.source(b, type_)
    relu = mods.take("relu")
    if relu and type_ not in ("s32", "s16x2"):
        raise mods.unsupported("relu needs s32 or s16x2")
    if type_.endswith("x2"):
        half = "int16" if type_[0] == "s" else "uint16"
        x, y = (f"np.ascontiguousarray(np.broadcast_to({v}, g.n)).view(np.{half})" for v in (x, y))
        value = f"{name}({x}, {y})"
        value = f"maximum({value}, {e.constant(0, half)})" if relu else value
        e.assign(d, type_, f"{value}.view(np.uint32)")
    elif relu:
        e.call("maximum", d, type_, f"{name}({x}, {y})", e.constant(0, "int32"))
    else:
        e.call(name, d, type_, x, y)


@instruction("dp4a", "dp2a", section="9.7.1.23, 9.7.1.24", forms="u32 s32 in both places; dp2a.lo dp2a.hi")
def _dot(e: Emitter, op: Op, mods: Mods) -> None:
    d, a, b, c = op.operands
    if len(mods.types) != 2 or not {*mods.types} <= {"u32", "s32"}:
        raise mods.unsupported("two types of 32 bits are needed")
    second = {"lo": 1, "hi": 2, "": 0}[mods.take("lo", "hi")]
    if (op.name == "dp2a") != bool(second):
        raise mods.unsupported()
    x, y = (f"np.ascontiguousarray({e.source(o, 'b32')})" for o in (a, b))
    signed = tuple(t == "s32" for t in mods.types)
    e.assign(d, "b32", f"{e.helper(dot_product)}({x}, {y}, {e.source(c, 's32' if signed[0] or signed[1] else 'u32')}, {signed}, {second})")
