"""Floats of 6 and 4 bits, scales of blocks, and sums with one 16-bit term: what sm_100 added."""

from __future__ import annotations

import math

from instruction_cases import BF16, MODES, bf16_bits, bf16_value, f16_bits, f16_value, fp8_code, saturated
from instruction_table import ADD, SUB, Case, rounded


def small_value(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """e2m3, e3m2 and e2m1: every code is a finite number."""
    exponent, mantissa = code >> mantissa_bits & (2**exponent_bits - 1), code & (2**mantissa_bits - 1)
    bias = 2 ** (exponent_bits - 1) - 1
    value = math.ldexp(mantissa + (2**mantissa_bits if exponent else 0), max(exponent, 1) - bias - mantissa_bits)
    return -value if code >> exponent_bits + mantissa_bits & 1 else value


def small_code(x: float, exponent_bits: int, mantissa_bits: int) -> int:
    """The nearest code, ties to even; NaN is the largest."""
    sign = 1 << exponent_bits + mantissa_bits
    if not math.isfinite(x):
        return sign - 1 | (sign if x < 0 else 0)
    code = min(range(sign), key=lambda c: (abs(small_value(c, exponent_bits, mantissa_bits) - abs(x)), c & 1))
    return code | (sign if math.copysign(1, x) < 0 else 0)


def scale_code(x: float, up: bool, satfinite: bool) -> int:
    """ue8m0: the exponent of the power of two below or above x; 255 is NaN."""
    if math.isnan(x) or x < 0:
        return 255
    if math.isinf(x):
        return 254 if satfinite else 255
    codes = [c for c in range(255) if (2.0 ** (c - 127) >= x if up else 2.0 ** (c - 127) <= x)]
    return (min if up else max)(codes, default=254 if up else 0)


def small_cases() -> list[Case]:
    """6-bit and 4-bit floats, scales of blocks, and sums with one 16-bit term, of sm_100."""
    cases = []
    numbers = ("f32", (0.0, -0.0, 0.25, 0.3, -0.75, 1.25, 2.5, -3.5, 5.0, 6.5, -7.75, 20.0, 30.0, math.inf, math.nan))
    for e, m in ((2, 3), (3, 2), (2, 1)):
        type_, width = f"e{e}m{m}x2", 4 if m == 1 else 8
        if m == 1:
            code = f"{{{{ .reg .b8 %b1; cvt.rn.satfinite.{type_}.f32 %b1, {{a}}, {{b}}; cvt.u16.u8 {{d}}, %b1; }}}}"
        else:
            code = f"cvt.rn.satfinite.{type_}.f32 {{d}}, {{a}}, {{b}};"
        cases.append(
            Case(
                code,
                "b16",
                (numbers, numbers),
                lambda a, b, e=e, m=m, w=width: small_code(b, e, m) | small_code(a, e, m) << w,
            )
        )
        source = (
            "{{ .reg .b8 %b1; cvt.u8.u16 %b1, {a}; cvt.rn.f16x2.e2m1x2 {d}, %b1; }}" if m == 1 else f"cvt.rn.f16x2.{type_} {{d}}, {{a}};"
        )
        codes = tuple(range(256)) if m == 1 else tuple(c | (c * 7 + 3) % 64 << 8 for c in range(64))
        mask = 2 ** (e + m + 1) - 1
        cases.append(
            Case(
                source,
                "b32",
                (("b16", codes),),
                lambda a, e=e, m=m, w=width, k=mask: f16_bits(small_value(a & k, e, m)) | f16_bits(small_value(a >> w & k, e, m)) << 16,
            )
        )
    scales = ("f32", (0.0, 1.0, 1.5, 2.0**-127, 2.0**-130, 3.0 * 2.0**-126, 2.0**127, 1.5 * 2.0**127, -1.0, math.inf, math.nan))
    for mode in ("rz", "rp"):
        for satfinite in ("", "satfinite."):
            cases.append(
                Case(
                    f"cvt.{mode}.{satfinite}ue8m0x2.f32 {{d}}, {{a}}, {{b}};",
                    "b16",
                    (scales, scales),
                    lambda a, b, up=mode == "rp", f=bool(satfinite): scale_code(b, up, f) | scale_code(a, up, f) << 8,
                )
            )
    cases.append(
        Case(
            "cvt.rn.bf16x2.ue8m0x2 {d}, {a};",
            "b32",
            (("b16", (0x0000, 0x7F01, 0x80FE, 0xFF7F)),),
            lambda a: sum((0x7FFF if c == 255 else bf16_bits(2.0 ** (c - 127))) << s for c, s in ((a & 255, 0), (a >> 8, 16))),
        )
    )
    for type_, bits in (("e4m3", 4), ("e5m2", 5)):
        cases.append(
            Case(
                f"cvt.rn.satfinite.{type_}x2.f16x2 {{d}}, {{a}};",
                "b16",
                (("b32", (0x3C004900, 0xC2007BFF, 0x00018001, 0x6000E400)),),
                lambda a, n=bits: fp8_code(f16_value(a & 0xFFFF), n) | fp8_code(f16_value(a >> 16), n) << 8,
            )
        )
    halves, sums = ("b16", BF16[:8]), ("f32", (0.0, 1.0, -1 / 3, 1e10, 2.0**-130, 3e38))
    for name, operation in (("add", ADD), ("sub", SUB)):
        for mode in MODES:
            total = rounded(operation, "f32", mode)
            cases.append(
                Case(
                    f"{name}.{mode}.f32.bf16 {{d}}, {{a}}, {{b}};",
                    "f32",
                    (halves, sums),
                    lambda a, b, f=total: f(bf16_value(a), b),
                )
            )
    cases.append(Case("add.rn.sat.f32.f16 {d}, {a}, {b};", "f32", ("f16", sums), lambda a, b: saturated(rounded(ADD, "f32")(a, b))))
    return cases
