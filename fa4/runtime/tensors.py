"""Tensors as kernels take them: aligned operands, and host memory that passes for device memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CPU, _CUDA = 1, 2  # DLDeviceType


def kernel_operand(x: Tensor) -> Tensor:
    """``x`` (B, S, H, D) itself where a kernel can read it, otherwise one contiguous copy.

    A kernel copies 16 bytes at a time along the last dimension, so the base address and the other strides must be multiples of 16
    bytes and the last stride 1. The stride of a dimension of size 1 is never used.
    """
    batch, row, head, last = x.stride()
    if last == 1 and not (x.data_ptr() | (batch | row | head) * x.element_size()) % 16:
        return x
    used = (stride * x.element_size() for size, stride in zip(x.shape[:3], x.stride(), strict=False) if size > 1)
    aligned = last == 1 and x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in used)
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def dense_operand(x: Tensor) -> Tensor:
    """``kernel_operand``, with a copy also of a tensor that is expanded along any dimension: strides of 0 are not for the TMA unit."""
    expanded = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.clone(memory_format=torch.contiguous_format) if expanded else kernel_operand(x)


def aux_operand(x: Tensor) -> Tensor:
    """A tensor that a user's function reads: itself where its last stride is 1, otherwise one contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.clone(memory_format=torch.contiguous_format)


class _DLTensor(ctypes.Structure):
    """DLTensor of DLPack, with which an unversioned DLManagedTensor begins."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class HostTensor:
    """A CPU tensor or array, of any library, that says it lies on a GPU: host code accepts it, and the virtual GPU uses its memory."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **_options: Any) -> Any:
        capsule = self.tensor.__dlpack__()  # made for this call: nobody else sees what is changed in it
        _header(capsule).device_type = _CUDA
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0


@dataclass(frozen=True)
class Extent:
    """The memory of a tensor: its elements lie between the addresses ``begin`` and ``end``; the same two if it has none."""

    shape: tuple[int, ...]
    begin: int
    end: int


def extent(capsule: Any) -> Extent:
    """Of a tensor given as a DLPack capsule."""
    header = _header(capsule)
    shape = tuple(header.shape[: header.ndim])
    strides = header.strides[: header.ndim] if header.strides else _compact(shape)
    reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    bits = header.bits * header.lanes
    base = (header.data or 0) + header.byte_offset
    if 0 in shape:
        return Extent(shape, base, base)
    before, after = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return Extent(shape, base + before * bits // 8, base - (-(after + 1) * bits // 8))


def on_host(value: Any) -> bool:
    """Whether it is a CPU tensor or array, of any library."""
    return hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] == _CPU


def _header(capsule: Any) -> _DLTensor:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return _DLTensor.from_address(pointer(capsule, b"dltensor"))


def _compact(shape: tuple[int, ...]) -> list[int]:
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return strides[::-1][: len(shape)]
