"""Stands in for the library through which the DSL's host code reaches the CUDA runtime.

Host code that CuTe-DSL compiles calls CUDA only by way of functions named like the CUDA runtime's with a leading underscore
(``_cudaLaunchKernelEx``). ``Driver.resolve`` gives an address for each of them, a callback into Python, so the same host code that runs on
a GPU machine runs here unchanged, without a CUDA driver and without a C compiler. Layouts: CUDA Runtime API, ``cudaLaunchConfig_t`` and
``cudaLaunchAttribute`` (72 bytes each: the id, then the value at byte 8).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fa4.vgpu.errors import LaunchError
from fa4.vgpu.tensor_map import DRIVER_TYPES, MAP_BYTES, SWIZZLE_BYTES, TensorMap

Dim3 = tuple[int, int, int]

_CLUSTER_DIMENSION = 4  # cudaLaunchAttributeClusterDimension
_ATTRIBUTE_BYTES = 72
_MAX_SHARED_OPTIN = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
_LAUNCH_FAILURE = 719  # cudaErrorLaunchFailure
_HANDLE = 1  # any pointer that is not null


@dataclass(frozen=True)
class LaunchRequest:
    """A launch as the host code asked for it: sizes in blocks and threads, ``dynamic_shared`` in bytes.

    ``arguments`` is the address of an array of pointers, one for each kernel parameter; valid during the launch only.
    """

    kernel: str
    grid: Dim3
    block: Dim3
    cluster: Dim3 | None
    dynamic_shared: int
    arguments: int

    def parameters(self, sizes: list[int]) -> list[bytes]:
        """The bytes of each parameter; ``sizes`` in bytes, from the kernel's own header."""
        pointers = ctypes.cast(self.arguments, ctypes.POINTER(ctypes.c_void_p))
        return [ctypes.string_at(pointers[i] or 0, size) for i, size in enumerate(sizes)]


class Driver:
    """One device. ``launch`` is called for every launch, in order; what it raises is kept in ``error`` and fails the host code's call."""

    def __init__(self, launch: Callable[[LaunchRequest], None], shared_per_block: int) -> None:
        self.error: BaseException | None = None
        self._launch = launch
        self._shared_per_block = shared_per_block
        self._kernels: dict[int, str] = {}
        self._callbacks = {name: self._callback(count, function) for name, (count, function) in self._functions().items()}

    def resolve(self, name: str) -> int | None:
        """The address of a function of the runtime library, None for what the host code finds elsewhere.

        A function of CUDA that has no stand-in fails when it is called, never reaches a real driver, and leaves a ``LaunchError``.
        """
        if name not in self._callbacks and name.startswith("_cu"):
            self._callbacks[name] = self._callback(0, partial(_refuse, name))
        callback = self._callbacks.get(name)
        return ctypes.cast(callback, ctypes.c_void_p).value if callback else None

    def load(self, init: int, load: int) -> None:
        """Run a module's own functions, at these addresses, which load the machine code and look its kernels up."""
        library = ctypes.c_void_p()
        self._initialise(ctypes.addressof(library), init, load, 0)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Around a call of host code: what ``launch`` raised comes out of the block in place of the host code's error."""
        self.error = None
        try:
            yield
        except Exception:
            if self.error is not None:
                raise self.error from None
            raise
        if self.error is not None:  # host code that ignores what a launch returns
            raise self.error

    def _functions(self) -> dict[str, tuple[int, Callable[..., int | None]]]:
        """Number of arguments and stand-in of each function; None is success."""

        def nothing(*_: int) -> None:
            return None

        return {
            "_cudaLibraryLoadData": (8, lambda out, *_: _set_pointer(out, _HANDLE)),
            "_cudaLibraryGetKernel": (3, self._get_kernel),
            "_cudaGetDevice": (1, lambda out: _set_int(out, 0)),
            "_cudaSetDevice": (1, nothing),
            "_cudaDeviceGetAttribute": (3, self._device_attribute),
            "_cuKernelGetAttribute": (4, lambda out, *_: _set_int(out, 0)),
            "_cudaFuncSetAttribute": (3, nothing),
            "_cudaKernelSetAttributeForDevice": (4, nothing),
            "_cudaLaunchKernelEx": (3, self._launch_kernel),
            "_cuTensorMapEncodeTiled": (12, encode_tiled),
            "cuda_dialect_init_library_once": (4, self._initialise),
            "cuda_dialect_unload_library_once": (1, nothing),
        }

    def _callback(self, count: int, function: Callable[..., int | None]) -> Any:
        def guarded(*arguments: int) -> int:
            # ctypes drops what a callback raises, so it is kept for the caller of the host code.
            try:
                return function(*arguments) or 0
            except BaseException as error:
                self.error = error
                return _LAUNCH_FAILURE

        return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * count)(guarded)

    def _get_kernel(self, out: int, _library: int, name: int) -> None:
        handle = len(self._kernels) + 1
        self._kernels[handle] = ctypes.string_at(name).decode()
        _set_pointer(out, handle)

    def _device_attribute(self, out: int, attribute: int | None, _device: int) -> None:
        _set_int(out, self._shared_per_block if attribute == _MAX_SHARED_OPTIN else 0)

    def _initialise(self, library: int, init: int, load: int, _report: int) -> int:
        """Run the module's own functions, which load the machine code and look its kernels up, as the real library does."""
        code: int = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(init)(library)
        return code or int(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(load)(library, 0))

    def _launch_kernel(self, config: int, kernel: int, arguments: int) -> None:
        words = ctypes.cast(config, ctypes.POINTER(ctypes.c_uint32))
        shared, _stream, attributes = ctypes.cast(config + 24, ctypes.POINTER(ctypes.c_uint64))[0:3]
        (count,) = ctypes.cast(config + 48, ctypes.POINTER(ctypes.c_uint32))[0:1]
        cluster = None
        for i in range(count):
            attribute = ctypes.cast(attributes + i * _ATTRIBUTE_BYTES, ctypes.POINTER(ctypes.c_uint32))
            if attribute[0] == _CLUSTER_DIMENSION:
                cluster = _dim3(attribute[2:5])
        name = self._kernels[kernel]
        self._launch(LaunchRequest(name, _dim3(words[0:3]), _dim3(words[3:6]), cluster, shared, arguments))


