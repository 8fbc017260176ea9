"""Numerics of the asynchronous tensor cores (wgmma, tcgen05.mma).

Inputs are converted to float32 exactly. The products of one instruction are exact; they are summed in float32 in whatever order the host's
BLAS chooses, and the accumulator is added last, in float32. Instructions that are carried out together give what they give one by one, so
that no bit depends on the schedule. The hardware's own order, alignment and truncation are neither documented nor modelled: in
particular Hopper sums 8-bit floats with fewer bits than float32 has, which does not show here. Integers are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fa4.vgpu import numerics

Array = npt.NDArray[Any]

ITEMSIZE = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
"""Types of A and B: bytes of an element."""

_FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
_SIXTEEN = np.uint32(16)


@lru_cache
def _byte_values(type_: str) -> Array:
    """float32 of each byte."""
    return np.asarray(np.arange(256, dtype=np.uint8).view({**_FP8, "s8": np.int8, "u8": np.uint8}[type_]).astype(np.float32))


def decode(words: Array, type_: str) -> Array:
    """Contiguous unsigned words to the float32 elements that they hold, low bits first along the last axis; exact."""
    if type_ == "bf16":
        return np.asarray(np.left_shift(words.view(np.uint16), _SIXTEEN, dtype=np.uint32).view(np.float32))
    if type_ == "f16":
        return words.view(np.float16).astype(np.float32)
    if type_ == "tf32":  # the low 13 bits do not take part
        return np.asarray((words.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32))
    return np.asarray(_byte_values(type_).take(words.view(np.uint8)))


def multiply(a: Array, b: Array, k: int) -> Iterator[Array]:
    """A (m, K) times the transpose of B (n, K), both float32, for ``k`` columns after the other; exact for 8-bit integers up to k = 256."""
    for i in range(0, a.shape[1], k):
        yield np.matmul(a[:, i : i + k], b[:, i : i + k].T)


def accumulate(product: Array, accumulator: Array | None, type_: str, clamp: bool = False) -> Array:
    """``product``, which is used up, plus the accumulator (float32, float16 or int32 as ``type_`` says; None: 0) in the accumulator's type.

    ``clamp`` keeps int32 in its range (``.satfinite``); without it they wrap around.
    """
    if type_ == "s32":
        total = product.astype(np.int64)
        if accumulator is not None:
            total += accumulator
        return (total.clip(-(2**31), 2**31 - 1) if clamp else total).astype(np.uint64).astype(np.uint32).view(np.int32)
    if accumulator is not None:
        product += accumulator
    return product if type_ == "f32" else numerics.to_f16(product)
