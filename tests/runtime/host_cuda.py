"""CUDA devices that are not there: tensors that say ``cuda:N`` and lie in host memory, and a driver that keeps what it is asked.

torch makes a CUDA tensor of host memory where DLPack says that it is one, without CUDA being there; so requests go through
``fa4.attention``, torch's dispatcher, the compiled host code and tvm-ffi as they would, up to the functions of the CUDA runtime.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
from contextlib import contextmanager

import torch
import tvm_ffi

from fa4.compiler.load import load_function
from fa4.runtime import cuda, device
from fa4.vgpu.driver import Driver

_CPU, _CUDA = 1, 2  # DLDeviceType


def _relabelled(x: torch.Tensor, kind: int, index: int) -> torch.Tensor:
    """A tensor of the same memory that says it is on another device."""
    capsule = torch._C._to_dlpack(x.detach())
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    where = (ctypes.c_int32 * 2).from_address(pointer(capsule, b"dltensor") + 8)  # DLTensor: data, then the device
    where[0], where[1] = kind, index
    return torch._C._from_dlpack(capsule)


def on_cuda(x: torch.Tensor, index: int = 0) -> torch.Tensor:
    return _relabelled(x, _CUDA, index)


def on_host(x: torch.Tensor) -> torch.Tensor:
    """The memory of such a tensor, as a CPU tensor."""
    return _relabelled(x, _CPU, 0)


# Views, which torch's CUDA makes as its CPU does.
_VIEWS = {
    "as_strided": lambda x, *arguments: on_cuda(on_host(x).as_strided(*arguments), x.device.index),
    "view": lambda x, size: on_cuda(on_host(x).view(size), x.device.index),
    "split_with_sizes": lambda x, *arguments: [on_cuda(y, x.device.index) for y in on_host(x).split_with_sizes(*arguments)],
}


class _Exported:
    """A tensor for consumers that are not to ask torch about streams."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **_options):
        return torch._C._to_dlpack(self.tensor)

    def __dlpack_device__(self):
        return _CUDA, self.tensor.get_device()


class Devices:
    """Devices with the given compute capabilities, the first of them current in a new thread; each has a current stream of its own.

    ``calls`` are the functions of the CUDA runtime that were called, by the number of the device that was current; ``launches``
    the launches with their streams; ``images`` the machine code that was loaded; ``prepared`` the devices that kernels were set up for;
    ``asked`` what was asked of torch; ``allocated`` the results of torch's allocator.
    """

    def __init__(self, *capabilities: tuple[int, int]) -> None:
        self.capabilities = capabilities
        self.streams = [0x1000 * (index + 1) for index in range(len(capabilities))]
        self._thread = threading.local()
        self.calls, self.launches, self.asked, self.allocated, self.images = [], [], [], [], []
        self.prepared = set()
        self.load_seconds = 0.0
        self.on_launch = lambda _request: None
        self.failing = {}  # function -> error code
        self.driver = _RecordingDriver(self)

    @contextmanager
    def installed(self, monkeypatch):
        """In place of torch's CUDA: primitives of ``fa4.runtime.device``, and the kernels of torch that a call needs."""
        for name in ("capability", "current_stream", "on_device", "load"):
            monkeypatch.setattr(device, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where torch has CUDA, kernels are replaced
            library.impl("empty.memory_format", self._empty, "CUDA")
            library.impl("clone", self._clone, "CUDA")
            for name, view in _VIEWS.items():
                library.impl(name, view, "CUDA")
        forget()
        try:
            yield self
        finally:
            library._destroy()
            forget()

    @property
    def current(self):
        """The device that is current: as in CUDA, in this thread."""
        return getattr(self._thread, "current", 0)

    @current.setter
    def current(self, index):
        self._thread.current = index

    def capability(self, index):
        self.asked.append(("capability", index))
        return self.capabilities[index]

    def current_stream(self, index):
        self.asked.append(("stream", index))
        return self.streams[index]

    @contextmanager
    def on_device(self, index):
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def load(self, artifact, index):
        function = load_function(artifact, self.driver.resolve, index)
        if not torch.backends.cuda.is_built():
            return function

        def call(*arguments):
            # Of a torch.Tensor on CUDA tvm-ffi asks torch's own library for the stream, which needs a driver where it has CUDA.
            function(*(tvm_ffi.from_dlpack(_Exported(x)) if isinstance(x, torch.Tensor) else x for x in arguments))

        return call

    def _empty(self, size, *, dtype=None, device=None, **_options):
        self.allocated.append(on_cuda(torch.full(size, torch.nan, dtype=dtype), device.index))
        return self.allocated[-1]

    def _clone(self, x, *, memory_format=None):
        self.allocated.append(on_cuda(on_host(x).clone(memory_format=memory_format), x.device.index))
        return self.allocated[-1]

    def take_calls(self):
        """The functions called since the last time this was asked."""
        calls, self.calls[:] = list(self.calls), []
        return calls


def forget():
    """What ``fa4.runtime.cuda`` knows about devices."""
    cuda._functions.clear()
    cuda.target.cache_clear()
    cuda._announce.cache_clear()


class _RecordingDriver(Driver):
    """Several devices, one of them current; a function may be told to fail."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.loaded_to = {}  # kernel -> device
        super().__init__(self._launched, 232448)

    def _functions(self):
        functions = super()._functions() | {
            "_cudaGetDevice": (1, self._get_device),
            "_cudaSetDevice": (1, self._set_device),
            "_cudaLibraryLoadData": (8, self._load),
            "_cudaKernelSetAttributeForDevice": (4, self._set_attribute),
        }
        return {name: (count, self._recorded(name, function)) for name, (count, function) in functions.items()}

    def _recorded(self, name, function):
        def recorded(*arguments):
            self.devices.calls.append((name, self.devices.current))
            return self.devices.failing.get(name) or function(*arguments)

        return recorded

    def _get_device(self, out):
        ctypes.c_int.from_address(out).value = self.devices.current

    def _set_device(self, index):
        self.devices.current = index or 0

    def _set_attribute(self, _kernel, _attribute, _value, index):
        self.devices.prepared.add(index or 0)

    def _load(self, out, image, *_):
        time.sleep(self.devices.load_seconds)
        self.devices.images.append((self.devices.current, image))
        ctypes.c_void_p.from_address(out).value = len(self.devices.images)

    def _get_kernel(self, out, library, name):
        super()._get_kernel(out, library, name)
        self.loaded_to[ctypes.c_uint64.from_address(out).value] = self.devices.current

    def _launch_kernel(self, config, kernel, arguments):
        assert self.loaded_to[kernel] == self.devices.current, "launched on a device for which another copy of the kernel was loaded"
        self.stream = ctypes.c_uint64.from_address(config + 32).value
        super()._launch_kernel(config, kernel, arguments)

    def _launched(self, request):
        self.devices.launches.append((request, self.devices.current, self.stream))
        self.devices.on_launch(request)