def encode_tiled(out: int, *arguments: int | None) -> int:
    """``cuTensorMapEncodeTiled``: all its arguments are integers and addresses, None being 0.

    Raises:
        LaunchError: the map breaks a rule; the driver answers with an error code alone.
    """
    type_, rank, address, sizes, strides, box, element_strides, interleave, swizzle, _promotion, fill = (a or 0 for a in arguments)
    type_, rank, interleave, swizzle, fill = (value & 0xFFFFFFFF for value in (type_, rank, interleave, swizzle, fill))
    if type_ >= len(DRIVER_TYPES) or not 1 <= rank <= 5 or swizzle >= len(SWIZZLE_BYTES) or fill:
        raise LaunchError(f"tensor map of type {type_}, rank {rank}, swizzle {swizzle}, out-of-bounds fill {fill}: not modelled")

    def values(pointer: int, kind: type[Any], count: int) -> tuple[int, ...]:
        return tuple(ctypes.cast(pointer, ctypes.POINTER(kind))[0:count])

    steps = values(element_strides, ctypes.c_uint32, rank)
    map_ = TensorMap(
        address=address,
        type=DRIVER_TYPES[type_],
        sizes=values(sizes, ctypes.c_uint64, rank),
        strides=values(strides, ctypes.c_uint64, rank - 1) if rank > 1 else (),
        box=values(box, ctypes.c_uint32, rank),
        swizzle=SWIZZLE_BYTES[swizzle],
        element_strides=() if set(steps) == {1} else steps,
        interleave=interleave,
    )
    problem = map_.problem()
    if problem:
        raise LaunchError(f"tensor map: {problem}")
    ctypes.memmove(out, map_.encode(), MAP_BYTES)
    return 0


def _dim3(values: list[int]) -> Dim3:
    x, y, z = values
    return x, y, z


def _set_int(pointer: int, value: int) -> None:
    ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = value


def _set_pointer(pointer: int, value: int) -> None:
    ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint64))[0] = value


def _refuse(name: str) -> None:
    raise LaunchError(f"the host code calls {name[1:]}, which the virtual GPU does not offer")
