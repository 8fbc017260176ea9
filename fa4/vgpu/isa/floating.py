"""Arithmetic of float32 and float64 (PTX ISA 9.7.3). NaN payloads are not modelled: a NaN is a NaN."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu import numerics
from fa4.vgpu.isa.registry import Mods, instruction
from fa4.vgpu.numerics import add32, divide32, flush, fma32, minmax, multiply32, saturate, sqrt32
from fa4.vgpu.program import Op, Operand, Register

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]
ROUNDINGS = ("rn", "rz", "rm", "rp")

APPROXIMATE: dict[str, tuple[Callable[[Array], Array], float, float]] = {
    # name: exact function, relative and absolute error that the ISA states for float32
    "ex2": (np.exp2, 2.0**-22, 0.0),
    "lg2": (np.log2, 2.0**-22, 2.0**-22),
    "rcp": (np.reciprocal, 2.0**-23, 0.0),
    "sqrt": (np.sqrt, 2.0**-23, 0.0),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 2.0**-22.9, 0.0),
    "sin": (np.sin, 0.0, 2.0**-20.5),
    "cos": (np.cos, 0.0, 2.0**-20.5),
    "tanh": (np.tanh, 2.0**-11, 0.0),
}


def approximate(name: str, x: Array, seed: int) -> Array:
    """An approximate function of float32: the exact value rounded, moved within the stated error where ``seed`` is not 0."""
    function, relative, absolute = APPROXIMATE[name]
    exact = function(x.astype(np.float64))
    if seed:
        exact = numerics.deviate(exact, x.view(np.uint32), seed, relative, absolute)
        if name == "ex2":  # exact where the argument is 0; a deviation would let sums of weights exceed their count
            exact = np.where(x == 0, 1.0, exact)
    return np.asarray(exact.astype(np.float32))


def flush_positive(x: Array) -> Array:
    """``flush`` for results that are never negative; in place."""
    tiny = x < numerics.TINY32
    if np.count_nonzero(tiny):
        x[tiny] = 0
    return x


def approximate_ratio(a: Array, b: Array, seed: int, full: bool) -> Array:
    """div.approx and div.full of float32: within 2 ulp; without ``full`` a divisor beyond 2**126 gives 0 (PTX ISA 9.7.3.8)."""
    exact = a.astype(np.float64) / b
    if seed:
        exact = numerics.deviate(exact, a.view(np.uint32).astype(np.uint64) << np.uint64(32) | b.view(np.uint32), seed, 2.0**-22)
    result = exact.astype(np.float32)
    if full:
        return np.asarray(result)
    big = (np.abs(b) > 2.0**126) & np.isfinite(b)
    return np.asarray(np.where(big, np.where(np.isinf(a), np.float32(np.nan), np.copysign(np.float32(0), result)), result))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "div": operator.truediv,
    "fma": lambda a, b, c: a * b + c,
}
"""On arrays and on rationals alike."""


def operation64(name: str, mode: str, *x: Array) -> Array:
    """add, mul, fma or div of float64 in any rounding."""
    function = _OPERATIONS[name]
    native: Array = function(*x)
    if mode == "rn" and name != "fma":
        return native
    opposite = None
    if name in ("add", "fma"):
        opposite = np.broadcast_to(np.signbit(x[0] if name == "add" else x[0] * x[1]) != np.signbit(x[-1]), native.shape)
    return numerics.exact64(function, native, x, mode, opposite)


class _Float:
    """What the instructions of this family have in common: type, ftz, sat, rounding."""

    def __init__(self, e: Emitter, op: Op, mods: Mods) -> None:
        self.e, self.op = e, op
        self.type = mods.type("f32", "f64")
        self.ftz = bool(mods.take("ftz"))
        self.sat = bool(mods.take("sat"))
        self.mode = mods.take(*ROUNDINGS)
        if (self.ftz or self.sat) and self.type != "f32":
            raise mods.unsupported("ftz and sat need f32")

    def source(self, o: Operand) -> str:
        value = self.e.source(o, self.type)
        return f"{self.e.helper(flush)}({value})" if self.ftz else value

    def assign(self, value: str) -> None:
        if self.ftz:
            value = f"{self.e.helper(flush)}({value})"
        if self.sat:
            value = f"{self.e.helper(saturate)}({value})"
        self.e.assign(self.op.operands[0], self.type, value)

    def call(self, ufunc: str, *arguments: str) -> None:
        if self.ftz or self.sat:
            self.assign(f"{ufunc}({', '.join(arguments)})")
        else:
            self.e.call(ufunc, self.op.operands[0], self.type, *arguments)


@instruction(
    "add",
    "sub",
    "mul",
    kind="float",
    section="9.7.3.3 to 9.7.3.5",
    forms="f32 f64, rn rz rm rp, ftz, sat; add sub of f32.f16 f32.bf16",
    lanewise=True,
)
def _add(e: Emitter, op: Op, mods: Mods) -> None:
    if op.name != "mul" and mods.types in (["f32", "bf16"], ["f32", "f16"]):
        _mixed_add(e, op, mods)
        return
    f = _Float(e, op, mods)
    a, b = (f.source(o) for o in op.operands[1:])
    if f.mode in ("", "rn"):
        f.call(_NUMPY[op.name], a, b)
        return
    b = f"negative({b})" if op.name == "sub" else b
    name = "mul" if op.name == "mul" else "add"
    if f.type == "f64":
        f.assign(f"{e.helper(operation64)}({name!r}, {f.mode!r}, {a}, {b})")
    else:
        f.assign(f"{e.helper(multiply32 if name == 'mul' else add32)}({a}, {b}, {f.mode!r})")


@instruction("fma", "mad", kind="float", section="9.7.3.6, 9.7.3.7", forms="f32 f64, rn rz rm rp, ftz, sat", lanewise=True)
def _fma(e: Emitter, op: Op, mods: Mods) -> None:
    if mods.types == ["f32", "bf16"] or mods.types == ["f32", "f16"]:
        _mixed_fma(e, op, mods)
        return
    f = _Float(e, op, mods)
    a, b, c = (f.source(o) for o in op.operands[1:])
    if not f.mode:
        raise mods.unsupported("a rounding is needed")
    if f.type == "f64":
        f.assign(f"{e.helper(operation64)}('fma', {f.mode!r}, {a}, {b}, {c})")
    else:
        f.assign(f"{e.helper(fma32)}({a}, {b}, {c}, {f.mode!r})")


def _mixed_add(e: Emitter, op: Op, mods: Mods) -> None:
    """add.f32.bf16 and sub (9.7.5): the first term has 16 bits, the second and the sum are float32."""
    d, a, b = op.operands
    small = mods.types[1]
    mode, sat = mods.take(*ROUNDINGS) or "rn", mods.take("sat")
    x = f"{e.helper(numerics.from_bf16)}({e.source(a, 'bf16')})" if small == "bf16" else f"{e.source(a, 'f16')}.astype(np.float32)"
    y = e.source(b, "f32")
    value = f"{e.helper(add32)}({x}, {f'negative({y})' if op.name == 'sub' else y}, {mode!r})"
    e.assign(d, "f32", f"{e.helper(saturate)}({value})" if sat else value)


def _mixed_fma(e: Emitter, op: Op, mods: Mods) -> None:
    """fma.rn.f32.bf16 (9.7.5): factors of 16 bits, sum in float32."""
    d, a, b, c = op.operands
    small = mods.types[1]
    mode = mods.take(*ROUNDINGS)
    if small == "bf16":
        x, y = (f"{e.helper(numerics.from_bf16)}({e.source(o, 'bf16')})" for o in (a, b))
    else:
        x, y = (f"{e.source(o, 'f16')}.astype(np.float32)" for o in (a, b))
    e.assign(d, "f32", f"{e.helper(fma32)}({x}, {y}, {e.source(c, 'f32')}, {mode!r})")


@instruction("div", kind="float", section="9.7.3.8", forms="approx.f32, full.f32, rn rz rm rp of f32 f64, ftz", lanewise=True)
def _div(e: Emitter, op: Op, mods: Mods) -> None:
    f = _Float(e, op, mods)
    a, b = (f.source(o) for o in op.operands[1:])
    loose = mods.take("approx", "full")
    if loose:
        if f.type != "f32":
            raise mods.unsupported()
        f.assign(f"{e.helper(approximate_ratio)}({a}, {b}, g.approx_seed, {loose == 'full'})")
    elif f.type == "f64":
        f.assign(f"{e.helper(operation64)}('div', {f.mode or 'rn'!r}, {a}, {b})")
    else:
        f.assign(f"{e.helper(divide32)}({a}, {b}, {f.mode or 'rn'!r})")


@instruction("abs", "neg", kind="float", section="9.7.3.9, 9.7.3.10", forms="f32 f64, ftz", lanewise=True)
def _abs(e: Emitter, op: Op, mods: Mods) -> None:
    f = _Float(e, op, mods)
    f.call("absolute" if op.name == "abs" else "negative", f.source(op.operands[1]))


@instruction(
    "min",
    "max",
    kind="float",
    section="9.7.3.11, 9.7.3.12",
    forms="f32 f64, ftz, NaN, xorsign.abs, three inputs of f32",
    lanewise=True,
)
def _minimum(e: Emitter, op: Op, mods: Mods) -> None:
    f = _Float(e, op, mods)
    nan, xorsign, magnitude = bool(mods.take("NaN")), mods.take("xorsign"), mods.take("abs")
    arguments = [f.source(o) for o in op.operands[1:]]
    if (xorsign and (not magnitude or len(arguments) != 2)) or (len(arguments) == 3 and f.type != "f32"):
        raise mods.unsupported()
    if magnitude:
        arguments = [e.temporary(a) for a in arguments]
    inputs = [f"absolute({a})" for a in arguments] if magnitude else arguments
    options = f"{nan}, {op.name == 'max'}"
    value = f"{e.helper(minmax)}({inputs[0]}, {inputs[1]}, {options})"
    if len(inputs) == 3:
        value = f"minmax({value}, {inputs[2]}, {options})"
    if xorsign:
        value = f"{e.helper(with_sign)}({value}, {arguments[0]}, {arguments[1]})"
    f.assign(value)


def with_sign(magnitude: Array, a: Array, b: Array) -> Array:
    """The sign is the exclusive or of the signs of a and b."""
    one = magnitude.dtype.type(1)
    return np.asarray(np.copysign(magnitude, np.where(np.signbit(a) != np.signbit(b), -one, one)))


@instruction("copysign", section="9.7.3.2", forms="f32 f64: sign of the first operand")
def _copysign(e: Emitter, op: Op, mods: Mods) -> None:
    type_ = mods.type("f32", "f64")
    e.call("copysign", op.operands[0], type_, e.source(op.operands[2], type_), e.source(op.operands[1], type_))


def test_property(x: Array, what: str) -> Array:
    """Testp."""
    if what in ("finite", "infinite"):
        return np.asarray(np.isfinite(x) if what == "finite" else np.isinf(x))
    if what in ("number", "notanumber"):
        return np.asarray(np.isnan(x) == (what == "notanumber"))
    small = np.abs(x) < np.finfo(x.dtype).tiny  # zeros count as subnormal
    return np.asarray(small if what == "subnormal" else np.isfinite(x) & ~small)


@instruction("testp", section="9.7.3.1", forms="finite infinite number notanumber normal subnormal of f32 f64")
def _testp(e: Emitter, op: Op, mods: Mods) -> None:
    what = mods.take("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    e.assign(op.operands[0], "pred", f"{e.helper(test_property)}({e.source(op.operands[1], mods.type('f32', 'f64'))}, {what!r})")


@instruction("rcp", "sqrt", kind="float", section="9.7.3.13, 9.7.3.15", forms="approx.f32, rn rz rm rp of f32, rn.f64, ftz", lanewise=True)
def _rcp(e: Emitter, op: Op, mods: Mods) -> None:
    f = _Float(e, op, mods)
    a = f.source(op.operands[1])
    if mods.take("approx"):
        if f.type != "f32":
            raise mods.unsupported()
        f.assign(f"{e.helper(approximate)}({op.name!r}, {a}, g.approx_seed)")
    elif not f.mode or (f.type == "f64" and (f.mode != "rn")):
        raise mods.unsupported("a rounding that is modelled is needed")
    elif op.name == "rcp":
        one = e.constant(1, "float" + f.type[1:])
        f.assign(f"{e.helper(divide32)}({one}, {a}, {f.mode!r})" if f.type == "f32" else f"{one} / {a}")
    else:
        f.assign(f"{e.helper(sqrt32)}({a}, {f.mode!r})" if f.type == "f32" else f"np.sqrt({a})")


@instruction("rsqrt", "sin", "cos", "lg2", section="9.7.3.16, 9.7.3.18 to 9.7.3.20", forms="approx.f32, ftz", lanewise=True)
@instruction("ex2", "tanh", kind="float", section="9.7.3.21, 9.7.3.22", forms="approx.f32, ftz (ex2)", lanewise=True)
def _approximate(e: Emitter, op: Op, mods: Mods) -> None:
    if not mods.take("approx") or mods.types != ["f32"]:
        raise mods.unsupported()
    ftz = mods.take("ftz")
    value = e.source(op.operands[1], "f32")
    if ftz and op.name != "ex2":  # a subnormal exponent gives 1 either way
        value = f"{e.helper(flush)}({value})"
    value = f"{e.helper(approximate)}({op.name!r}, {value}, g.approx_seed)"
    if ftz and op.name == "ex2":
        value = f"{e.helper(flush_positive)}({value})"
    elif ftz:
        value = f"{e.helper(flush)}({value})"
    e.assign(op.operands[0], "f32", value)


@instruction("add", "sub", "mul", "fma", kind="packed", section="9.7.3.3 to 9.7.3.6", forms="f32x2, rn rz rm rp, ftz", lanewise=True)
def _packed(e: Emitter, op: Op, mods: Mods) -> None:
    """Two float32 in 64 bits, low half first."""
    mods.types = ["f32"]
    d = op.operands[0]
    ftz, mode = mods.take("ftz"), mods.take(*ROUNDINGS) or "rn"
    values = [_pairs(e, o) for o in op.operands[1:]]
    if ftz:
        values = [f"{e.helper(flush)}({v})" for v in values]
    if op.name != "fma" and mode == "rn" and not ftz and e.mask is None and isinstance(d, Register):
        e.line(f"{_NUMPY[op.name]}({values[0]}, {values[1]}, x2[{d.index}])")
        return
    if op.name == "fma":
        value = f"{e.helper(fma32)}({', '.join(values)}, {mode!r})"
    elif mode == "rn":
        value = f"{_NUMPY[op.name]}({values[0]}, {values[1]})"
    else:
        values[1] = f"negative({values[1]})" if op.name == "sub" else values[1]
        value = f"{e.helper(multiply32 if op.name == 'mul' else add32)}({values[0]}, {values[1]}, {mode!r})"
    if ftz:
        value = f"{e.helper(flush)}({value})"
    e.assign(d, "b64", f"{value}.view(np.uint64)")


_NUMPY = {"add": "add", "sub": "subtract", "mul": "multiply"}


def _pairs(e: Emitter, o: Operand) -> str:
    """A 64-bit operand as two float32 a lane."""
    if isinstance(o, Register):
        return f"x2[{o.index}]"
    return f"np.ascontiguousarray(np.broadcast_to({e.source(o, 'b64')}, g.n)).view(np.float32)"
