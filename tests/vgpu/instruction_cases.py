# ruff: noqa: E501 -- kernels and rows of tables in one line
"""The table of instruction cases, by family."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from instruction_table import ADD, DIV, FMA, FORMATS, MUL, SUB, Case, clamp, round_to, rounded, wrap

INTS = ("u16", "s16", "u32", "s32", "u64", "s64")
MODES = ("rn", "rz", "rm", "rp")


def bits32(x: float) -> int:
    with np.errstate(all="ignore"):
        return int(np.array(x, np.float32).view(np.uint32))


def quotient(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def integer_cases() -> list[Case]:
    cases = []
    for t in INTS:
        n = int(t[1:])
        cases += [
            Case(f"add.{t} {{d}}, {{a}}, {{b}};", t, (t, t), lambda a, b: a + b),
            Case(f"sub.{t} {{d}}, {{a}}, {{b}};", t, (t, t), lambda a, b: a - b),
            Case(f"mul.lo.{t} {{d}}, {{a}}, {{b}};", t, (t, t), lambda a, b: a * b),
            Case(f"mul.hi.{t} {{d}}, {{a}}, {{b}};", t, (t, t), lambda a, b, n=n: a * b >> n),
            Case(f"mad.lo.{t} {{d}}, {{a}}, {{b}}, {{c}};", t, (t, t, t), lambda a, b, c: a * b + c),
            Case(f"mad.hi.{t} {{d}}, {{a}}, {{b}}, {{c}};", t, (t, t, t), lambda a, b, c, n=n: (a * b >> n) + c),
            Case(f"div.{t} {{d}}, {{a}}, {{b}};", t, (t, t), quotient),
            Case(f"rem.{t} {{d}}, {{a}}, {{b}};", t, (t, t), lambda a, b: a if b == 0 else a - quotient(a, b) * b),
            Case(f"min.{t} {{d}}, {{a}}, {{b}};", t, (t, t), min),
            Case(f"max.{t} {{d}}, {{a}}, {{b}};", t, (t, t), max),
            Case(f"sad.{t} {{d}}, {{a}}, {{b}}, {{c}};", t, (t, t, t), lambda a, b, c: c + abs(a - b)),
        ]
        if n < 64:
            w = f"{t[0]}{2 * n}"
            cases += [
                Case(f"mul.wide.{t} {{d}}, {{a}}, {{b}};", w, (t, t), lambda a, b: a * b),
                Case(f"mad.wide.{t} {{d}}, {{a}}, {{b}}, {{c}};", w, (t, t, w), lambda a, b, c: a * b + c),
            ]
        if t[0] == "s":
            cases += [
                Case(f"abs.{t} {{d}}, {{a}};", t, (t,), abs),
                Case(f"neg.{t} {{d}}, {{a}};", t, (t,), lambda a: -a),
            ]
    for t in ("u32", "s32"):

        def low24(x: int, t: str = t) -> int:
            x %= 2**24
            return x - 2**24 if t == "s32" and x >= 2**23 else x

        cases += [
            Case(f"mul24.lo.{t} {{d}}, {{a}}, {{b}};", t, (t, t), lambda a, b, f=low24: f(a) * f(b)),
            Case(f"mul24.hi.{t} {{d}}, {{a}}, {{b}};", t, (t, t), lambda a, b, f=low24: f(a) * f(b) >> 16),
            Case(f"mad24.lo.{t} {{d}}, {{a}}, {{b}}, {{c}};", t, (t, t, t), lambda a, b, c, f=low24: f(a) * f(b) + c),
        ]
    cases += [
        Case("add.sat.s32 {d}, {a}, {b};", "s32", ("s32", "s32"), lambda a, b: clamp(a + b, "s32")),
        Case("sub.sat.s32 {d}, {a}, {b};", "s32", ("s32", "s32"), lambda a, b: clamp(a - b, "s32")),
        Case("mad.hi.sat.s32 {d}, {a}, {b}, {c};", "s32", ("s32",) * 3, lambda a, b, c: clamp((a * b >> 32) + c, "s32")),
        Case("add.u16x2 {d}, {a}, {b};", "u32", ("u32", "u32"), lambda a, b: (a + b) % 65536 | ((a >> 16) + (b >> 16)) % 65536 << 16),
    ]

    def dot(signs: tuple[bool, bool]):
        def byte(x: int, i: int, signed: bool) -> int:
            value = x >> 8 * i & 255
            return value - 256 if signed and value > 127 else value

        return lambda a, b, c: c + sum(byte(a, i, signs[0]) * byte(b, i, signs[1]) for i in range(4))

    def dot2(high: bool):
        def signed(value: int, bits: int) -> int:
            return value - 2**bits if value >= 2 ** (bits - 1) else value

        return lambda a, b, c: c + sum(signed(a >> 16 * i & 0xFFFF, 16) * signed(b >> 8 * i + 16 * high & 255, 8) for i in range(2))

    cases.append(Case("dp2a.lo.s32.s32 {d}, {a}, {b}, {c};", "u32", ("u32",) * 3, dot2(False)))
    cases.append(Case("dp2a.hi.s32.s32 {d}, {a}, {b}, {c};", "u32", ("u32",) * 3, dot2(True)))
    for x in ("u32", "s32"):
        for y in ("u32", "s32"):
            cases.append(Case(f"dp4a.{x}.{y} {{d}}, {{a}}, {{b}}, {{c}};", "u32", ("u32", "u32", "u32"), dot((x == "s32", y == "s32"))))
    return cases


def bit_cases() -> list[Case]:
    cases = []
    amounts = ("u32", (0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200, 2**32 - 1))
    for n in (16, 32, 64):
        b, u, s = f"b{n}", f"u{n}", f"s{n}"
        cases += [
            Case(f"and.{b} {{d}}, {{a}}, {{b}};", b, (b, b), lambda x, y: x & y),
            Case(f"or.{b} {{d}}, {{a}}, {{b}};", b, (b, b), lambda x, y: x | y),
            Case(f"xor.{b} {{d}}, {{a}}, {{b}};", b, (b, b), lambda x, y: x ^ y),
            Case(f"not.{b} {{d}}, {{a}};", b, (b,), lambda x: ~x),
            Case(f"cnot.{b} {{d}}, {{a}};", b, (b,), lambda x: x == 0),
            Case(f"shl.{b} {{d}}, {{a}}, {{b}};", b, (b, amounts), lambda x, k, n=n: x << min(k, n)),
            Case(f"shr.{u} {{d}}, {{a}}, {{b}};", u, (u, amounts), lambda x, k: x >> min(k, 64)),
            Case(f"shr.{s} {{d}}, {{a}}, {{b}};", s, (s, amounts), lambda x, k: x >> min(k, 64)),
            Case(f"shr.{s} {{d}}, {{a}}, {n};", s, (s,), lambda x: -1 if x < 0 else 0),
        ]
    for n in (32, 64):
        b = f"b{n}"
        cases += [
            Case(f"popc.{b} {{d}}, {{a}};", "u32", (b,), lambda x: x.bit_count()),
            Case(f"clz.{b} {{d}}, {{a}};", "u32", (b,), lambda x, n=n: n - x.bit_length()),
            Case(f"brev.{b} {{d}}, {{a}};", b, (b,), lambda x, n=n: int(f"{x:0{n}b}"[::-1], 2)),
            Case(f"bfind.u{n} {{d}}, {{a}};", "u32", (f"u{n}",), lambda x: x.bit_length() - 1),
            Case(f"bfind.s{n} {{d}}, {{a}};", "u32", (f"s{n}",), lambda x: (~x if x < 0 else x).bit_length() - 1),
            Case(f"bfind.shiftamt.u{n} {{d}}, {{a}};", "u32", (f"u{n}",), lambda x, n=n: n - x.bit_length() if x else -1),
        ]
        position = ("u32", (0, 1, 7, 16, 31, 32, 40, 63, 64, 255, 256 + 3))
        length = ("u32", (0, 1, 4, 8, 31, 32, 33, 64, 100))

        def field(x: int, p: int, k: int, n: int, signed: bool) -> int:
            p, k = p & 255, k & 255
            value = (x % 2**n) >> p & ((1 << k) - 1)
            if signed and k:
                top = (x % 2**n) >> min(p + k - 1, n - 1) & 1
                if top:
                    value |= -1 << min(k, max(n - p, 0))
            return value

        def inserted(x: int, y: int, p: int, k: int, n: int) -> int:
            p, k = p & 255, k & 255
            mask = ((1 << k) - 1) << p & (2**n - 1)
            return y & ~mask | x << p & mask

        cases += [
            Case(
                f"bfe.u{n} {{d}}, {{a}}, {{b}}, {{c}};",
                f"u{n}",
                (f"u{n}", position, length),
                lambda x, p, k, n=n, f=field: f(x, p, k, n, False),
            ),
            Case(
                f"bfe.s{n} {{d}}, {{a}}, {{b}}, {{c}};",
                f"s{n}",
                (f"s{n}", position, length),
                lambda x, p, k, n=n, f=field: f(x, p, k, n, True),
            ),
            Case(
                f"bfi.b{n} {{d}}, {{a}}, {{b}}, {{c}}, {{e}};".replace("{e}", "9"),
                b,
                (b, b, position),
                lambda x, y, p, n=n, f=inserted: f(x, y, p, 9, n),
            ),
        ]

    def funnel(low: int, high: int, k: int, left: bool, limit: bool) -> int:
        k = min(k, 32) if limit else k & 31
        both = high << 32 | low
        return both << k >> 32 if left else both >> k

    for way in "lr":
        for mode in ("wrap", "clamp"):
            cases.append(
                Case(
                    f"shf.{way}.{mode}.b32 {{d}}, {{a}}, {{b}}, {{c}};",
                    "b32",
                    ("b32", "b32", amounts),
                    lambda x, y, k, w=way, m=mode: funnel(x, y, k, w == "l", m == "clamp"),
                )
            )

    def permute(x: int, y: int, selector: int) -> int:
        data = (x | y << 32).to_bytes(8, "little")
        result = []
        for i in range(4):
            nibble = selector >> 4 * i & 15
            byte = data[nibble & 7]
            result.append((255 if byte & 128 else 0) if nibble & 8 else byte)
        return int.from_bytes(bytes(result), "little")

    def table(x: int, y: int, z: int, lut: int) -> int:
        return sum((lut >> (4 * (x >> i & 1) + 2 * (y >> i & 1) + (z >> i & 1)) & 1) << i for i in range(32))

    cases.append(Case("prmt.b32 {d}, {a}, {b}, {c};", "b32", ("b32", "b32", "b32"), permute))
    modes = {
        "f4e": lambda s: [s, s + 1, s + 2, s + 3],
        "b4e": lambda s: [s, (s + 7) % 8, (s + 6) % 8, (s + 5) % 8],
        "rc8": lambda s: [s] * 4,
    }
    modes |= {
        "ecl": lambda s: [max(i, s) for i in range(4)],
        "ecr": lambda s: [min(i, s) for i in range(4)],
        "rc16": lambda s: [2 * (s & 1), 2 * (s & 1) + 1] * 2,
    }
    for mode, pick in modes.items():

        def chosen(x: int, y: int, s: int, pick=pick) -> int:
            data = (x | y << 32).to_bytes(8, "little")
            return int.from_bytes(bytes(data[i] for i in pick(s & 3)), "little")

        cases.append(Case(f"prmt.b32.{mode} {{d}}, {{a}}, {{b}}, {{c}};", "b32", ("b32", "b32", ("b32", (0, 1, 2, 3, 7))), chosen))
    for lut in (0x00, 0xFF, 0x96, 0xE8, 0xCA, 0x3C, 0x01):
        cases.append(
            Case(f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {lut};", "b32", ("b32", "b32", "b32"), lambda x, y, z, lut=lut: table(x, y, z, lut))
        )
    return cases


def smallest(a: float, b: float, largest: bool = False, nan: bool = False) -> float:
    if math.isnan(a) or math.isnan(b):
        return math.nan if nan or (math.isnan(a) and math.isnan(b)) else b if math.isnan(a) else a
    key = lambda x: (x, math.copysign(1, x))  # noqa: E731
    return (max if largest else min)(a, b, key=key)


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def saturated(x: float) -> float:
    return 0.0 if math.isnan(x) else min(max(x, 0.0), 1.0) + 0.0


def float_cases() -> list[Case]:
    cases = []
    for t in ("f32", "f64"):
        for mode in MODES:
            cases += [
                Case(f"add.{mode}.{t} {{d}}, {{a}}, {{b}};", t, (t, t), rounded(ADD, t, mode)),
                Case(f"sub.{mode}.{t} {{d}}, {{a}}, {{b}};", t, (t, t), rounded(SUB, t, mode)),
                Case(f"mul.{mode}.{t} {{d}}, {{a}}, {{b}};", t, (t, t), rounded(MUL, t, mode)),
                Case(f"div.{mode}.{t} {{d}}, {{a}}, {{b}};", t, (t, t), rounded(DIV, t, mode)),
            ]
            fma = rounded(FMA, t, mode)
            cases.append(
                Case(
                    f"fma.{mode}.{t} {{d}}, {{a}}, {{b}}, {{c}};", t, (t, t, (t, (0.0, 1.0, -1 / 3, 2.0**-149, 3e38, math.inf, -1.5))), fma
                )
            )
        cases += [
            Case(f"abs.{t} {{d}}, {{a}};", t, (t,), abs),
            Case(f"neg.{t} {{d}}, {{a}};", t, (t,), lambda a: -a),
            Case(f"min.{t} {{d}}, {{a}}, {{b}};", t, (t, t), smallest),
            Case(f"max.{t} {{d}}, {{a}}, {{b}};", t, (t, t), lambda a, b: smallest(a, b, True)),
            Case(f"copysign.{t} {{d}}, {{a}}, {{b}};", t, (t, t), lambda a, b: math.copysign(b, a)),
            Case(f"testp.finite.{t} {{d}}, {{a}};", "pred", (t,), math.isfinite),
            Case(f"testp.infinite.{t} {{d}}, {{a}};", "pred", (t,), math.isinf),
            Case(f"testp.notanumber.{t} {{d}}, {{a}};", "pred", (t,), math.isnan),
            Case(f"testp.normal.{t} {{d}}, {{a}};", "pred", (t,), lambda a, t=t: math.isfinite(a) and abs(a) >= 2.0 ** FORMATS[t][1]),
        ]
    cases += [
        Case("add.ftz.f32 {d}, {a}, {b};", "f32", ("f32", "f32"), lambda a, b: flushed(rounded(ADD, "f32")(flushed(a), flushed(b)))),
        Case("mul.ftz.f32 {d}, {a}, {b};", "f32", ("f32", "f32"), lambda a, b: flushed(rounded(MUL, "f32")(flushed(a), flushed(b)))),
        Case("add.sat.f32 {d}, {a}, {b};", "f32", ("f32", "f32"), lambda a, b: saturated(rounded(ADD, "f32")(a, b))),
        Case("max.NaN.f32 {d}, {a}, {b};", "f32", ("f32", "f32"), lambda a, b: smallest(a, b, True, True)),
        Case("min.NaN.f32 {d}, {a}, {b};", "f32", ("f32", "f32"), lambda a, b: smallest(a, b, False, True)),
        Case("max.f32 {d}, {a}, {b}, {c};", "f32", ("f32",) * 3, lambda a, b, c: smallest(smallest(a, b, True), c, True)),
        Case(
            "min.xorsign.abs.f32 {d}, {a}, {b};", "f32", ("f32", ("f32", (1.0, -2.0, 0.25, -0.0))),
            lambda a, b: math.copysign(smallest(abs(a), abs(b)), math.copysign(1, a) * math.copysign(1, b)) if not math.isnan(a) else b if math.copysign(1, a) > 0 else -b,
        ),
    ]  # fmt: skip

    def root(mode: str):
        def apply(a: float) -> float:
            if not a > 0 or math.isinf(a):
                return a if a == 0 or a == math.inf else math.nan
            x = Fraction(a)
            scale = 1 << 400
            low = Fraction(math.isqrt(x.numerator * scale * scale // x.denominator), scale)
            exact = low if low * low == x else low + Fraction(1, 2 * scale)
            return round_to(exact, "f32", mode)

        return apply

    for mode in MODES:
        cases.append(Case(f"sqrt.{mode}.f32 {{d}}, {{a}};", "f32", ("f32",), root(mode)))
        cases.append(Case(f"rcp.{mode}.f32 {{d}}, {{a}};", "f32", ("f32",), lambda a, m=mode: rounded(DIV, "f32", m)(1.0, a)))
    near = ("f32", (0.0, 1.0, -1.0, 0.5, 3.25, 100.0, -126.5, 127.9, -3e-3, 2.0**-30, math.inf, -math.inf, math.nan))
    positive = ("f32", (0.0, 1.0, 0.5, 3.25, 1e30, 2.0**-126, math.inf))
    angle = ("f32", (0.0, 1.0, -1.0, 3.0, 0.1, -2.5))
    cases += [
        Case("ex2.approx.ftz.f32 {d}, {a};", "f32", (near,), lambda a: flushed(float(np.exp2(np.float64(a)))), (2.0**-22, 0)),
        Case("ex2.approx.f32 {d}, {a};", "f32", (near,), lambda a: float(np.exp2(np.float64(a))), (2.0**-22, 2.0**-149)),
        Case("lg2.approx.f32 {d}, {a};", "f32", (positive,), lambda a: float(np.log2(np.float64(a))), (2.0**-22, 2.0**-22)),
        Case("rcp.approx.ftz.f32 {d}, {a};", "f32", (positive,), lambda a: flushed(1 / a if a else math.inf), (2.0**-23, 0)),
        Case("rsqrt.approx.f32 {d}, {a};", "f32", (positive,), lambda a: a**-0.5 if a else math.inf, (2.0**-22.9, 0)),
        Case("sqrt.approx.f32 {d}, {a};", "f32", (positive,), math.sqrt, (2.0**-23, 0)),
        Case("sin.approx.f32 {d}, {a};", "f32", (angle,), math.sin, (0, 2.0**-20.5)),
        Case("cos.approx.f32 {d}, {a};", "f32", (angle,), math.cos, (0, 2.0**-20.5)),
        Case("tanh.approx.f32 {d}, {a};", "f32", (near,), math.tanh, (2.0**-11, 0)),
        Case("div.full.f32 {d}, {a}, {b};", "f32", (angle, ("f32", (1.0, 3.0, -0.7))), lambda a, b: a / b, (2.0**-22, 0)),
    ]
    return cases


def bf16_value(bits: int) -> float:
    return float(np.array(bits << 16, np.uint32).view(np.float32))


def bf16_bits(x: float) -> int:
    return 0x7FFF if math.isnan(x) else bits32(x) >> 16


def f16_value(bits: int) -> float:
    return float(np.array(bits, np.uint16).view(np.float16))


def f16_bits(x: float) -> int:
    with np.errstate(all="ignore"):
        return 0x7FFF if math.isnan(x) else int(np.array(x, np.float16).view(np.uint16))


HALF_BITS = {"f16": (f16_value, f16_bits), "bf16": (bf16_value, bf16_bits)}
F16 = (0, 0x8000, 0x3C00, 0xBC00, 0x3555, 0x7BFF, 0x0001, 0x0400, 0x03FF, 0x7C00, 0xFC00, 0x7E00, 0x4248, 0x6400)
BF16 = (0, 0x8000, 0x3F80, 0xBF80, 0x3EAB, 0x7F7F, 0x0001, 0x0080, 0x7F80, 0xFF80, 0x7FC0, 0x4049, 0x3F81)


def half_cases() -> list[Case]:
    cases = []
    for t, values in (("f16", F16), ("bf16", BF16)):
        read, write = HALF_BITS[t]
        one = ("b16", values)
        pair = ("b32", tuple(x | y << 16 for x, y in zip(values, values[3:] + values[:3], strict=True)))
        for name, operation in (("add", ADD), ("sub", SUB), ("mul", MUL), ("fma", FMA)):
            count = 3 if name == "fma" else 2
            if t == "bf16" and name != "fma":
                continue  # from sm_90 on
            apply = rounded(operation, t)

            def single(*x: int, f=apply, read=read, write=write) -> int:
                return write(f(*map(read, x)))

            def double(*x: int, f=single) -> int:
                return f(*(v & 0xFFFF for v in x)) | f(*(v >> 16 for v in x)) << 16

            rn = ".rn" if name == "fma" else ""
            names = ", ".join(f"{{{c}}}" for c in "abc"[:count])
            cases.append(Case(f"{name}{rn}.{t} {{d}}, {names};", "b16", (one,) * count, single))
            cases.append(Case(f"{name}{rn}.{t}x2 {{d}}, {names};", "b32", (pair,) * count, double))
        for name in ("min", "max"):

            def extreme(x: int, y: int, largest=name == "max", read=read, write=write) -> int:
                return write(smallest(read(x), read(y), largest))

            cases.append(Case(f"{name}.{t} {{d}}, {{a}}, {{b}};", "b16", (one, one), extreme))
            cases.append(
                Case(
                    f"{name}.{t}x2 {{d}}, {{a}}, {{b}};",
                    "b32",
                    (pair, pair),
                    lambda x, y, f=extreme: f(x & 0xFFFF, y & 0xFFFF) | f(x >> 16, y >> 16) << 16,
                )
            )
        cases.append(Case(f"neg.{t}x2 {{d}}, {{a}};", "b32", (pair,), lambda x: x ^ 0x80008000))
        cases.append(Case(f"abs.{t} {{d}}, {{a}};", "b16", (one,), lambda x: x & 0x7FFF))
    return cases


def convert_cases() -> list[Case]:
    cases = []
    ints = ("u8", "s8", *INTS)
    for of in ints:
        for to in ints:
            if of != to:
                cases.append(Case(f"cvt.{to}.{of} {{d}}, {{a}};", to, (of,), lambda a, t=to: wrap(a, t)))
                if any(clamp(limit, to) != limit for limit in (clamp(-(2**64), of), clamp(2**64, of))):  # else .sat is not legal
                    cases.append(Case(f"cvt.sat.{to}.{of} {{d}}, {{a}};", to, (of,), lambda a, t=to: clamp(a, t)))
        for to in ("f16", "f32", "f64"):
            for mode in ("rn", "rz") if to == "f16" else MODES:
                cases.append(Case(f"cvt.{mode}.{to}.{of} {{d}}, {{a}};", to, (of,), lambda a, t=to, m=mode: round_to(Fraction(a), t, m)))
    integral = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}

    def to_int(a: float, t: str, f) -> int:
        if math.isnan(a):
            return 2**63 if t[1:] == "64" else 0
        if math.isinf(a):
            return clamp(2**70 if a > 0 else -(2**70), t)
        return clamp(f(a), t)

    for of in ("f16", "f32", "f64"):
        for to in INTS:
            for name, f in integral.items():
                cases.append(Case(f"cvt.{name}.{to}.{of} {{d}}, {{a}};", to, (of,), lambda a, t=to, f=f: to_int(a, t, f)))
        for name, f in integral.items():
            cases.append(
                Case(
                    f"cvt.{name}.{of}.{of} {{d}}, {{a}};",
                    of,
                    (of,),
                    lambda a, f=f: math.copysign(float(f(a)), a) if math.isfinite(a) and abs(a) < 2**60 else a,
                )
            )

    def narrowed(a: float, t: str, mode: str) -> float:
        return round_to(Fraction(a), t, mode, a) if math.isfinite(a) else a

    for mode in MODES:
        cases.append(Case(f"cvt.{mode}.f32.f64 {{d}}, {{a}};", "f32", ("f64",), lambda a, m=mode: narrowed(a, "f32", m)))
    for mode in ("rn", "rz"):
        cases.append(Case(f"cvt.{mode}.f16.f32 {{d}}, {{a}};", "f16", ("f32",), lambda a, m=mode: narrowed(a, "f16", m)))
        cases.append(Case(f"cvt.{mode}.bf16.f32 {{d}}, {{a}};", "b16", ("f32",), lambda a, m=mode: bf16_bits(narrowed(a, "bf16", m))))
        for t in ("f16", "bf16"):
            write = HALF_BITS[t][1]
            cases.append(
                Case(
                    f"cvt.{mode}.{t}x2.f32 {{d}}, {{a}}, {{b}};",
                    "b32",
                    ("f32", "f32"),
                    lambda a, b, t=t, w=write, m=mode: w(narrowed(b, t, m)) | w(narrowed(a, t, m)) << 16,
                )
            )
    cases += [
        Case("cvt.f32.f16 {d}, {a};", "f32", ("f16",), lambda a: a),
        Case("cvt.f32.bf16 {d}, {a};", "f32", (("b16", BF16),), bf16_value),
        Case("cvt.f64.f32 {d}, {a};", "f64", ("f32",), lambda a: a),
        Case("cvt.sat.f32.f32 {d}, {a};", "f32", ("f32",), saturated),
        Case("cvt.ftz.f32.f32 {d}, {a};", "f32", ("f32",), flushed),
        Case(
            "cvt.rna.tf32.f32 {d}, {a};",
            "b32",
            (("f32", (0.0, 1.0, -1 / 3, 1e10, 1 + 2.0**-11, 1 + 2.0**-12)),),
            lambda a: (bits32(a) + 0x1000) & 0xFFFFE000,
        ),
        Case(
            "cvt.rn.relu.bf16x2.f32 {d}, {a}, {b};",
            "b32",
            (("f32", (1.0, -2.0, -0.0)), ("f32", (-1.0, 5.0))),
            lambda a, b: bf16_bits(max(b, 0.0)) | bf16_bits(max(a, 0.0) + 0.0) << 16,
        ),
    ]
    return cases


def predicate_cases() -> list[Case]:
    cases = []
    compare = {
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: a != b,
        "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
    }
    for t in INTS:
        for name, f in compare.items():
            cases.append(Case(f"setp.{name}.{t} {{d}}, {{a}}, {{b}};", "pred", (t, t), f))
    for alias, name in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
        cases.append(Case(f"setp.{alias}.u32 {{d}}, {{a}}, {{b}};", "pred", ("u32", "u32"), compare[name]))
    for t in ("f32", "f64", "f16"):
        for name, f in compare.items():
            ordered = lambda a, b, f=f: not (math.isnan(a) or math.isnan(b)) and f(a, b)  # noqa: E731
            unordered = lambda a, b, f=f: math.isnan(a) or math.isnan(b) or f(a, b)  # noqa: E731
            cases.append(Case(f"setp.{name}.{t} {{d}}, {{a}}, {{b}};", "pred", (t, t), ordered))
            cases.append(Case(f"setp.{name}u.{t} {{d}}, {{a}}, {{b}};", "pred", (t, t), unordered))
        cases.append(Case(f"setp.num.{t} {{d}}, {{a}}, {{b}};", "pred", (t, t), lambda a, b: not (math.isnan(a) or math.isnan(b))))
        cases.append(Case(f"setp.nan.{t} {{d}}, {{a}}, {{b}};", "pred", (t, t), lambda a, b: math.isnan(a) or math.isnan(b)))
    for combine, g in (("and", lambda x, y: x and y), ("or", lambda x, y: x or y), ("xor", lambda x, y: x != y)):
        code = f"setp.eq.s32 %p1, {{c}}, 1;\nsetp.lt.{combine}.s32 {{d}}|%p2, {{a}}, {{b}}, %p1;"
        cases.append(Case(code, "pred", ("s32", "s32", ("s32", (0, 1))), lambda a, b, c, g=g: g(a < b, c == 1)))
        code = f"setp.eq.s32 %p1, {{c}}, 1;\nsetp.lt.{combine}.s32 %p2|{{d}}, {{a}}, {{b}}, !%p1;"
        cases.append(Case(code, "pred", ("s32", "s32", ("s32", (0, 1))), lambda a, b, c, g=g: g(not a < b, c != 1)))
    cases += [
        Case("set.lt.u32.s32 {d}, {a}, {b};", "u32", ("s32", "s32"), lambda a, b: -(a < b)),
        Case("set.ge.f32.s32 {d}, {a}, {b};", "f32", ("s32", "s32"), lambda a, b: float(a >= b)),
        Case(
            "setp.ne.s32 %p1, {c}, 0;\nselp.b32 {d}, {a}, {b}, %p1;", "b32", ("b32", "b32", ("s32", (0, 1))), lambda a, b, c: a if c else b
        ),
        Case("slct.u32.s32 {d}, {a}, {b}, {c};", "u32", ("u32", "u32", "s32"), lambda a, b, c: a if c >= 0 else b),
        Case(
            "slct.f32.f32 {d}, {a}, {b}, {c};", "f32", (("f32", (1.0, 2.0)), ("f32", (3.0, 4.0)), "f32"), lambda a, b, c: a if c >= 0 else b
        ),
        Case("setp.lt.s32 %p1, {a}, {b};\nmov.b32 {d}, 5;\n@%p1 mov.b32 {d}, 7;", "b32", ("s32", "s32"), lambda a, b: 7 if a < b else 5),
        Case(
            "setp.lt.s32 %p1, {a}, {b};\nmov.b32 {d}, 5;\n@!%p1 add.s32 {d}, {a}, {b};",
            "b32",
            ("s32", "s32"),
            lambda a, b: 5 if a < b else a + b,
        ),
        Case("mov.b32 {{%h1, %h2}}, {a};\nmov.b32 {d}, {{%h2, %h1}};", "b32", ("b32",), lambda a: a >> 16 | (a & 0xFFFF) << 16),
        Case("mov.b64 {d}, {{{a}, {b}}};", "b64", ("b32", "b32"), lambda a, b: a | b << 32),
        Case("mov.b64 {{%r11, {d}}}, {a};", "b32", ("b64",), lambda a: a >> 32),
    ]
    return cases


def fp8_value(code: int, exponent_bits: int) -> float:
    """e4m3 (4 bits of exponent) or e5m2 (5): sign, exponent, mantissa."""
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    exponent, mantissa = code >> mantissa_bits & (2**exponent_bits - 1), code & (2**mantissa_bits - 1)
    value = math.ldexp(mantissa + (2**mantissa_bits if exponent else 0), max(exponent, 1) - bias - mantissa_bits)
    return -value if code & 128 else value


def fp8_code(x: float, exponent_bits: int) -> int:
    """The nearest finite code, ties to even; beyond the largest the largest."""
    largest = 0x7E if exponent_bits == 4 else 0x7B
    magnitude = abs(x)
    code = min(range(largest + 1), key=lambda c: (abs(fp8_value(c, exponent_bits) - magnitude), c & 1))
    return code | (128 if math.copysign(1, x) < 0 else 0)


def packed_cases() -> list[Case]:
    """Two values in a register: float32 pairs of sm_100, 8-bit floats of sm_89, factors of 16 bits with a float32 sum."""
    some = (0.0, 1.0, -1 / 3, 1e10, 2.0**-130, -2.5, 3e38)
    pairs = ("b64", tuple(bits32(x) | bits32(y) << 32 for x, y in zip(some, some[2:] + some[:2], strict=True)))
    cases = []

    def values(register: int) -> tuple[float, float]:
        return tuple(np.array([register], np.uint64).view(np.float32).astype(float).tolist())

    for name, operation in (("add", ADD), ("sub", SUB), ("mul", MUL), ("fma", FMA)):
        for mode in MODES:
            apply = rounded(operation, "f32", mode)

            def both(*registers: int, f=apply) -> int:
                low, high = (f(*x) for x in zip(*map(values, registers), strict=True))
                return bits32(low) | bits32(high) << 32

            count = 3 if name == "fma" else 2
            names = ", ".join(f"{{{c}}}" for c in "abc"[:count])
            cases.append(Case(f"{name}.{mode}.f32x2 {{d}}, {names};", "b64", (pairs,) * count, both))
    numbers = ("f32", (0.0, -0.0, 1.0, 0.3, -17.6, 448.0, 449.0, -1e6, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-17, 57344.0, 1e-3))
    for type_, bits in (("e4m3", 4), ("e5m2", 5)):
        cases += [
            Case(
                f"cvt.rn.satfinite.{type_}x2.f32 {{d}}, {{a}}, {{b}};",
                "b16",
                (numbers, numbers),
                lambda a, b, n=bits: fp8_code(b, n) | fp8_code(a, n) << 8,
            ),
            Case(
                f"cvt.rn.f16x2.{type_}x2 {{d}}, {{a}};",
                "b32",
                (("b16", (0x0000, 0x8001, 0x3C38, 0x7B7B, 0x0704)),),
                lambda a, n=bits: f16_bits(fp8_value(a & 255, n)) | f16_bits(fp8_value(a >> 8, n)) << 16,
            ),
        ]
    halves = ("b16", BF16[:8])
    for t in ("u16", "s16", "u8", "s8"):
        n = int(t[1:])
        tail, extra = (".b32", ", {c}") if n == 8 else ("", "")
        cases.append(
            Case(
                f"cvt.pack.sat.{t}.s32{tail} {{d}}, {{a}}, {{b}}{extra};",
                "b32",
                ("s32", "s32", "b32"),
                lambda a, b, c, t=t, n=n: clamp(b, t) % 2**n | clamp(a, t) % 2**n << n | (c << 2 * n if n == 8 else 0),
            )
        )
    cases += [
        Case(
            "fma.rn.f32.bf16 {d}, {a}, {b}, {c};",
            "f32",
            (halves, halves, ("f32", some)),
            lambda a, b, c: rounded(FMA, "f32")(bf16_value(a), bf16_value(b), c),
        ),
        Case(
            "ex2.approx.f16x2 {d}, {a};",
            "b32",
            (("b32", (0x3C000000, 0xC0004400)),),
            lambda a: {0x3C000000: 0x40003C00, 0xC0004400: 0x34004C00}[a],
        ),
        Case("tanh.approx.bf16 {d}, {a};", "b16", (("b16", (0, 0x4180, 0xC180)),), lambda a: {0: 0, 0x4180: 0x3F80, 0xC180: 0xBF80}[a]),
    ]
    return cases


CASES = packed_cases() + integer_cases() + bit_cases() + float_cases() + half_cases() + convert_cases() + predicate_cases()
