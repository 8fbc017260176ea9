"""Tensors as kernels take them: aligned operands, and host memory that passes for device memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_DEVICE_CUDA = 2
# DLPack type codes (DLDataTypeCode): kDLFloat, kDLBfloat.
_CODES = {torch.float32: 2, torch.float16: 2, torch.bfloat16: 4}


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


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor of DLPack 0.8."""

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
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class HostTensor:
    """A CPU tensor that says it lies on a GPU: host code accepts it, and the virtual GPU finds it at its host address.

    Keep it alive while the host code runs: consumers hold a pointer that Python does not see.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        rank = tensor.dim()
        self._shape, self._strides = (ctypes.c_int64 * rank)(*tensor.shape), (ctypes.c_int64 * rank)(*tensor.stride())
        bits = 8 * tensor.element_size()
        where = (tensor.data_ptr(), _DEVICE_CUDA, 0)
        self._managed = _ManagedTensor(*where, rank, _CODES[tensor.dtype], bits, 1, self._shape, self._strides, 0, None, None)

    def __dlpack__(self, **_options: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self._managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DEVICE_CUDA, 0
