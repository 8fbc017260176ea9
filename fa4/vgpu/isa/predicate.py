"""Comparison and selection (PTX ISA 9.7.6 and 9.7.7)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu import numerics
from fa4.vgpu.isa.registry import Mods, instruction
from fa4.vgpu.program import Op, Operand, Sink, Tuple

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]

_COMPARE = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_NUMBER = ("num", "nan")
_COMBINE = {"and": "logical_and", "or": "logical_or", "xor": "logical_xor"}
_FLOATS = ("f16", "bf16", "f32", "f64")


def both_numbers(a: Array, b: Array) -> Array:
    """Neither is NaN."""
    return np.asarray(~(np.isnan(a) | np.isnan(b)))


def unordered(a: Array, b: Array, comparison: str) -> Array:
    """The comparison, or true where either is NaN."""
    return np.asarray(np.isnan(a) | np.isnan(b) | getattr(np, comparison)(a, b))


def ordered_not_equal(a: Array, b: Array) -> Array:
    """A != b, false where either is NaN (numpy's, like C's, is true)."""
    return np.asarray((a < b) | (a > b))


def _comparison(e: Emitter, mods: Mods, type_: str, operands: tuple[Operand, Operand]) -> tuple[str, tuple[str, str]]:
    """(ufunc or helper, arguments)."""
    name = mods.take(*_COMPARE, *_UNSIGNED, *(f"{c}u" for c in _COMPARE), *_NUMBER)
    x, y = (e.source(o, type_) for o in operands)
    if type_ == "bf16":
        x, y = (f"{e.helper(numerics.from_bf16)}({v})" for v in (x, y))
    if mods.take("ftz"):
        if type_ != "f32":
            raise mods.unsupported("ftz needs f32")
        x, y = (f"{e.helper(numerics.flush)}({v})" for v in (x, y))
    is_float = type_ in _FLOATS
    if name in _UNSIGNED and type_[0] == "u":
        name = _UNSIGNED[name]
    if name in _COMPARE and not (is_float and name == "ne"):
        if type_[0] == "b" and type_ != "bf16" and name not in ("eq", "ne"):
            raise mods.unsupported("bits have no order")
        return _COMPARE[name], (x, y)
    if not is_float:
        raise mods.unsupported("comparison")
    if name == "ne":
        return e.helper(ordered_not_equal), (x, y)
    if name == "num":
        return e.helper(both_numbers), (x, y)
    if name == "nan":
        return f"~{e.helper(both_numbers)}", (x, y)
    if not name:
        raise mods.unsupported("comparison")
    if name == "neu":
        return "not_equal", (x, y)
    e.helper(unordered)
    return f"(lambda a, b: unordered(a, b, {_COMPARE[name[:-1]]!r}))", (x, y)


@instruction(
    "setp", section="9.7.6.2", forms="eq ne lt le gt ge lo ls hi hs, equ..geu num nan; and or xor; p|q; all types, ftz", lanewise=True
)
def _setp(e: Emitter, op: Op, mods: Mods) -> None:
    d, a, b, *c = op.operands
    if len(mods.types) != 1:
        raise mods.unsupported("one type is needed")
    combine = mods.take(*_COMBINE)
    if mods.types[0] in ("f16x2", "bf16x2"):
        _setp_packed(e, op, mods, combine)
        return
    function, (x, y) = _comparison(e, mods, mods.types[0], (a, b))
    targets = d.items if isinstance(d, Tuple) else (d,)
    if len(targets) == 1 and not c and function in _COMPARE.values():
        e.call(function, d, "pred", x, y)
        return
    value = e.temporary(f"{function}({x}, {y})")
    other = e.temporary(f"{e.source(c[0], 'pred')}") if c else ""
    results = [value, f"logical_not({value})"]
    if c:
        results = [f"{_COMBINE[combine]}({r}, {other})" for r in results]
    # Both results are computed before one of them overwrites an operand.
    results = [e.temporary(r) for r in results[: len(targets)]]
    for target, result in zip(targets, results, strict=True):
        e.assign(target, "pred", result)


def _setp_packed(e: Emitter, op: Op, mods: Mods, combine: str) -> None:
    """Both halves compared, one result each (9.7.6.2 and 9.7.7.2)."""
    from fa4.vgpu.isa.half import halves

    d, a, b, *c = op.operands
    type_ = mods.types[0]
    name = mods.take(*_COMPARE, *(f"{x}u" for x in _COMPARE))
    mods.take("ftz")
    if not isinstance(d, Tuple) or not name:
        raise mods.unsupported()
    x, y = (f"{e.helper(halves)}({e.source(o, 'b32')}, {type_!r}, g.n)" for o in (a, b))
    e.helper(unordered)
    e.helper(ordered_not_equal)
    if name.endswith("u"):
        value = f"unordered({x}, {y}, {_COMPARE[name[:-1]]!r})"
    else:
        value = f"ordered_not_equal({x}, {y})" if name == "ne" else f"{_COMPARE[name]}({x}, {y})"
    both = e.temporary(f"{value}.reshape(-1, 2)")
    for i, target in enumerate(d.items):
        result = f"{both}[:, {i}]"
        e.assign(target, "pred", f"{_COMBINE[combine]}({result}, {e.source(c[0], 'pred')})" if c else result)


@instruction("set", section="9.7.6.1", forms="comparisons as setp; result u32 s32 (all ones) or f32 (1.0)")
def _set(e: Emitter, op: Op, mods: Mods) -> None:
    d, a, b, *c = op.operands
    if len(mods.types) != 2:
        raise mods.unsupported("two types are needed")
    to, of = mods.types
    combine = mods.take(*_COMBINE)
    function, (x, y) = _comparison(e, mods, of, (a, b))
    value = f"{function}({x}, {y})"
    if c:
        value = f"{_COMBINE[combine]}({value}, {e.source(c[0], 'pred')})"
    if to == "f32":
        e.assign(d, "f32", f"{value}.astype(np.float32)")
    elif to in ("u32", "s32"):
        e.assign(d, "u32", f"where({value}, {e.constant(0xFFFFFFFF, 'uint32')}, {e.constant(0, 'uint32')})")
    else:
        raise mods.unsupported()


@instruction("selp", section="9.7.6.3", forms="b u s f of 16 32 64", lanewise=True)
def _selp(e: Emitter, op: Op, mods: Mods) -> None:
    d, a, b, c = op.operands
    type_ = mods.type()
    if isinstance(d, Sink):
        return
    x, y = e.source(a, type_), e.source(b, type_)
    e.assign(d, type_, f"where({e.source(c, 'pred')}, {x}, {y})")


@instruction("slct", section="9.7.6.4", forms="a where c >= 0, else b; c of s32 or f32 (NaN and below: b)")
def _slct(e: Emitter, op: Op, mods: Mods) -> None:
    d, a, b, c = op.operands
    if len(mods.types) != 2 or mods.types[1] not in ("s32", "f32"):
        raise mods.unsupported()
    type_, of = mods.types
    condition = e.source(c, of)
    if mods.take("ftz"):
        condition = f"{e.helper(numerics.flush)}({condition})"
    zero = e.constant(0, "int32" if of == "s32" else "float32")
    x, y = e.source(a, type_), e.source(b, type_)
    e.assign(d, type_, f"where(greater_equal({condition}, {zero}), {x}, {y})")
