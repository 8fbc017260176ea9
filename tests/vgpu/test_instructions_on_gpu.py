"""The instruction table and the kernels for Hopper on a real GPU, and what of their runner can be tested without one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_driver import CudaDevice, DriverError, run_case, run_hopper
from hopper_cases import HOPPER_CASES
from instruction_cases import CASES
from instruction_table import kernel_text, least_arch, operand_arrays
from ptx_text import A, B, C
from test_instructions import check

from fa4.vgpu import Gpu, Program


def where_there_is_a_driver(cases):
    """All of them; without a driver one, which says what is missing for all."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return cases[:1]
    return cases


@pytest.fixture(scope="module")
def device():
    from cuda.bindings import driver

    try:
        (status,) = driver.cuInit(0)
    except Exception:  # of many types, by what exactly of the driver is missing
        pytest.skip("needs a CUDA GPU: there is no driver")
    if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        pytest.skip("needs a CUDA GPU")
    found = CudaDevice(driver)
    yield found
    found.close()


@pytest.mark.gpu
@pytest.mark.parametrize("case", where_there_is_a_driver(CASES), ids=str)
def test_instruction_on_a_gpu(case, device):
    """Bit for bit where the ISA is exact, within its stated error elsewhere: the same table and check as for the virtual GPU."""
    if device.capability < least_arch(case):
        pytest.skip(f"needs a CUDA GPU of sm_{least_arch(case)}, this is sm_{device.capability}")
    arrays = operand_arrays(case)
    if any(case.tolerance):
        arrays = [a[:-64] for a in arrays]
    check(case, arrays, run_case(case, arrays, device))


@pytest.mark.gpu
@pytest.mark.parametrize("case", where_there_is_a_driver(HOPPER_CASES), ids=str)
def test_hopper_kernel_on_a_gpu(case, device):
    if device.capability != 90:
        pytest.skip(f"needs a CUDA GPU of sm_90, this is sm_{device.capability}")
    case.check(run_hopper(case, device))


@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
@pytest.mark.parametrize("schedule", ["round_robin", "priority"])
def test_hopper_kernel(case, schedule):
    gpu, arrays = Gpu("sm_90a", schedule=schedule, checks="hazards"), case.arrays(A)
    for address, array, name in zip((A, B, C), arrays, "abc", strict=True):
        gpu.register_buffer(address, array, name)
    cluster = (case.ctas,) if case.ctas > 1 else None
    gpu.launch(Program.parse(case.ptx()), "k", (case.ctas,), (case.threads,), 0, [a.to_bytes(8, "little") for a in (A, B, C)], cluster)
    case.check(arrays)


class VirtualDriver:
    """The functions of ``cuda.bindings.driver`` that the runner calls, over the virtual GPU."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor"
    )

    def __init__(self, capability=(8, 0)) -> None:
        self.capability = dict(zip(("major", "minor"), capability, strict=True))
        self.gpu = Gpu(f"sm_{capability[0]}{capability[1]}{'a' if capability[0] > 8 else ''}")
        self.live, self.waiting = {}, []
        self.contexts = self.modules = 0

    def __getattr__(self, name):
        if name not in ("cuInit", "cuCtxSetCurrent"):
            raise AttributeError(name)
        return lambda *_: (0,)

    def cuDeviceGet(self, index):  # noqa: N802
        return 0, index

    def cuDeviceGetAttribute(self, attribute, _device):  # noqa: N802
        return 0, self.capability[attribute]

    def cuDevicePrimaryCtxRetain(self, _device):  # noqa: N802
        self.contexts += 1
        return 0, "context"

    def cuDevicePrimaryCtxRelease(self, _device):  # noqa: N802
        self.contexts -= 1
        return (0,)

    def cuModuleLoadDataEx(self, image, count, options, values):  # noqa: N802
        if b"nonsense" in image:
            return 218, None
        assert (image[-1:], count, options, values) == (b"\0", 0, [], [])
        self.modules += 1
        return 0, Program.parse(image[:-1].decode())

    def cuModuleUnload(self, _module):  # noqa: N802
        self.modules -= 1
        return (0,)

    def cuModuleGetFunction(self, module, name):  # noqa: N802
        return 0, (module, name.decode())

    def cuMemAlloc(self, size):  # noqa: N802
        array = np.full(size, 0xA5, np.uint8)
        address = 0x100000 * (len(self.live) + 1)
        self.gpu.register_buffer(address, array, f"m{len(self.live)}")
        self.live[address] = array
        return 0, address

    def cuMemFree(self, address):  # noqa: N802
        self.gpu.remove_buffer(address)
        del self.live[address]
        return (0,)

    def cuMemcpyHtoD(self, address, source, size):  # noqa: N802
        self.live[address][:size] = np.frombuffer(ctypes.string_at(source, size), np.uint8)
        return (0,)

    def cuMemcpyDtoH(self, target, address, size):  # noqa: N802
        assert not self.waiting, "copied before the wait"
        ctypes.memmove(target, self.live[address][:size].tobytes(), size)
        return (0,)

    def cuLaunchKernel(self, function, *arguments):  # noqa: N802
        grid, block, (shared, stream, pointers, extra) = arguments[:3], arguments[3:6], arguments[6:]
        assert (shared, stream, extra) == (0, 0, 0)
        module, name = function
        count = len(module.kernel(name).parameters)
        parameters = [ctypes.string_at(pointer, 8) for pointer in (ctypes.c_void_p * count).from_address(pointers)]
        self.waiting.append(lambda: self.gpu.launch(module, name, grid, block, 0, parameters))
        return (0,)

    def cuCtxSynchronize(self):  # noqa: N802
        while self.waiting:
            self.waiting.pop()()
        return (0,)


def test_the_runner_hands_over_what_the_driver_needs():
    """A case of each result size and operand count, by way of the driver's functions; nothing stays behind."""
    driver = VirtualDriver()
    found = CudaDevice(driver)
    assert found.capability == 80
    chosen = {(case.result, len(case.operands)): case for case in CASES if least_arch(case) == 80}
    assert len(chosen) > 20
    for case in chosen.values():
        arrays = operand_arrays(case)
        arrays = [a[:-64] for a in arrays] if any(case.tolerance) else arrays
        check(case, arrays, run_case(case, arrays, found))
    found.close()
    assert (driver.live, driver.modules, driver.contexts) == ({}, 0, 0)


