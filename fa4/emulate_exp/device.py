"""The device code: 2^x with multiply-adds, packed in pairs on sm_100a and sm_103a, scalar elsewhere. ``twin`` gives the same bits."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.base_dsl.dsl import BaseDSL
from cutlass.cutlass_dsl import T, dsl_user_op

from fa4.emulate_exp.coefficients import coefficients
from fa4.emulate_exp.twin import FULL_BIAS, LOWEST, MANTISSA_BITS, check

ROUNDER = 3.0 * 2**22
"""x + ROUNDER, rounded down, is ROUNDER + floor(x): between 2^23 and 2^24 float32 has no fractions, and the low bits are an integer."""


@cute.jit
def emulated_exp2(
    x: Float32,
    degree: cutlass.Constexpr[int] = 3,
    form: cutlass.Constexpr[str] = "fast",
    continuous: cutlass.Constexpr[bool] = False,
) -> Float32:
    """2^x; ``fa4.emulate_exp.emulated_exp2`` says for which x, and how close.

    Raises:
        ArgumentError: while tracing: an unknown degree or form.
    """
    check(degree, form, continuous)
    rounder = _rounder(form)
    x = _clamp(x, form)
    whole = _add_round_down(x, Float32(rounder))
    fraction = x - (whole - rounder)
    table = coefficients(degree, continuous)
    value = Float32(table[-1])
    for coefficient in table[-2::-1]:
        value = _fma(value, fraction, Float32(coefficient))
    result = _scale(value, whole)
    if const_expr(form == "full"):
        result = _fma(result, Float32(2.0**-FULL_BIAS), x * 0.0)  # x * 0 is NaN for NaN, else a zero
    return result


@cute.jit
def emulated_exp2_pair(
    x: Float32,
    y: Float32,
    degree: cutlass.Constexpr[int] = 3,
    form: cutlass.Constexpr[str] = "fast",
    continuous: cutlass.Constexpr[bool] = False,
) -> tuple[Float32, Float32]:
    """(2^x, 2^y), the bits of ``emulated_exp2``, in half as many multiply-add instructions where the target has packed ones."""
    check(degree, form, continuous)
    if const_expr(not packed()):
        return emulated_exp2(x, degree, form, continuous), emulated_exp2(y, degree, form, continuous)
    rounder = _rounder(form)
    xy = (_clamp(x, form), _clamp(y, form))
    whole = cute.arch.add_packed_f32x2(xy, (rounder, rounder), rnd="rm")
    fraction = cute.arch.sub_packed_f32x2(xy, cute.arch.sub_packed_f32x2(whole, (rounder, rounder)))
    table = coefficients(degree, continuous)
    value = (Float32(table[-1]), Float32(table[-1]))
    for coefficient in table[-2::-1]:
        value = cute.arch.fma_packed_f32x2(value, fraction, (coefficient, coefficient))
    result = (_scale(value[0], whole[0]), _scale(value[1], whole[1]))
    if const_expr(form == "full"):
        factor = 2.0**-FULL_BIAS
        result = cute.arch.fma_packed_f32x2(result, (factor, factor), cute.arch.mul_packed_f32x2(xy, (0.0, 0.0)))
    return result


def packed() -> bool:
    """Whether the target being compiled for has float32 instructions on pairs (PTX ISA 9.7.3: f32x2)."""
    return bool(BaseDSL._get_dsl().get_arch_enum().major == 10)


def _rounder(form: str) -> float:
    return ROUNDER + (FULL_BIAS if form == "full" else 0)


@cute.jit
def _clamp(x: Float32, form: cutlass.Constexpr[str]) -> Float32:
    """Raise x to the lowest argument of ``form``; NaN stays NaN, where a plain maximum would hide it."""
    result = x
    if const_expr(form in LOWEST):
        result = cute.arch.fmax(x, LOWEST[form], nan=True)
    return result


@cute.jit
def _scale(value: Float32, whole: Float32) -> Float32:
    """``value`` times 2^n, where n is the integer in the low bits of ``whole``: n is added to the exponent field."""
    return (value.bitcast(Int32) + (whole.bitcast(Int32) << MANTISSA_BITS)).bitcast(Float32)


@dsl_user_op
def _add_round_down(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    return _float_asm("add.rm.f32 $0, $1, $2;", (a, b), loc, ip)


@dsl_user_op
def _fma(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Said outright: a product and a sum would be fused at the compiler's discretion."""
    return _float_asm("fma.rn.f32 $0, $1, $2, $3;", (a, b, c), loc, ip)


def _float_asm(text: str, operands: tuple[Float32, ...], loc: Any, ip: Any) -> Float32:
    """PTX without side effects, which the compiler may move; float32 in, float32 out."""
    values = [Float32(operand).ir_value(loc=loc, ip=ip) for operand in operands]
    constraints = ",".join(["=f"] + ["f"] * len(values))
    result = llvm.inline_asm(T.f32(), values, text, constraints, has_side_effects=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip)
    return Float32(result)
