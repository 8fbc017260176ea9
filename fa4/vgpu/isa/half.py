"""Arithmetic of float16 and bfloat16, alone and in pairs (PTX ISA 9.7.4 and 9.7.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu import numerics
from fa4.vgpu.isa.registry import Mods, instruction
from fa4.vgpu.program import Op

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]


def halves(bits: Array, type_: str, n: int) -> Array:
    """Registers as float32: one value a register, or two (low half first)."""
    bits = np.ascontiguousarray(np.broadcast_to(bits, n)).view(np.uint16)
    return numerics.from_bf16(bits) if type_.startswith("bf16") else bits.view(np.float16).astype(np.float32)


def to_bits(x: Array, type_: str) -> Array:
    """float32, or float64 rounded to odd, to registers of ``type_``."""
    if type_.startswith("bf16"):
        bits = numerics.to_bf16(numerics.odd32(x) if x.dtype == np.float64 else x)
    else:
        bits = numerics.to_f16(x).view(np.uint16)
        bits = np.where(np.isnan(x), np.uint16(0x7FFF), bits)
    return bits.view(np.uint32) if type_.endswith("x2") else bits


def flush_half(x: Array) -> Array:
    """Subnormal float16 to zero (values as float32)."""
    return np.asarray(np.where(np.abs(x) < np.float32(2.0**-14), np.copysign(np.float32(0), x), x))


def half_operation(name: str, type_: str, options: tuple[str, ...], n: int, *registers: Array) -> Array:
    """One operation on registers of ``type_``, rounded once, as bits."""
    x = [halves(r, type_, n) for r in registers]
    if "ftz" in options:
        x = [flush_half(v) for v in x]
    nan = "NaN" in options
    if name == "fma":
        y = numerics.odd_sum(x[0].astype(np.float64) * x[1], x[2].astype(np.float64))
    elif name in ("min", "max"):
        y = numerics.minmax(x[0], x[1], nan, name == "max")
        if len(x) == 3:
            y = numerics.minmax(y, x[2], nan, name == "max")
    elif name == "ex2":
        y = np.exp2(x[0].astype(np.float64)).astype(np.float32)
    elif name == "tanh":
        y = np.tanh(x[0].astype(np.float64)).astype(np.float32)
    else:
        # float32 has more than twice the bits: rounding its rounded result once more gives the result rounded once.
        y = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name](x[0], x[1])
    if "ftz" in options and not type_.startswith("bf16"):
        y = flush_half(numerics.to_f16(y).astype(np.float32))
    if "sat" in options:
        y = numerics.saturate(y)
    if "relu" in options:
        y = np.where(np.isnan(y), y, np.maximum(y, y.dtype.type(0)))
    return to_bits(y, type_)


def sign_bits(type_: str) -> int:
    """Mask of the sign bits."""
    return 0x80008000 if type_.endswith("x2") else 0x8000


@instruction("add", "sub", "mul", "fma", kind="half", section="9.7.4.1 to 9.7.4.4", forms="f16 f16x2 bf16 bf16x2, rn, ftz, sat, relu (fma)")
@instruction("min", "max", kind="half", section="9.7.4.7, 9.7.4.8", forms="f16 f16x2 bf16 bf16x2, ftz, NaN, three inputs")
@instruction("ex2", "tanh", kind="half", section="9.7.4.9, 9.7.4.10", forms="approx of f16 f16x2 bf16 bf16x2, ftz")
def _half(e: Emitter, op: Op, mods: Mods) -> None:
    type_ = mods.type("f16", "f16x2", "bf16", "bf16x2")
    options = tuple(
        o for o in (mods.take("rn"), mods.take("approx"), mods.take("ftz"), mods.take("sat"), mods.take("relu"), mods.take("NaN")) if o
    )
    if ("approx" in options) != (op.name in ("ex2", "tanh")) or ("NaN" in options and op.name not in ("min", "max")):
        raise mods.unsupported()
    bits = "b32" if type_.endswith("x2") else "b16"
    values = ", ".join(e.source(o, bits) for o in op.operands[1:])
    e.assign(op.operands[0], bits, f"{e.helper(half_operation)}({op.name!r}, {type_!r}, {options}, g.n, {values})")


@instruction("abs", "neg", kind="half", section="9.7.4.5, 9.7.4.6", forms="f16 f16x2 bf16 bf16x2")
def _sign(e: Emitter, op: Op, mods: Mods) -> None:
    type_ = mods.type("f16", "f16x2", "bf16", "bf16x2")
    bits = "b32" if type_.endswith("x2") else "b16"
    mask = sign_bits(type_)
    a = e.source(op.operands[1], bits)
    if op.name == "neg":
        e.call("bitwise_xor", op.operands[0], bits, a, e.constant(mask, "uint" + bits[1:]))
    else:
        e.call("bitwise_and", op.operands[0], bits, a, e.constant(mask ^ (2 ** int(bits[1:]) - 1), "uint" + bits[1:]))
