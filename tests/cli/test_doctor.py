"""``fa4 doctor``: it always ends with an answer, whatever is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from enum import IntEnum
from importlib import metadata

import pytest

import fa4
from fa4.cli import doctor, main
from fa4.compiler import toolchain
from fa4.errors import CompileError


@pytest.fixture(autouse=True)
def healthy(tmp_path):
    """A cache folder that can be written, and a toolchain that is looked for anew."""
    look = toolchain.current
    look.cache_clear()
    with fa4.settings(cache=True, cache_dir=str(tmp_path / "cache")):
        yield
    look.cache_clear()


@pytest.fixture
def no_driver(monkeypatch):
    """cuda-python where there is no driver."""

    def missing(*_arguments):
        raise RuntimeError("libcuda.so.1 not found\nand more lines")

    install_driver(monkeypatch, cuInit=missing)


def install_driver(monkeypatch, **functions):
    driver = types.ModuleType("cuda.bindings.driver")
    vars(driver).update(functions)
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = driver
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)


def missing_distributions(monkeypatch, *names):
    real = metadata.version

    def version(name):
        if name in names:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)


def test_a_healthy_machine(no_driver, capsys):
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    for part in ("python", "torch", "nvidia-cutlass-dsl", "DSL flavour", "virtual GPU", "because", "nvdisasm", "entries", "sm_100a"):
        assert part in output
    assert "and more lines" not in output
    assert output.endswith("nothing is broken\n")


def test_json(no_driver, capsys):
    assert main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["broken"] == []
    assert data["versions"]["fa4"] == fa4.__version__
    assert data["compile cache"]["usable"] is True
    assert data["kernels"]["sm_80"].startswith("forward ")


def test_it_imports_neither_torch_nor_cutlass():
    code = "import sys; from fa4.cli import doctor; doctor.examine(); print('torch' in sys.modules, 'cutlass' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.split() == ["False", "False"]


def test_gpus_are_listed(monkeypatch):
    attributes = IntEnum(
        "CUdevice_attribute",
        {"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 75, "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 76},
    )
    capability = {(0, 75): 9, (0, 76): 0, (1, 75): 7, (1, 76): 5}
    install_driver(
        monkeypatch,
        cuInit=lambda _flags: (0,),
        cuDriverGetVersion=lambda: (0, 13040),
        cuDeviceGetCount=lambda: (0, 2),
        cuDeviceGet=lambda index: (0, index),
        cuDeviceGetName=lambda _length, device: (0, f"GPU number {device}".encode() + b"\0\0"),
        cuDeviceGetAttribute=lambda attribute, device: (0, capability[device, int(attribute)]),
        CUdevice_attribute=attributes,
    )
    check = doctor.examine()["GPU"]
    assert check["driver"] == "CUDA 13.4"
    assert check["GPU 0"] == "GPU number 0, sm_90a, kernels: forward ampere, backward -"
    assert "compute capability 8.0 or higher" in check["GPU 1"]


def test_a_driver_that_fails_is_broken(monkeypatch):
    install_driver(monkeypatch, cuInit=lambda _flags: (0,), cuDriverGetVersion=lambda: (999,))
    assert doctor.examine()["GPU"]["broken"] == "RuntimeError: cuDriverGetVersion failed: 999"


def test_a_driver_without_gpus(monkeypatch):
    install_driver(monkeypatch, cuInit=lambda _flags: (0,), cuDriverGetVersion=lambda: (0, 13000), cuDeviceGetCount=lambda: (0, 0))
    monkeypatch.setattr(sys.modules["cuda.bindings.driver"], "CUdevice_attribute", None, raising=False)
    check = doctor.examine()["GPU"]
    assert (check["driver"], check["GPUs"]) == ("CUDA 13.0", "none")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("cuda: Optional[str] = '12.6'", "torch is built for CUDA 12.6"),
        ("cuda: Optional[str] = None", "no: torch is a CPU build; CUDA tensors need a CUDA build"),
        (None, "no: torch is not installed"),
    ],
)
def test_whether_torch_can_make_cuda_tensors(no_driver, monkeypatch, tmp_path, line, answer):
    spec = None
    if line is not None:
        (tmp_path / "version.py").write_text(f"__version__ = '2.9.0'\n{line}\nhip: Optional[str] = '6.0'\n")
        spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(doctor, "PathFinder", types.SimpleNamespace(find_spec=lambda _name: spec))
    assert doctor.examine()["GPU"]["CUDA tensors"] == answer


def test_what_it_says_of_torch_is_so(no_driver):
    import torch

    built = torch.version.cuda
    assert doctor.examine()["GPU"]["CUDA tensors"] == (
        f"torch is built for CUDA {built}" if built else "no: torch is a CPU build; CUDA tensors need a CUDA build"
    )


@pytest.mark.parametrize("name", doctor._REQUIRED)
def test_a_missing_dependency_is_named(name, monkeypatch, no_driver, capsys):
    missing_distributions(monkeypatch, name)
    assert main(["doctor"]) == 1
    assert f"broken: versions: not installed: pip install {name}" in capsys.readouterr().out


def test_everything_missing_at_once(monkeypatch, capsys):
    missing_distributions(monkeypatch, *doctor._REQUIRED)
    for module in ("cuda.bindings", "cuda", "platformdirs", "filelock"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("fa4.inspection.nvdisasm.find", lambda: None)
    with fa4.settings(cache_dir=None):
        assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    for part in ("versions: not installed", "code generation: nvidia-cutlass-dsl is not installed", "GPU: ModuleNotFoundError"):
        assert f"broken: {part}" in output
    assert "pip install 'fa4[inspect]'" in output


def test_a_wrong_compiler_is_broken(monkeypatch):
    def refuse():
        raise CompileError("nvidia-cutlass-dsl 3.0 is installed, fa4 needs at least 4.8.1")

    monkeypatch.setattr(toolchain, "current", refuse)
    assert doctor.problems(doctor.examine())[0].startswith("code generation: nvidia-cutlass-dsl 3.0")


def test_an_nvdisasm_that_does_not_run_is_broken(monkeypatch, tmp_path):
    program = tmp_path / "nvdisasm"
    program.write_text("not a program")
    monkeypatch.setattr("fa4.inspection.nvdisasm.find", lambda: program)
    assert "does not run" in doctor.examine()["disassembler"]["broken"]


def test_a_setting_that_is_not_allowed_is_broken(monkeypatch):
    def refuse():
        raise fa4.ArgumentError("cache", "maybe", "unknown setting value", "use one of True, False")

    monkeypatch.setattr("fa4._settings.current", refuse)
    assert "unknown setting value" in doctor.examine()["settings"]["broken"]


def test_the_cache_may_be_off():
    with fa4.settings(cache=False):
        check = doctor.examine()["compile cache"]
    assert check == {"state": "off (FA4_CACHE=0): each process compiles anew"}


def test_a_cache_that_cannot_be_written_is_broken(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    with fa4.settings(cache_dir=str(blocked / "cache")):
        assert "FA4_CACHE_DIR names another folder" in doctor.examine()["compile cache"]["broken"]


def test_a_cache_that_others_may_write_to_is_broken(tmp_path):
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    with fa4.settings(cache_dir=str(open_folder)):
        check = doctor.examine()["compile cache"]
    assert check["usable"] is False
    assert "others may write to it (mode 777)" in check["broken"]


def test_a_damaged_entry_is_counted(tmp_path):
    (tmp_path / "cache" / "entries" / "0" / "x").mkdir(parents=True)
    assert doctor.examine()["compile cache"]["entries"] == "1, 1 of them damaged"