def test_the_runner_sees_a_wrong_result():
    """Its fault: a device that computes something else."""
    driver = VirtualDriver()
    honest = driver.cuModuleLoadDataEx
    driver.cuModuleLoadDataEx = lambda image, *rest: honest(image.replace(b"add.u32 ", b"sub.u32 "), *rest)
    case = next(case for case in CASES if case.code.startswith("add.u32 "))
    arrays = operand_arrays(case)
    with pytest.raises(pytest.fail.Exception, match="expected"):
        check(case, arrays, run_case(case, arrays, CudaDevice(driver)))


def test_a_status_of_the_driver_is_an_error():
    found = CudaDevice(VirtualDriver())
    with pytest.raises(DriverError, match="cuModuleLoadDataEx failed: 218"), found.module("nonsense"):
        pass


def test_the_runner_hands_over_kernels_for_hopper():
    driver = VirtualDriver((9, 0))
    found = CudaDevice(driver)
    cases = {case.name: case for case in HOPPER_CASES}
    for name in ("bulk load", "TMA load, swizzle 32", "wgmma"):
        cases[name].check(run_hopper(cases[name], found))
    wrong = replace(cases["bulk load"], body=cases["bulk load"].body.replace("[%d0], 256", "[%d0+16], 256"))
    with pytest.raises(AssertionError, match="bulk load"):
        wrong.check(run_hopper(wrong, found))
    found.close()
    assert (driver.live, driver.modules, driver.contexts) == ({}, 0, 0)


@pytest.mark.slow
def test_ptxas_takes_the_kernels_for_hopper(tmp_path):
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("needs ptxas, of a CUDA toolkit of 12.9 or later")
    for case in HOPPER_CASES:
        (tmp_path / "k.ptx").write_text(case.ptx())
        command = [ptxas, "-arch=sm_90a", "-o", str(tmp_path / "k.cubin"), str(tmp_path / "k.ptx")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "error" not in done.stderr.lower(), (case.name, done.stderr)
        assert done.returncode == 0, (case.name, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100])
def test_ptxas_takes_each_case_from_its_architecture_on(arch, tmp_path):
    """The table is legal PTX, and ``least_arch`` says what ptxas says, where a CUDA toolkit is at hand."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("needs ptxas, of a CUDA toolkit of 12.9 or later")
    legal = [case for case in CASES if least_arch(case) <= arch]
    assert assemble(ptxas, legal, arch, tmp_path) == ""
    for case in (case for case in CASES if least_arch(case) > arch):
        assert "requires" in assemble(ptxas, [case], arch, tmp_path), case


def assemble(ptxas, cases, arch, folder) -> str:
    """What ptxas has against a module with a kernel for each case."""
    head, kernels = "", []
    for i, case in enumerate(cases):
        head, size, body = kernel_text(case, f"sm_{arch}").partition(".address_size 64")
        kernels.append(body.replace(".entry case(", f".entry case{i}(").replace("DONE", f"DONE{i}"))
    (folder / "cases.ptx").write_text("\n".join([head + size, *kernels]))
    command = [ptxas, f"-arch=sm_{arch}", "-O0", "-o", str(folder / "cases.cubin"), str(folder / "cases.ptx")]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr
