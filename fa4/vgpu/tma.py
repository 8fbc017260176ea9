"""Boxes between tensors in global memory and shared memory (PTX ISA 5.5): bounds, zero fill, swizzle, reductions.

In shared memory a box lies in row-major order, the innermost dimension contiguous; then a swizzle moves units of 16 bytes: bits 4 and up of
the address in shared memory are XORed with bits 7 and up, as many as the span says (1, 2 or 3 for 32, 64 or 128 bytes).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu import numerics
from fa4.vgpu.errors import OutOfBoundsError
from fa4.vgpu.memory import FaultError, GlobalMemory
from fa4.vgpu.tensor_map import TensorMap

Array = npt.NDArray[Any]


def box_view(map_: TensorMap, start: tuple[int, ...], memory: GlobalMemory, write: bool) -> tuple[Array | None, tuple[slice, ...]]:
    """The part of a box that lies inside the tensor, as a view of its buffer in elements; and where in the box it is, outermost first.

    Only the addresses that are used must lie in a buffer: the tensor's own address may be anywhere, and addresses wrap.

    Raises:
        FaultError: they do not, or the buffer is read-only.
    """
    size = map_.element_bytes
    strides = (size, *map_.strides)
    first, span = map_.address, size
    shape, where = [], []
    for at, n, limit, stride in zip(start, map_.box, map_.sizes, strides, strict=True):
        low, high = max(0, -at), min(n, limit - at)
        if high <= low:
            return None, ()
        first += (at + low) * stride
        span += (high - low - 1) * stride
        shape.append(high - low)
        where.append(slice(low, high))
    first %= 1 << 64
    buffer = memory.find(first, span)
    if buffer is None:
        beyond = memory.outside(np.array([first], np.uint64), span, None).message
        raise FaultError(OutOfBoundsError, f"box at {start} of a tensor map at {map_.address:#x}: {beyond}")
    if write and not buffer.writable:
        raise FaultError(OutOfBoundsError, f"a write to buffer {buffer.name!r}, which is read-only")
    if memory.sharing is not None:
        memory.sharing.box(buffer, first, (*shape[::-1], size), (*strides[::-1], 1), write)
    view: Array = np.ndarray(shape[::-1], f"u{size}", buffer.data.data, first - buffer.address, strides[::-1])
    return view, tuple(where[::-1])


@lru_cache(maxsize=1024)
def _order(first: int, units: int, span: int) -> Array:
    """Which unit of 16 bytes of a box lies in each unit of shared memory, from unit ``first`` (of 64) on; it is its own inverse."""
    unit = np.arange(first, first + units)
    return (unit ^ (unit >> 3 & span // 16 - 1)) - first


def swizzled(data: Array, offset: int, span: int) -> Array:
    """Bytes of a box as they lie in shared memory at ``offset``, or back: units of 16 bytes change places."""
    if not span:
        return data
    units = data.reshape(-1).view(np.uint64).reshape(-1, 2)
    return units.take(_order(offset >> 4 & 63, len(units), span), axis=0).reshape(-1).view(np.uint8)


def load_box(map_: TensorMap, start: tuple[int, ...], offset: int, memory: GlobalMemory) -> Array:
    """The bytes that a load brings to shared memory at ``offset``; zeros outside of the tensor."""
    view, where = box_view(map_, start, memory, False)
    shape = map_.box[::-1]
    if view is not None and view.shape == shape:
        box = np.ascontiguousarray(view)
    else:
        box = np.zeros(shape, f"u{map_.element_bytes}")
        if view is not None:
            box[where] = view
    return swizzled(box.reshape(-1).view(np.uint8), offset, map_.swizzle)


def store_box(map_: TensorMap, start: tuple[int, ...], offset: int, data: Array, target: tuple[GlobalMemory, str]) -> None:
    """Write the bytes that lay in shared memory at ``offset``, or combine them with what is there; ``target`` is (memory, operation)."""
    memory, operation = target
    view, where = box_view(map_, start, memory, True)
    if view is None:
        return
    box = swizzled(data, offset, map_.swizzle).view(f"u{map_.element_bytes}").reshape(map_.box[::-1])[where]
    view[...] = box if not operation else reduced(operation, map_.type, view, box)


REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def reduction_fits(operation: str, type_: str) -> bool:
    """Whether a type can be combined in this way (PTX ISA 9.7.9.25.4.2 and 9.7.9.25.5.3)."""
    if operation in ("inc", "dec"):
        return type_ == "u32"
    if operation in ("and", "or", "xor"):
        return type_[0] in "usb" and type_[1:] in ("32", "64")
    if type_ in ("f32", "f32.ftz", "f64"):
        return operation == "add"
    return type_ in ("f16", "bf16", "u32", "s32", "u64", "s64")


def reduced(operation: str, type_: str, old: Array, new: Array) -> Array:
    """``old`` combined with ``new``, as bits; each element is rounded once."""
    if type_ == "bf16":
        a, b = numerics.from_bf16(old), numerics.from_bf16(new)
        return numerics.to_bf16(a + b if operation == "add" else numerics.minmax(a, b, largest=operation == "max"))
    bits = 8 * old.dtype.itemsize
    kind = {"s": "i", "f": "f"}.get(type_[0], "u")
    a, b = np.ascontiguousarray(old).view(f"{kind}{bits // 8}"), np.ascontiguousarray(new).view(f"{kind}{bits // 8}")
    if operation == "add":
        value = a + b
        value = numerics.flush(value) if type_ == "f32.ftz" else value
    elif operation in ("min", "max"):
        value = (
            numerics.minmax(a, b, largest=operation == "max") if kind == "f" else (np.minimum if operation == "min" else np.maximum)(a, b)
        )
    elif operation == "inc":
        value = np.where(a >= b, np.uint32(0), a + np.uint32(1))
    elif operation == "dec":
        value = np.where((a == 0) | (a > b), b, a - np.uint32(1))
    else:
        value = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[operation](a, b)
    return np.asarray(value).view(old.dtype)
