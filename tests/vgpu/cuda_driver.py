"""Kernels given as PTX on a real GPU, by cuda-python's driver API: what the instruction table needs, and no more."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, contextmanager

import numpy as np
from instruction_table import DTYPES, kernel_text


class DriverError(RuntimeError):
    """A function of the driver failed."""


class CudaDevice:
    """Device 0, by its primary context. ``driver`` is ``cuda.bindings.driver``, or something with its functions."""

    def __init__(self, driver) -> None:
        self._driver = driver
        self.call("cuInit", 0)
        self._device = self.call("cuDeviceGet", 0)
        attributes = driver.CUdevice_attribute
        kinds = (attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        major, minor = (self.call("cuDeviceGetAttribute", kind, self._device) for kind in kinds)
        self.capability = 10 * major + minor
        self.call("cuCtxSetCurrent", self.call("cuDevicePrimaryCtxRetain", self._device))

    def close(self) -> None:
        self.call("cuDevicePrimaryCtxRelease", self._device)

    def call(self, function: str, *arguments):
        """The result of a function of the driver, after its status, which must be success."""
        status, *values = getattr(self._driver, function)(*arguments)
        if int(status) != 0:
            raise DriverError(f"{function} failed: {status!r}")
        return values[0] if values else None

    @contextmanager
    def module(self, ptx: str):
        """A module that the driver assembles."""
        module = self.call("cuModuleLoadDataEx", ptx.encode() + b"\0", 0, [], [])
        try:
            yield module
        finally:
            self.call("cuModuleUnload", module)

    @contextmanager
    def memory(self, array: np.ndarray):
        """The address of device memory with an array's content, which is copied back in the end."""
        address = self.call("cuMemAlloc", array.nbytes)
        try:
            self.call("cuMemcpyHtoD", address, array.ctypes.data, array.nbytes)
            yield int(address)
            self.call("cuMemcpyDtoH", array.ctypes.data, address, array.nbytes)
        finally:
            self.call("cuMemFree", address)

    def launch(self, module, kernel: str, grid: int, block: int, values: list[int]) -> None:
        """One launch with 64-bit parameters, and the wait for it."""
        parameters = [ctypes.c_uint64(value) for value in values]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, parameters))
        function = self.call("cuModuleGetFunction", module, kernel.encode())
        self.call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, 0, ctypes.addressof(pointers), 0)
        self.call("cuCtxSynchronize")


def run_case(case, arrays, device: CudaDevice) -> np.ndarray:
    """The result array of a case of the instruction table on a GPU."""
    count = len(arrays[0])
    out = np.zeros(count, "uint8" if case.result == "pred" else DTYPES[case.result])
    with device.module(kernel_text(case, f"sm_{device.capability}")) as module:
        _with_memory(device, [*arrays, out], lambda addresses: device.launch(module, "case", -(-count // 128), 128, [count, *addresses]))
    return out.astype(bool) if case.result == "pred" else out


def run_hopper(case, device: CudaDevice) -> list[np.ndarray]:
    """The buffers of a kernel for Hopper after its launch on a GPU; a cluster is what its text requires."""
    arrays = case.arrays(0)
    with ExitStack() as stack:
        module = stack.enter_context(device.module(case.ptx()))
        a, b = (stack.enter_context(device.memory(array)) for array in arrays[:2])
        c = stack.enter_context(device.memory(case.arrays(a)[2]))  # a tensor map has the address of what it maps
        device.launch(module, "k", case.ctas, case.threads, [a, b, c])
    return arrays


def _with_memory(device: CudaDevice, arrays: list[np.ndarray], work, addresses=()) -> None:
    if not arrays:
        work(addresses)
        return
    with device.memory(arrays[0]) as address:
        _with_memory(device, arrays[1:], work, (*addresses, address))
