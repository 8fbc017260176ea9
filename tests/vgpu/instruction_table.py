# ruff: noqa: E501 -- kernels and rows of tables in one line
"""Single instructions: what to execute, on which operands, and what must come out, stated with Python's exact numbers.

A case is a kernel in which every thread loads its operands, executes the snippet and stores the result. Nothing here knows about the
virtual GPU: ``kernel_text`` and the arrays can be run on a real one just as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

DTYPES = {
    **{f"u{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    **{f"s{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"b{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "bf16": "uint16",
    "f16x2": "uint32",
    "bf16x2": "uint32",
}


@dataclass(frozen=True)
class Case:
    """``code`` uses {d} for the result and {a}, {b}, ... for operands; ``expected`` maps Python values to one.

    ``operands`` are types, or (type, values). With ``tolerance`` (relative, absolute) the result need only be near.
    """

    code: str
    result: str
    operands: tuple[Any, ...]
    expected: Callable[..., Any]
    tolerance: tuple[float, float] = (0.0, 0.0)

    def __str__(self) -> str:
        return (
            self.code.split(";")[0].replace("{", "").replace("}", "")
            + f" {'/'.join(t if isinstance(t, str) else t[0] for t in self.operands)}"
        )


# First compute capability of what sm_80 does not have, by a part of the instruction; ptxas says so (test_instructions_on_gpu.py asks it).
LEAST_ARCH = {
    "xorsign.abs": 86,
    "e4m3x2": 89,
    "e5m2x2": 89,
    "add.u16x2": 90,
    "tanh.approx.bf16": 90,
    "f32x2": 100,
    "fma.rn.f32.bf16": 100,
    "max.f32 {d}, {a}, {b}, {c}": 100,
}


def least_arch(case: Case) -> int:
    """Compute capability that a case needs, as in sm_80."""
    return max((number for part, number in LEAST_ARCH.items() if part in case.code), default=80)


def edge_values(type_: str) -> list[Any]:
    if type_[0] in "usb" and type_ != "bf16" and not type_.startswith("bf"):
        bits = int(type_[1:])
        values = [
            0,
            1,
            2,
            3,
            7,
            15,
            31,
            32,
            33,
            100,
            2 ** (bits - 1) - 1,
            2 ** (bits - 1),
            2**bits - 1,
            2**bits - 2,
            0x5A5A5A5A5A5A5A5A,
            0xFEDCBA9876543210,
        ]
        values = [v % 2**bits for v in values]
        return [v - 2**bits if type_[0] == "s" and v >= 2 ** (bits - 1) else v for v in values]
    floats = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, -2.5, 3.0, 1 / 3, 1e-3, 12345.678, math.inf, -math.inf, math.nan]
    if type_ == "f32":
        floats += [
            2.0**-126,
            2.0**-149,
            -(2.0**-130),
            3.4028234e38,
            -3.4028234e38,
            1 + 2.0**-23,
            2.0**31,
            -(2.0**31),
            4294967040.0,
            2.0**63,
            1e10,
            2.0**-120,
        ]
    if type_ == "f64":
        floats += [5e-324, 1.7e308, 2.0**31, 2.0**63, 2.0**64, 1 + 2.0**-52, 1e-310, 3.4028235677973366e38, 1.5 * 2.0**-149, 1 + 2.0**-24]
    if type_ == "f16":
        floats += [2.0**-14, 2.0**-24, 65504.0, -65504.0, 1 + 2.0**-10]
    return floats


def operand_arrays(case: Case, most: int = 640) -> list[np.ndarray]:
    """All combinations of edge values, thinned out evenly, with random bits behind."""
    lists = [edge_values(o) if isinstance(o, str) else list(o[1]) for o in case.operands]
    names = [o if isinstance(o, str) else o[0] for o in case.operands]
    rows = list(itertools.product(*lists))
    rows = rows[:: -(-len(rows) // most)]
    rng = np.random.default_rng(7)
    arrays = []
    for i, (o, name) in enumerate(zip(case.operands, names, strict=True)):
        dtype = DTYPES[name]
        with np.errstate(all="ignore"):
            array = np.array([row[i] for row in rows], dtype)
        size = np.dtype(dtype).itemsize
        extra = (
            rng.integers(0, 256, 64 * size, dtype=np.uint8).view(dtype)
            if isinstance(o, str)
            else np.array([o[1][j % len(o[1])] for j in range(64)], dtype)
        )
        arrays.append(np.concatenate([array, extra]))
    return arrays


def register(type_: str) -> str:
    return "%" + {8: "h", 16: "h", 32: "r", 64: "d"}[8 * np.dtype(DTYPES[type_]).itemsize]


def kernel_text(case: Case, target: str = "sm_80") -> str:
    names = [o if isinstance(o, str) else o[0] for o in case.operands]
    lines = [f".version 8.8\n.target {target}\n.address_size 64", ".visible .entry case("]
    lines.append(",\n".join(f".param .u64 p{i}" for i in range(len(names) + 2)) + ")")
    lines.append("{\n.reg .pred %p<9>;\n.reg .b16 %h<20>;\n.reg .b32 %r<30>;\n.reg .b64 %d<40>;")
    lines.append("mov.u32 %r20, %ctaid.x;\nmov.u32 %r21, %ntid.x;\nmov.u32 %r22, %tid.x;\nmad.lo.u32 %r20, %r20, %r21, %r22;")
    lines.append("ld.param.u64 %d39, [p0];\ncvt.u32.u64 %r21, %d39;\nsetp.ge.u32 %p8, %r20, %r21;\n@%p8 bra DONE;")
    fields = {}
    for i, name in enumerate(names):
        size = np.dtype(DTYPES[name]).itemsize
        reg = f"{register(name)}{i}"
        fields["abcdef"[i]] = reg
        lines.append(
            f"ld.param.u64 %d{20 + i}, [p{i + 1}];\nmad.wide.u32 %d{20 + i}, %r20, {size}, %d{20 + i};\nld.global.b{8 * size} {reg}, [%d{20 + i}];"
        )
    out = f"{register(case.result)}10" if case.result != "pred" else "%p7"
    lines.append(case.code.format(d=out, **fields))
    result = "b8" if case.result == "pred" else f"b{8 * np.dtype(DTYPES[case.result]).itemsize}"
    if case.result == "pred":
        lines.append("selp.b16 %h10, 1, 0, %p7;")
        out = "%h10"
    lines.append(
        f"ld.param.u64 %d30, [p{len(names) + 1}];\nmad.wide.u32 %d30, %r20, {int(result[1:]) // 8}, %d30;\nst.global.{result} [%d30], {out};"
    )
    lines.append("DONE:\nret;\n}")
    return "\n".join(lines)


def expected_array(case: Case, arrays: list[np.ndarray]) -> np.ndarray:
    with np.errstate(all="ignore"):
        values = [case.expected(*row) for row in zip(*(a.tolist() for a in arrays), strict=True)]
    if case.result == "pred":
        return np.array([bool(v) for v in values])
    dtype = np.dtype(DTYPES[case.result])
    if dtype.kind in "iu":
        bits = 8 * dtype.itemsize
        return np.array([int(v) % 2**bits for v in values], f"u{dtype.itemsize}").view(dtype)
    with np.errstate(all="ignore"):
        return np.array(values, dtype)


def _sign(x: float) -> float:
    return math.copysign(1.0, x)


# Exact rounding, written with rationals and independent of the machine.

FORMATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}


def round_to(exact: Fraction, format_: str, mode: str = "rn", zero: float = 0.0) -> float:
    """``exact`` in a binary format: rn, rz, rm, rp; ``zero`` is the result where it is 0."""
    if exact == 0:
        return zero
    digits, low, high = FORMATS[format_]
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, low) - digits + 1)
    steps = exact / quantum
    down = steps.numerator // steps.denominator
    rest = steps - down
    if mode == "rn":
        up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2 == 1)
    else:
        up = rest > 0 and (mode == "rp" or (mode == "rz" and exact < 0))
    value = (down + up) * quantum
    if value == 0:
        return math.copysign(0.0, -1 if exact < 0 else 1)
    largest = (2 - Fraction(2) ** (1 - digits)) * Fraction(2) ** high
    if abs(value) > largest:
        toward_zero = mode == "rz" or (mode == "rm" and exact > 0) or (mode == "rp" and exact < 0)
        return math.copysign(float(largest) if toward_zero else math.inf, -1 if exact < 0 else 1)
    return float(value)


def rounded(operation: Callable[..., Any], format_: str, mode: str = "rn") -> Callable[..., float]:
    """An operation on finite values rounded once; IEEE 754 for the rest, by way of float64."""

    def apply(*x: float) -> float:
        with np.errstate(all="ignore"):
            plain = float(operation(*map(np.float64, x)))
        if not all(map(math.isfinite, x)):
            return plain
        try:
            exact = operation(*map(Fraction, x))
        except ZeroDivisionError:
            return plain
        zero = plain
        if exact == 0 and mode == "rm" and operation in (ADD, SUB, FMA):  # IEEE 754, 6.3
            terms = {ADD: x, SUB: (x[0], -x[1]), FMA: (_sign(x[0]) * _sign(x[1]), x[2])} if len(x) == 3 else {ADD: x, SUB: (x[0], -x[-1])}
            first, second = terms[operation]
            zero = -0.0 if _sign(first) != _sign(second) or _sign(first) < 0 else 0.0
        return round_to(exact, format_, mode, zero)

    return apply


def ADD(a, b):  # noqa: N802
    return a + b


def SUB(a, b):  # noqa: N802
    return a - b


def MUL(a, b):  # noqa: N802
    return a * b


def DIV(a, b):  # noqa: N802
    return a / b


def FMA(a, b, c):  # noqa: N802
    return a * b + c


def wrap(value: int, type_: str) -> int:
    bits = int(type_[1:])
    value %= 2**bits
    return value - 2**bits if type_[0] == "s" and value >= 2 ** (bits - 1) else value


def clamp(value: int, type_: str) -> int:
    bits = int(type_[1:])
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if type_[0] == "s" else (0, 2**bits - 1)
    return min(max(value, low), high)
