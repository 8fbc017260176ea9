"""Conversions between types (PTX ISA 9.7.9.21), and packing (9.7.9.22)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fa4.vgpu import numerics
from fa4.vgpu.isa.registry import Mods, instruction
from fa4.vgpu.memory import spread
from fa4.vgpu.program import Op

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]
_INTEGER_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_FP8 = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}
_FP6 = {"e2m3x2": ml_dtypes.float6_e2m3fn, "e3m2x2": ml_dtypes.float6_e3m2fn}
_SMALL = {**_FP8, **_FP6, "e2m1x2": ml_dtypes.float4_e2m1fn}
_LARGEST = {"e4m3x2": 448.0, "e5m2x2": 57344.0, "e2m3x2": 7.5, "e3m2x2": 28.0, "e2m1x2": 6.0}


def float_to_int(x: Array, dtype: str, rounding: str) -> Array:
    """Rounded to an integer and clamped to the range; NaN becomes 0, or the integer with only its top bit set for 64-bit results."""
    info = np.iinfo(dtype)
    y = _INTEGER_ROUNDING[rounding](x.astype(np.float64))
    nan = np.isnan(y)
    inside = np.where(nan, 0.0, y)
    low, high = float(info.min), float(info.max)
    clamped = np.where((inside >= high) | (inside <= low), 0.0, inside).astype(dtype)
    result = np.where(inside >= high, info.max, np.where(inside <= low, info.min, clamped)).astype(dtype)
    if nan.any() and info.bits == 64:
        result = np.where(nan, np.uint64(1 << 63).astype(dtype), result)
    return result


def int_to_float(x: Array, dtype: str, mode: str) -> Array:
    """An integer rounded to float32 or float64 in any direction."""
    if dtype == "float64" and x.dtype.itemsize < 8:
        return np.asarray(x.astype(np.float64))
    r: Array = x.astype(dtype)
    if mode == "rn" or x.size == 0:
        return r
    result: Array = r.copy()
    for i, (exact, nearest) in enumerate(zip(x.tolist(), r.tolist(), strict=True)):
        if int(nearest) > exact and (mode == "rm" or (mode == "rz" and exact > 0)):
            result[i] = np.nextafter(r[i], r.dtype.type(-np.inf))
        elif int(nearest) < exact and (mode == "rp" or (mode == "rz" and exact < 0)):
            result[i] = np.nextafter(r[i], r.dtype.type(np.inf))
    return result


def int_to_half(x: Array, mode: str) -> Array:
    """An integer to float16: exact in float64 up to 2**53, beyond that infinite anyway."""
    return numerics.to_f16(x.astype(np.float64), mode)


def clamp_int(x: Array, dtype: str) -> Array:
    """Saturating conversion between integers."""
    info = np.iinfo(dtype)
    source = np.iinfo(x.dtype)
    return np.asarray(x.clip(max(info.min, source.min), min(info.max, source.max)).astype(dtype))


def round_integral(x: Array, rounding: str) -> Array:
    """Round to an integral value in the same type."""
    return np.asarray(_INTEGER_ROUNDING[rounding](x))


def pack_halves(high: Array, low: Array, type_: str, mode: str, relu: bool, satfinite: bool) -> Array:
    """Two float32 to a pair of 16-bit or 8-bit floats; the first source goes to the upper half."""
    high, low = np.broadcast_arrays(high, low)
    x = np.stack([low, high], axis=1)
    if relu:
        x = np.where(np.isnan(x), x, np.maximum(x, np.float32(0)))
    if type_ in _SMALL:
        return pack_small(x, type_)
    if type_ == "bf16x2":
        bits = numerics.to_bf16(x, mode)
        top = 0x7F7F
    else:
        bits = np.where(np.isnan(x), np.uint16(0x7FFF), numerics.to_f16(x, mode).view(np.uint16))
        top = 0x7BFF
    if satfinite:
        bits = np.where((bits & 0x7FFF) > top, np.where(np.isnan(x), bits, (bits & 0x8000) | top), bits).astype(np.uint16)
    return np.ascontiguousarray(bits).view(np.uint32).reshape(-1)


def pack_small(x: Array, type_: str) -> Array:
    """Pairs of float32 (lanes, 2) to 8, 6 or 4 bits each, to nearest, clamped; NaN becomes NaN, or the largest where there is none."""
    limit = np.float32(_LARGEST[type_])
    nan = np.isnan(x)
    bits = np.clip(np.where(nan, limit, x), -limit, limit).astype(np.float32).astype(_SMALL[type_]).view(np.uint8)
    if type_ == "e2m1x2":
        return np.asarray(bits[:, 0] | bits[:, 1] << np.uint8(4))
    if type_ in _FP8:
        bits = np.where(nan, np.uint8(0x7F), bits)
    return np.ascontiguousarray(bits).view(np.uint16).reshape(-1)


def pack_scales(high: Array, low: Array, mode: str, satfinite: bool) -> Array:
    """Two float32 to ue8m0, powers of two rounded up (rp) or towards zero; NaN and negative numbers become NaN."""
    x = np.stack(np.broadcast_arrays(low, high), axis=1)
    mantissa, exponent = np.frexp(x)  # x = mantissa 2**exponent, mantissa from 0.5 on
    code = exponent + 126 + (mantissa > 0.5 if mode == "rp" else 0)
    code = np.where(x == 0, 0, code.clip(0, 254))
    code = np.where(np.isposinf(x), 254 if satfinite else 255, code)
    code = np.where(np.isnan(x) | (x < 0), 255, code)
    return np.ascontiguousarray(code.astype(np.uint8)).view(np.uint16).reshape(-1)


def unpack_scales(bits: Array) -> Array:
    """A pair of ue8m0 to a pair of bfloat16: exact; 255 is NaN."""
    code = np.ascontiguousarray(bits).view(np.uint8).astype(np.uint16)
    value = np.where(code == 0, np.uint16(0x40), np.where(code == 255, np.uint16(0x7FFF), code << np.uint16(7)))
    return np.ascontiguousarray(value.astype(np.uint16)).view(np.uint32)


_HALF, _ONE, _SIXTEEN, _UPPER = np.uint32(0x7FFF), np.uint32(1), np.uint32(16), np.uint32(0xFFFF0000)


def pack_bf16(high: Array, low: Array) -> Array:
    """The most frequent form of ``pack_halves``, two float32 to nearest bfloat16, on their bits."""
    x, y = high.view(np.uint32), low.view(np.uint32)
    x = x + _HALF + (x >> _SIXTEEN & _ONE)
    y = y + _HALF + (y >> _SIXTEEN & _ONE)
    packed = (x & _UPPER) | (y >> _SIXTEEN)
    return _with_nan(packed, high, low) if np.isnan(high + low).any() else packed  # or infinities of both signs


def pack_f16(high: Array, low: Array) -> Array:
    """The same for float16."""
    x, y = (v.astype(np.float16).view(np.uint16).astype(np.uint32) for v in (high, low))
    packed = x << _SIXTEEN | y
    return _with_nan(packed, high, low) if np.isnan(high + low).any() else packed


def _with_nan(packed: Array, high: Array, low: Array) -> Array:
    """Every NaN becomes 0x7FFF."""
    packed = np.where(np.isnan(high), packed & np.uint32(0xFFFF) | np.uint32(0x7FFF0000), packed)
    return np.where(np.isnan(low), packed & _UPPER | np.uint32(0x7FFF), packed)


def unpack_small(bits: Array, type_: str, relu: bool) -> Array:
    """A pair of floats of 8, 6 or 4 bits to a pair of float16: exact."""
    if type_ == "e2m1x2":
        bits = np.stack([bits & np.uint8(15), bits.astype(np.uint8) >> np.uint8(4)], axis=1).astype(np.uint8).reshape(-1)
    x = np.ascontiguousarray(bits).view(_SMALL[type_]).astype(np.float32)
    x = np.where(np.isnan(x), x, np.maximum(x, np.float32(0))) if relu else x
    y = np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))
    return np.ascontiguousarray(y).view(np.uint32)


def half_pairs(bits: Array, n: int) -> Array:
    """float16 pairs as float32 (lanes, 2), low half first."""
    return np.asarray(np.ascontiguousarray(spread(bits, n)).view(np.float16).astype(np.float32).reshape(n, 2))


def to_bf16_bits(x: Array, mode: str) -> Array:
    """Integers and floats to bfloat16 bits with one rounding."""
    wide = numerics.odd32(x.astype(np.float64)) if x.dtype != np.float32 else x
    return numerics.to_bf16(wide, mode)


def half_saturated(x: Array) -> Array:
    """cvt.sat to float16."""
    return np.asarray(numerics.saturate(x.astype(np.float32)).astype(np.float16))


def pack_integers(a: Array, b: Array, c: Array | None, type_: str) -> Array:
    """cvt.pack.sat: two s32, clamped, into the low part, what was in c moved up."""
    bits = int(type_[1:])
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if type_[0] == "s" else (0, (1 << bits) - 1)
    x, y = (v.astype(np.int64).clip(low, high) & ((1 << bits) - 1) for v in (a, b))
    value = y | x << bits
    if c is not None:
        value = value | c.astype(np.int64) << 2 * bits
    return np.asarray((value & 0xFFFFFFFF).astype(np.uint32))


def _pack_integers(e: Emitter, op: Op, mods: Mods) -> None:
    """cvt.pack (9.7.9.22): d = {c, a, b}, c only for 8-bit results."""
    d, a, b, *c = op.operands
    types = mods.types
    narrow, last = ("u16", "s16") if len(types) == 2 else ("u8", "s8"), [] if len(types) == 2 else ["b32"]
    if not mods.take("sat") or types[0] not in narrow or types[1:] != ["s32", *last] or len(c) != len(last):
        raise mods.unsupported()
    rest = e.source(c[0], "b32") if c else "None"
    e.assign(d, "b32", f"{e.helper(pack_integers)}({e.source(a, 's32')}, {e.source(b, 's32')}, {rest}, {types[0]!r})")


def _pack(e: Emitter, op: Op, mods: Mods, target: str) -> None:
    d, *values = op.operands
    relu, satfinite, mode = bool(mods.take("relu")), bool(mods.take("satfinite")), mods.take("rn", "rz", "rp")
    from_half = target in _FP8 and mods.types[1] == "f16x2"
    if (target in _SMALL and not (satfinite and mode == "rn")) or (mode == "rp" and target != "ue8m0x2"):
        raise mods.unsupported()
    if (mods.types[1] != "f32" and not from_half) or len(values) != 2 - from_half:
        raise mods.unsupported()
    bits = "b8" if target == "e2m1x2" else "b16" if target in (*_SMALL, "ue8m0x2") else "b32"
    if from_half:
        pair = e.temporary(f"{e.helper(half_pairs)}({e.source(values[0], 'b32')}, g.n)")
        high, low = f"{pair}[:, 1]", f"{pair}[:, 0]"
    else:
        high, low = (e.source(o, "f32") for o in values)
    if target == "ue8m0x2":
        if relu or mode not in ("rz", "rp"):
            raise mods.unsupported()
        e.assign(d, bits, f"{e.helper(pack_scales)}({high}, {low}, {mode!r}, {satfinite})")
        return
    if target in ("bf16x2", "f16x2") and mode == "rn" and not relu and not satfinite:
        e.assign(d, bits, f"{e.helper(pack_bf16 if target == 'bf16x2' else pack_f16)}({high}, {low})")
        return
    e.assign(d, bits, f"{e.helper(pack_halves)}({high}, {low}, {target!r}, {mode!r}, {relu}, {satfinite})")


@instruction(
    "cvt",
    section="9.7.9.21, 9.7.9.22",
    forms="all pairs of u8..s64, f16, bf16, f32, f64; rn rz rm rp, rni rzi rmi rpi, ftz, sat; f16x2 bf16x2 e4m3x2 e5m2x2 e2m3x2 e3m2x2 "
    "e2m1x2 ue8m0x2 from two f32, e4m3x2 e5m2x2 from f16x2, f16x2 from those, bf16x2 from ue8m0x2, tf32 from f32; relu, satfinite; "
    "pack.sat to u16 s16 and u8 s8 from s32",
    lanewise=frozenset(["rn.bf16x2.f32", "rn.f16x2.f32", "rn.f32.s32", "rn.f32.u32", "rzi.s32.f32"]),
)
def _cvt(e: Emitter, op: Op, mods: Mods) -> None:
    if mods.take("pack"):
        _pack_integers(e, op, mods)
        return
    if len(mods.types) != 2:
        raise mods.unsupported("two types are needed")
    to, of = mods.types
    d, a = op.operands[:2]
    if (to in ("f16x2", "bf16x2", "ue8m0x2", *_SMALL) and of == "f32") or (to in _FP8 and of == "f16x2"):
        _pack(e, op, mods, to)
        return
    if of in _SMALL and to == "f16x2":
        mods.take("rn")
        width = "b8" if of == "e2m1x2" else "b16"
        e.assign(d, "b32", f"{e.helper(unpack_small)}({e.source(a, width)}, {of!r}, {bool(mods.take('relu'))})")
        return
    if of == "ue8m0x2" and to == "bf16x2":
        mods.take("rn")
        e.assign(d, "b32", f"{e.helper(unpack_scales)}({e.source(a, 'b16')})")
        return
    mode = mods.take("rn", "rz", "rm", "rp", "rna")
    integral = mods.take(*_INTEGER_ROUNDING)
    ftz, sat = mods.take("ftz"), mods.take("sat")
    if to == "tf32":
        if of != "f32" or mode not in ("rna", "rn", "rz"):
            raise mods.unsupported()
        mods.take("satfinite")
        e.assign(d, "b32", f"{e.helper(numerics.to_tf32)}({e.source(a, 'f32')}, {mode!r})")
        return
    value = e.source(a, of)
    floats = ("f16", "bf16", "f32", "f64")
    if of == "bf16":
        value, of = f"{e.helper(numerics.from_bf16)}({value})", "f32"
    if ftz and of == "f32":
        value = f"{e.helper(numerics.flush)}({value})"
    if to in floats:
        value = _to_float(e, mods, (to, of), value, (mode, integral, ftz, sat))
        e.assign(d, to, value)
        return
    dtype = ("int" if to[0] == "s" else "uint") + to[1:]
    if of in floats:
        if not integral:
            raise mods.unsupported("an integer rounding is needed")
        value = f"{e.helper(float_to_int)}({value}, {dtype!r}, {integral!r})"
    elif sat:
        value = f"{e.helper(clamp_int)}({value}, {dtype!r})"
    else:
        value = f"{value}.astype(np.{dtype})"
    e.assign(d, to, value)


def _to_float(e: Emitter, mods: Mods, types: tuple[str, str], value: str, options: tuple[str, str, str, str]) -> str:
    to, of = types
    mode, integral, ftz, sat = options
    if mode == "rna" or (mode in ("rm", "rp") and to in ("f16", "bf16")):
        raise mods.unsupported(f"rounding {mode}")
    if of[0] in "us":
        if to in ("f32", "f64"):
            value = f"{e.helper(int_to_float)}({value}, 'float{to[1:]}', {mode or 'rn'!r})"
        elif to == "f16":
            value = f"{e.helper(int_to_half)}({value}, {mode or 'rn'!r})"
        else:
            value = f"{e.helper(to_bf16_bits)}({value}, {mode or 'rn'!r})"
    elif integral:
        if to != of:
            raise mods.unsupported("an integer rounding needs equal types")
        value = f"{e.helper(round_integral)}({value}, {integral!r})"
    elif to == "bf16":
        relu = mods.take("relu")
        if relu:
            value = f"np.where({value} != {value}, {value}, np.maximum({value}, 0))"
        value = f"{e.helper(to_bf16_bits)}({value}, {mode or 'rn'!r})"
    elif to == "f16":
        if mods.take("relu"):
            value = f"np.where({value} != {value}, {value}, np.maximum({value}, 0))"
        value = f"{e.helper(numerics.to_f16)}({value}, {mode or 'rn'!r})" if of != "f16" else value
    elif to == "f32" and of == "f64":
        value = f"{e.helper(numerics.narrow)}({value}, {mode or 'rn'!r})"
    elif to != of:
        value = f"{value}.astype(np.float{to[1:]})"
    if ftz and to == "f32":
        value = f"{e.helper(numerics.flush)}({value})"
    if sat:
        if to == "bf16":
            raise mods.unsupported("sat of bf16")
        value = f"{e.helper(half_saturated)}({value})" if to == "f16" else f"{e.helper(numerics.saturate)}({value})"
    return value
