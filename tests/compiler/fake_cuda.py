"""Host memory that passes for CUDA tensors, and a runtime library in Python that records launches: no GPU, driver or C compiler."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

_DEVICE_CUDA = 2
_FLOAT = 2


class _Tensor(ctypes.Structure):
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


_alive: list[Any] = []  # consumers hold pointers that Python does not see


class FakeCudaVector:
    """A float32 vector in host memory that says it is on a GPU."""

    def __init__(self, size: int, align: int = 64) -> None:
        self.storage = (ctypes.c_char * (4 * size + align))()
        address = ctypes.addressof(self.storage)
        self.address = (address + align - 1) // align * align
        self.shape, self.strides = (ctypes.c_int64 * 1)(size), (ctypes.c_int64 * 1)(1)
        _alive.append(self)
        self.tensor = _Tensor(self.address, _DEVICE_CUDA, 0, 1, _FLOAT, 32, 1, self.shape, self.strides, 0, None, None)

    def __dlpack__(self, **_options: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DEVICE_CUDA, 0


@dataclass
class FakeRuntime:
    """Stands in for the DSL's runtime library; ``launches`` holds (kernel, grid, block, dynamic shared memory, argument pointers)."""

    launches: list[tuple[str, tuple[int, ...], tuple[int, ...], int, Any]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    parameters: int = 3

    def __post_init__(self) -> None:
        def set_int(pointer: int, value: int) -> None:
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = value

        def get_kernel(out: int, _library: int, name: int) -> None:
            self.names[len(self.names) + 1] = ctypes.string_at(name).decode()
            ctypes.cast(out, ctypes.POINTER(ctypes.c_void_p))[0] = len(self.names)

        def initialise(library: int, init: int, load: int, _report: int) -> int:
            """As the real one: run the module's own functions, which load the cubin and look kernels up."""
            call_init = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(init)
            call_load = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(load)
            return call_init(library) or call_load(library, 0)

        functions = {
            "_cudaLibraryLoadData": (8, lambda out, *_: ctypes.memmove(out, ctypes.byref(ctypes.c_void_p(1)), 8) and None),
            "_cudaLibraryGetKernel": (3, get_kernel),
            "_cudaGetDevice": (1, lambda out: set_int(out, 0)),
            "_cudaSetDevice": (1, lambda _: None),
            "_cudaDeviceGetAttribute": (3, lambda out, *_: set_int(out, 166912)),
            "_cuKernelGetAttribute": (4, lambda out, *_: set_int(out, 0)),
            "_cudaFuncSetAttribute": (3, lambda *_: None),
            "_cudaKernelSetAttributeForDevice": (4, lambda *_: None),
            "_cudaLaunchKernelEx": (3, self._launch),
            "cuda_dialect_init_library_once": (4, initialise),
            "cuda_dialect_unload_library_once": (1, lambda _: None),
        }
        self._callbacks = {name: self._callback(count, function) for name, (count, function) in functions.items()}

    @staticmethod
    def _callback(count: int, function: Any) -> Any:
        return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * count)(lambda *arguments: function(*arguments) or 0)

    def resolve(self, name: str) -> int | None:
        callback = self._callbacks.get(name)
        return ctypes.cast(callback, ctypes.c_void_p).value if callback else None

    def _launch(self, config: int, kernel: int, arguments: int) -> None:
        words = ctypes.cast(config, ctypes.POINTER(ctypes.c_uint32))
        (shared,) = ctypes.cast(config + 24, ctypes.POINTER(ctypes.c_uint64))[0:1]
        pointers = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0 : self.parameters]
        self.launches.append((self.names.get(kernel, "?"), tuple(words[0:3]), tuple(words[3:6]), shared, pointers))
