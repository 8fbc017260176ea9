"""Shared-memory matrix descriptors of wgmma (PTX ISA 9.7.15.5.1) and tcgen05 (9.7.16.4.1): 64 bits that say where an operand lies.

Memory is seen in units of 16 bytes; S is the length of a row of the swizzle in bytes (32, 64, 128), T the elements in a unit. The unit
of element (mn, k), before the swizzle:

K-major, swizzled: ``start + (mn % 8) S + (mn / 8) stride + 16 (k / T)``; one instruction's K never leaves a row.
K-major, plain: ``start + 16 (mn % 8) + (mn / 8) stride + (k / T) leading``.
MN-major, swizzled, u = mn / T, U = S / 16: ``start + 16 (u % U) + (u / U) leading + (k % 8) S + (k / 8) stride``.
MN-major, plain: ``start + u stride + 16 (k % 8) + (k / 8) leading``.

The swizzle then exchanges units: bits 4.. of the address are XORed with bits 7.. (three bits for S = 128, two for 64, one for 32). It
acts on addresses of shared memory, not on offsets from ``start``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.errors import MatrixDescriptorError, UnsupportedInstructionError
from fa4.vgpu.memory import Block, FaultError

Array = npt.NDArray[Any]

UNIT = 16
_FIELD = (1 << 14) - 1
_SWIZZLE_90 = {0: 0, 1: 128, 2: 64, 3: 32}
_SWIZZLE_100 = {0: 0, 2: 128, 4: 64, 6: 32}
_WIDE_ATOMS = 1  # sm_100: 128-byte swizzle of 32-byte atoms

# Bits that a descriptor must leave 0, and those that must have one value.
_RESERVED_90 = 3 << 14 | 3 << 30 | 7 << 46 | 0x3FF << 52
_RESERVED_100 = 3 << 14 | 3 << 30 | 3 << 47 | 0xFF << 53
_VERSION_100 = 1 << 46


@dataclass(frozen=True)
class MatrixDescriptor:
    """All in bytes. ``start`` is the offset in shared memory (18 bits), ``swizzle`` the length S of a row (0: none)."""

    start: int
    leading: int
    stride: int
    swizzle: int

    def encode(self, blackwell: bool) -> int:
        """The 64 bits, in the form of sm_100 or of sm_90."""
        bits = self.start // UNIT | self.leading // UNIT << 16 | self.stride // UNIT << 32
        codes = _SWIZZLE_100 if blackwell else _SWIZZLE_90
        code = next(c for c, swizzle in codes.items() if swizzle == self.swizzle)
        return bits | (_VERSION_100 | code << 61 if blackwell else code << 62)


@lru_cache(maxsize=65536)
def decode(bits: int, blackwell: bool, name: str) -> MatrixDescriptor:
    """The fields of the descriptor of operand ``name``.

    Raises:
        FaultError: a reserved bit is set, a fixed one is missing, or what the descriptor asks for is not modelled.
    """
    if bits & (_RESERVED_100 if blackwell else _RESERVED_90):
        raise _fault(name, bits, f"bits {_numbers(bits & (_RESERVED_100 if blackwell else _RESERVED_90))} are reserved and must be 0")
    if blackwell and not bits & _VERSION_100:
        raise _fault(name, bits, "bits 46 to 48 must be 1, the version of sm_100 descriptors")
    if bits >> 49 & 7:
        raise _unsupported(
            name, bits, f"a base offset ({bits >> 49 & 7}): the operand's swizzle pattern must begin at a multiple of its size"
        )
    if blackwell and bits >> 52 & 1:
        raise _unsupported(name, bits, "an absolute leading dimension (bit 52)")
    code = bits >> 61 if blackwell else bits >> 62
    codes = _SWIZZLE_100 if blackwell else _SWIZZLE_90
    if blackwell and code == _WIDE_ATOMS:
        raise _unsupported(name, bits, "the 128-byte swizzle of 32-byte atoms")
    if code not in codes:
        raise _fault(name, bits, f"layout {code} does not exist: must be one of {sorted(codes)}")
    return MatrixDescriptor((bits & _FIELD) * UNIT, (bits >> 16 & _FIELD) * UNIT, (bits >> 32 & _FIELD) * UNIT, codes[code])


def _numbers(bits: int) -> str:
    return ", ".join(str(i) for i in range(64) if bits >> i & 1)


def _fault(name: str, bits: int, message: str) -> FaultError:
    return FaultError(MatrixDescriptorError, f"descriptor of {name}, {bits:#018x}: {message}")


def _unsupported(name: str, bits: int, message: str) -> FaultError:
    return FaultError(UnsupportedInstructionError, f"descriptor of {name}, {bits:#018x}: {message}")


def swizzled(address: Array, swizzle: int) -> Array:
    """Addresses after the swizzle with rows of ``swizzle`` bytes (0: none)."""
    return np.asarray(address ^ (address >> 3 & (swizzle - UNIT if swizzle else 0)))


@dataclass(frozen=True)
class Operand:
    """A matrix as an instruction sees it: ``mn`` rows (M or N) of ``k`` elements of ``itemsize`` bytes, contiguous along K or MN."""

    name: str
    mn: int
    k: int
    itemsize: int
    mn_major: bool


@lru_cache(maxsize=4096)
def unit_map(operand: Operand, leading: int, stride: int, swizzle: int, phase: int) -> Array:
    """Numbers of units: (mn, units of K) where K is contiguous, (k, units of MN) where MN is.

    They count from the last multiple of the swizzle's period, 8 rows, at or before the start, which is ``phase`` bytes behind it.
    """
    if operand.mn_major:
        outer = np.arange(operand.k)[:, None]
        unit = np.arange(operand.mn * operand.itemsize // UNIT)[None, :]
        if swizzle:
            across = swizzle // UNIT
            offset = unit % across * UNIT + unit // across * leading + outer % 8 * swizzle + outer // 8 * stride
        else:
            offset = unit * stride + outer % 8 * UNIT + outer // 8 * leading
    else:
        outer = np.arange(operand.mn)[:, None]
        unit = np.arange(operand.k * operand.itemsize // UNIT)[None, :]
        row, step = (swizzle, UNIT) if swizzle else (UNIT, leading)
        offset = outer % 8 * row + outer // 8 * stride + unit * step
    return np.asarray(swizzled(phase + offset, swizzle) // UNIT)


@lru_cache(maxsize=4096)
def locate(descriptors: tuple[int, ...], blackwell: bool, operand: Operand) -> tuple[int, Array]:
    """Where several operands lie that follow each other along K: (first unit, numbers of units from there on).

    The numbers are (mn, units of all K) where K is contiguous, (all of K, units of MN) where MN is.

    Raises:
        FaultError: a descriptor is wrong, or the operand cannot have this layout.
    """
    contiguous = (operand.mn if operand.mn_major else operand.k) * operand.itemsize
    if contiguous % UNIT:
        raise FaultError(MatrixDescriptorError, f"{operand.name}: {contiguous} contiguous bytes are not a multiple of {UNIT}")
    units = []
    for bits in descriptors:
        d = decode(bits, blackwell, operand.name)
        if d.swizzle and not operand.mn_major and d.start % d.swizzle + contiguous > d.swizzle:
            message = f"{contiguous} bytes of K from address {d.start:#x} on leave the row of a {d.swizzle}-byte swizzle"
            raise FaultError(MatrixDescriptorError, f"{operand.name}: {message}")
        phase = d.start % (8 * d.swizzle) if d.swizzle else 0
        units.append(unit_map(operand, d.leading, d.stride, d.swizzle, phase) + (d.start - phase) // UNIT)
    first = min(int(u.min()) for u in units)
    return first, np.concatenate(units, axis=0 if operand.mn_major else 1) - first


def read(shared: Block, descriptors: tuple[int, ...], blackwell: bool, operand: Operand) -> Array:
    """The bytes of operands that follow each other along K, as uint64.

    They are (mn, K itemsize / 8), or (K, mn itemsize / 8) where MN is contiguous.

    Raises:
        FaultError: a layout is impossible, leaves shared memory, or covers bytes that are not written.
    """
    first, units = locate(descriptors, blackwell, operand)
    data, state, _size = shared.view("u8", 2)
    try:
        value = data[first:].take(units, axis=0)
    except IndexError:
        address = (first + units).reshape(-1).astype(np.uint64) * np.uint64(UNIT)
        fault = shared.outside(address, UNIT, None)
        raise FaultError(fault.error, f"{operand.name}: {fault.message}") from None
    if state is not None:
        written = state[first:].take(units, axis=0)
        if np.bitwise_and.reduce(written, axis=None) != ~np.uint64(0):
            _unwritten(shared, written, first + units, operand)
    return value.reshape(len(units), -1)


def _unwritten(shared: Block, state: Array, units: Array, operand: Operand) -> None:
    try:
        shared.check_state(state.reshape(-1, 2), units.reshape(-1) * UNIT, None)
    except FaultError as fault:
        raise FaultError(fault.error, f"{operand.name}: {fault.message}") from None
