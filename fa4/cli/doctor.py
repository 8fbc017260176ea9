"""``fa4 doctor``: what is installed, what works here, and what does not."""

from __future__ import annotations

import argparse
import json
import platform
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import fa4
from fa4.errors import Fa4Error

# Core dependencies: shown, and broken where one is missing.
_REQUIRED = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python", "numpy", "ml-dtypes", "platformdirs", "filelock")

Checks = dict[str, dict[str, Any]]


def add_command(commands: Any) -> None:
    """Add ``fa4 doctor``."""
    parser = commands.add_parser("doctor", help="show versions, GPUs, tools, the compile cache, and what is broken; exit status 1 if it is")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print every check; exit status 1 where something is broken. Nothing here is imported that may be missing or slow."""
    checks = examine()
    broken = problems(checks)
    if arguments.json:
        print(json.dumps(checks | {"broken": broken}))
        return 1 if broken else 0
    width = max(len(name) for check in checks.values() for name in check)
    for title, check in checks.items():
        print(title)
        for name, value in check.items():
            if name != "broken":
                print(f"  {name:<{width}}  {_text(value)}")
    for problem in broken:
        print(f"broken: {problem}")
    if not broken:
        print("nothing is broken")
    return 1 if broken else 0


def examine() -> Checks:
    """All checks, by title. ``broken`` in a check says what has to be repaired; everything else is as it may be."""
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "versions": _versions,
        "code generation": _code_generation,
        "GPU": _gpu,
        "disassembler": _disassembler,
        "settings": _settings,
        "compile cache": _cache,
        "kernels": _kernels,
    }
    return {title: _guarded(check) for title, check in sections.items()}


def problems(checks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is broken, in words."""
    return [f"{title}: {check['broken']}" for title, check in checks.items() if "broken" in check]


def _guarded(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A check that itself fails has found something broken, and must not hide the others."""
    try:
        return check()
    except Fa4Error as error:
        return {"broken": str(error)}
    except Exception as error:  # whatever a half-installed package does
        return {"broken": f"{type(error).__name__}: {error}"}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, Any]:
    found = {name: _version(name) for name in _REQUIRED}
    missing = [name for name, version in found.items() if version is None]
    check: dict[str, Any] = {"python": platform.python_version(), "fa4": fa4.__version__, **found}
    return check | ({"broken": f"not installed: pip install {' '.join(missing)}"} if missing else {})


def _code_generation() -> dict[str, Any]:
    from fa4.compiler import toolchain

    tools = toolchain.current()
    unknown = "" if tools.flavour in toolchain.KNOWN_FLAVOURS else ", new to fa4"
    check: dict[str, Any] = {
        "DSL flavour": f"{tools.flavour} (CUDA {tools.flavour.removeprefix('cu')}{unknown})",
        "host code": f"{tools.machine}, baseline instruction set",
        "runtime library": str(toolchain.runtime_library()),
    }
    if tools.machine not in toolchain.HOST_TARGETS:
        check["broken"] = f"no host code for {tools.machine}; kernels compile on {', '.join(toolchain.HOST_TARGETS)}"
    return check


def _gpu() -> dict[str, Any]:
    """Driver and GPUs by way of cuda-python, and what CUDA tensors would run there. A machine without a driver is as it may be."""
    from cuda.bindings import driver

    from fa4.arch import arch_for_capability

    tensors = {"CUDA tensors": _cuda_tensors()}

    def call(function: str, *arguments: Any) -> Any:
        status, *values = getattr(driver, function)(*arguments)
        if int(status) != 0:
            raise RuntimeError(f"{function} failed: {status}")
        return values[0] if values else None

    try:
        call("cuInit", 0)
    except Exception as error:  # of many types, by what exactly is missing
        none = "none: kernels run on the virtual GPU, everything else on the CPU backend"
        return {"driver": none, "because": str(error).partition("\n")[0], **tensors}
    version = call("cuDriverGetVersion")
    gpus = {}
    attributes = driver.CUdevice_attribute
    for index in range(call("cuDeviceGetCount")):
        device = call("cuDeviceGet", index)
        major = call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        name = call("cuDeviceGetName", 256, device).decode().rstrip("\0")
        try:
            arch = arch_for_capability((major, minor))
            runs = f"{arch.name}, kernels: {_served(arch.family)}"
        except Fa4Error as error:
            runs = str(error)
        gpus[f"GPU {index}"] = f"{name}, {runs}"
    return {"driver": f"CUDA {version // 1000}.{version % 1000 // 10}", **tensors, **(gpus or {"GPUs": "none"})}


def _cuda_tensors() -> str:
    """Whether the installed torch can make them, read from its files: importing it takes seconds."""
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return "no: torch is not installed"
    version = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    cuda = re.search(r"^cuda\b.*= '(.+)'$", version, re.MULTILINE)
    return f"torch is built for CUDA {cuda[1]}" if cuda else "no: torch is a CPU build; CUDA tensors need a CUDA build"


def _disassembler() -> dict[str, Any]:
    from fa4.inspection import nvdisasm

    path = nvdisasm.find()
    if path is None:
        return {"nvdisasm": f"not found: no SASS in fa4 inspect; {nvdisasm.REMEDY}"}
    return {"nvdisasm": f"{path} ({nvdisasm.version()})"}


def _settings() -> dict[str, Any]:
    from fa4._settings import current

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = asdict(current())
    return values | ({"warnings": [str(warning.message) for warning in caught]} if caught else {})


def _cache() -> dict[str, Any]:
    from fa4.compiler.cache import default_cache

    cache = default_cache()
    if cache is None:
        return {"state": "off (FA4_CACHE=0): each process compiles anew"}
    entries = cache.entries()
    damaged = sum(entry.summary is None for entry in entries)
    check: dict[str, Any] = {
        "path": str(cache.root),
        "entries": f"{len(entries)}, {damaged} of them damaged" if damaged else len(entries),
        "size": f"{sum(entry.bytes for entry in entries) / 2**20:.1f} of at most {cache.limit / 2**20:.0f} MiB",
    }
    problem = cache.problem()
    check["usable"] = problem is None
    if problem is not None:
        check["broken"] = f"{cache.root} is not used: {problem}; each process compiles anew. FA4_CACHE_DIR names another folder"
    return check


def _kernels() -> dict[str, Any]:
    from fa4.arch import ARCHS

    return {name: _served(arch.family) for name, arch in ARCHS.items()}


def _served(family: str) -> str:
    """The kernel that each direction gets on an architecture of this family."""
    from fa4 import dispatch
    from fa4.problem import AttentionProblem, Direction

    directions: tuple[Direction, ...] = ("forward", "backward")
    rows = {each: dispatch.kernel_target(AttentionProblem(each, "bfloat16", 128, 128), family) for each in directions}
    return ", ".join(f"{direction} {'-' if row is None else row[1]}" for direction, row in rows.items())


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    return "; ".join(value) if isinstance(value, list) else str(value)
