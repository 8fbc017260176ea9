"""Operands of tensor cores placed in shared memory, element by element, and the PTX around them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fa4.vgpu.descriptor import MatrixDescriptor, Operand

U32 = np.uint32
TYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
}
A_AT, B_AT = 1024, 65536
SHARED = 100 * 1024


def element_address(d: MatrixDescriptor, operand: Operand, mn: int, k: int) -> int:
    """The byte address of an element, in Python integers."""
    size, s = operand.itemsize, d.swizzle
    per_unit = 16 // size
    if operand.mn_major and s:
        at = d.start + mn * size % s + mn * size // s * d.leading + k % 8 * s + k // 8 * d.stride
    elif operand.mn_major:
        at = d.start + mn // per_unit * d.stride + mn % per_unit * size + k % 8 * 16 + k // 8 * d.leading
    elif s:
        at = d.start + mn % 8 * s + mn // 8 * d.stride + k * size
    else:
        at = d.start + mn % 8 * 16 + mn // 8 * d.stride + k // per_unit * d.leading + k % per_unit * size
    for bit in {0: [], 32: [4], 64: [4, 5], 128: [4, 5, 6]}[s]:
        at ^= (at >> bit + 3 & 1) << bit
    return at


def matrix(rng, shape, type_):
    """Small integers: every product and sum is exact."""
    low = 0 if type_ == "u8" else -4
    return rng.integers(low, 5, shape).astype(np.float32).astype(TYPES[type_])


def layout(start, operand, swizzle):
    """Packed: rows of the swizzle follow each other in groups of 8."""
    row, span = swizzle or 16, operand.mn if operand.mn_major else operand.k
    bytes_ = span * operand.itemsize
    if not swizzle:
        far = bytes_ // 16 * 128
        return MatrixDescriptor(start, far, 128, 0) if operand.mn_major else MatrixDescriptor(start, 128, far, 0)
    leading = 8 * row * (operand.k // 8) if operand.mn_major else 16
    return MatrixDescriptor(start, leading, 8 * row, swizzle)


def place(memory, descriptor, operand, values):
    """Write a matrix (mn, k) into an image of shared memory."""
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(operand.mn, operand.k, -1)
    for mn, k in np.ndindex(operand.mn, operand.k):
        at = element_address(descriptor, operand, mn, k)
        memory[at : at + operand.itemsize] = raw[mn, k]


def fill_shared(memory):
    """Copy buffer b to shared memory, with 128 threads."""
    return f"""
    mov.u32 %r1, %r0;
    FILL:
    mul.wide.u32 %d3, %r1, 16;
    add.u64 %d3, %d3, %d1;
    ld.global.v4.u32 {{%r2, %r3, %r4, %r5}}, [%d3];
    shl.b32 %r6, %r1, 4;
    st.shared.v4.u32 [%r6], {{%r2, %r3, %r4, %r5}};
    add.u32 %r1, %r1, %ntid.x;
    setp.lt.u32 %p1, %r1, {len(memory) // 16};
    @%p1 bra FILL;
    bar.sync 0;
    """


def registers(first, count):
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def dump(first, count):
    """Each thread's result registers to buffer c."""
    lines = [f"mul.wide.u32 %d3, %r0, {4 * count};", "add.u64 %d3, %d3, %d2;"]
    return "\n".join(lines + [f"st.global.u32 [%d3+{4 * i}], %r{first + i};" for i in range(count)])
