"""Tensor maps: the 128 bytes that describe a tensor in global memory to the TMA unit (CUDA driver API, ``cuTensorMapEncodeTiled``).

Their layout is not documented; this is what CuTe-DSL's host code writes, which builds them itself. As 32-bit words: 0 and 1 the address;
2 bits 0-3 the kind (2), 4-6 rank - 1, 7-10 the element type, 11-12 interleave, 13-14 swizzle, 17-18 L2 promotion, 21 set from 128 KiB on;
3 to 6 strides of dimensions 1 to 4 in units of 16 bytes, of which word 7 holds four more bits each; 8 to 12 sizes - 1; 13 bits 0-14 element
strides - 1 (three bits each), bits 24-31 and the bytes of 14 box sizes - 1. The rest means nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32.ftz", "f64", "bf16", "tf32")
"""Element types by the number in a map."""

DRIVER_TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32.ftz", "tf32")
"""Element types by the number in ``CUtensorMapDataType``."""

SWIZZLE_BYTES = (0, 32, 64, 128)
MAP_BYTES = 128
_TILED = 2


@dataclass(frozen=True)
class TensorMap:
    """A tiled map, the innermost dimension first.

    ``strides`` in bytes, of all dimensions but the first; ``swizzle`` in bytes, 0 for none; no ``element_strides`` where all are 1.
    """

    address: int
    type: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    element_strides: tuple[int, ...] = ()
    interleave: int = 0

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.sizes)

    @property
    def element_bytes(self) -> int:
        """Size of an element."""
        return {"u8": 1, "u16": 2, "f16": 2, "bf16": 2, "u64": 8, "s64": 8, "f64": 8}.get(self.type, 4)

    @property
    def box_bytes(self) -> int:
        """What one box takes in shared memory, and counts in a transaction."""
        size = self.element_bytes
        for n in self.box:
            size *= n
        return size

    def problem(self) -> str:
        """The first rule that the map breaks, with name and value; empty if it is valid."""
        inner = self.box[0] * self.element_bytes
        if self.address % 16:
            return f"global address {self.address:#x}: must be a multiple of 16"
        for i, size in enumerate(self.sizes):
            if not 1 <= size <= 2**32:
                return f"size {size} of dimension {i}: must be 1 to 2^32"
        for i, stride in enumerate(self.strides, 1):
            if stride % 16 or not 0 <= stride < 2**40:
                return f"stride {stride} of dimension {i}: must be a multiple of 16 bytes below 2^40"
        for i, size in enumerate(self.box):
            if not 1 <= size <= 256:
                return f"box size {size} of dimension {i}: must be 1 to 256"
        if self.interleave:
            return f"interleave {self.interleave}: only layouts without interleave are modelled"
        if self.element_strides:
            return f"element strides {self.element_strides}: only 1 is modelled"
        if inner % 16:
            return f"inner box size {self.box[0]} of {self.element_bytes} bytes: {inner} bytes are not a multiple of 16"
        if self.swizzle and inner > self.swizzle:
            return f"inner box size {self.box[0]} of {self.element_bytes} bytes: {inner} bytes exceed the swizzle span of {self.swizzle}"
        return ""

    def encode(self) -> bytes:
        """The 128 bytes."""
        rank, words = self.rank, [0] * 32
        words[0], words[1] = self.address & 0xFFFFFFFF, self.address >> 32
        control = _TILED | (rank - 1) << 4 | TYPES.index(self.type) << 7 | self.interleave << 11
        words[2] = control | SWIZZLE_BYTES.index(self.swizzle) << 13
        for i, stride in enumerate(self.strides):
            words[3 + i] = stride >> 4 & 0xFFFFFFFF
            words[7] |= (stride >> 36) << 4 * i
        for i in range(rank):
            words[8 + i] = self.sizes[i] - 1
        for i, stride in enumerate(self.element_strides):
            words[13] |= (stride - 1) << 3 * i
        words[13] |= (self.box[0] - 1) << 24
        for i, size in enumerate(self.box[1:]):
            words[14] |= (size - 1) << 8 * i
        return struct.pack("<32I", *words)


def decode(data: bytes) -> TensorMap:
    """The map that 128 bytes hold.

    Raises:
        ValueError: they hold no tiled map.
    """
    w = struct.unpack("<16I", data[:64])
    rank, type_ = (w[2] >> 4 & 7) + 1, w[2] >> 7 & 15
    if w[2] & 15 != _TILED or rank > 5 or type_ >= len(TYPES):
        raise ValueError(f"no tiled tensor map: control word {w[2]:#x}")
    strides = tuple((w[3 + i] | (w[7] >> 4 * i & 15) << 32) << 4 for i in range(rank - 1))
    box = (w[13] >> 24, *(w[14] >> 8 * i & 255 for i in range(rank - 1)))
    element_strides = tuple((w[13] >> 3 * i & 7) + 1 for i in range(rank))
    return TensorMap(
        address=w[0] | w[1] << 32,
        type=TYPES[type_],
        sizes=tuple(n + 1 for n in w[8 : 8 + rank]),
        strides=strides,
        box=tuple(n + 1 for n in box),
        swizzle=SWIZZLE_BYTES[w[2] >> 13 & 3],
        element_strides=() if set(element_strides) == {1} else element_strides,
        interleave=w[2] >> 11 & 3,
    )
