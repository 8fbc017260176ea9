"""Which compiler would run here: versions, flavour and libraries, found without importing any of it.

Importing cutlass takes about half a second, and a kernel that is in the cache needs none of it; but its key must say which
compiler made it. So the DSL's folder is looked at, by the DSL's own rule for choosing among installed flavours
(``cutlass/_mlir/_mlir_libs/__init__.py`` of 4.8.1): the newest that the driver supports, the newest of all without a driver.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path

import fa4
from fa4.errors import CompileError

# pyproject.toml's range; a test compares the two.
DSL_AT_LEAST = (4, 8, 1)
DSL_BELOW = (4, 9)
# Flavours that this project's kernels were inspected with. Another one compiles, and says so.
KNOWN_FLAVOURS = ("cu12", "cu13")

_OPTIONS = "--enable-tvm-ffi --opt-level 3 --keep-ptx --keep-cubin"

# (triple, CPU) of the host code, by machine: the baseline of each, since a cache folder may be shared by unlike machines.
HOST_TARGETS = {
    "x86_64": ("x86_64-unknown-linux-gnu", "x86-64"),
    "aarch64": ("aarch64-unknown-linux-gnu", "generic"),
}

_RUNTIME_LIBRARY = "libcute_dsl_runtime.so"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Toolchain:
    """Everything about the installation that decides what code comes out; part of every key.

    ``build`` identifies the compiler's binary, so that two builds of one version differ. ``machine`` is the host's instruction
    set: host code is generated for its baseline (``HOST_TARGETS``), not for the CPU at hand.
    """

    python: str
    fa4: str
    dsl: str
    tvm_ffi: str
    flavour: str
    build: str
    machine: str


@lru_cache(maxsize=1)
def current() -> Toolchain:
    """The toolchain of this process. Cached: an installation that changes under a running process is not followed.

    Raises:
        CompileError: the DSL or tvm-ffi is missing, incomplete, or of a version outside the supported range.
    """
    dsl = _version("nvidia-cutlass-dsl")
    numbers = tuple(int(part) for part in re.findall(r"\d+", dsl)[:3])
    if not DSL_AT_LEAST <= numbers < DSL_BELOW:
        wanted = f"at least {'.'.join(map(str, DSL_AT_LEAST))}, below {'.'.join(map(str, DSL_BELOW))}"
        raise CompileError(
            f"nvidia-cutlass-dsl {dsl} is installed, fa4 needs {wanted}; pip install 'nvidia-cutlass-dsl>=4.8.1,<4.9' (other versions "
            "generate other code, or none)"
        )
    flavour = _choose_flavour()
    if flavour not in KNOWN_FLAVOURS:
        _log.warning("the DSL's flavour %s is new to fa4 (known: %s); compiling with it", flavour, ", ".join(KNOWN_FLAVOURS))
    build = _libraries() / f"_cutlass_ir_version_{flavour}.py"
    return Toolchain(
        python=platform.python_version(),
        fa4=fa4.__version__,
        dsl=dsl,
        tvm_ffi=_version("apache-tvm-ffi"),
        flavour=flavour,
        build=hashlib.sha256(build.read_bytes()).hexdigest()[:16] if build.exists() else "",
        machine=platform.machine(),
    )


def options(line_info: bool) -> str:
    """What a kernel is compiled with. ``line_info`` adds a line table, and remarks with what ptxas says about spills.

    Both leave the machine code as it is (checked in the tests), but with either the DSL looks up a source position for each operation,
    which more than doubles the time that tracing takes.
    """
    return _OPTIONS + " --generate-line-info remarks{ptx}" * line_info


def runtime_library() -> Path:
    """The DSL's runtime library, which host code calls to launch kernels.

    Raises:
        CompileError: not installed.
    """
    path = _root() / current().flavour / "lib" / _RUNTIME_LIBRARY
    if not path.exists():
        raise CompileError(f"{path} is missing; reinstall nvidia-cutlass-dsl")
    return path


def _version(distribution: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        raise CompileError(f"{distribution} is not installed; pip install {distribution}") from None


def _root() -> Path:
    spec = PathFinder.find_spec("nvidia_cutlass_dsl")
    if spec is None or not spec.submodule_search_locations:
        raise CompileError("nvidia-cutlass-dsl is not installed; pip install nvidia-cutlass-dsl")
    return Path(next(iter(spec.submodule_search_locations)))


def _libraries() -> Path:
    return _root() / "dsl_packages" / "cutlass" / "_mlir" / "_mlir_libs"


def _choose_flavour() -> str:
    majors = sorted(
        int(match[1]) for path in _libraries().glob("_cutlass_ir.cu*.so") if (match := re.match(r"_cutlass_ir\.cu(\d+)\.", path.name))
    )
    if not majors:
        raise CompileError(f"no compiler library in {_libraries()}; reinstall nvidia-cutlass-dsl")
    driver = _driver_major()
    usable = [major for major in majors if driver is None or major <= driver]
    if not usable:
        raise CompileError(
            f"the driver supports CUDA {driver}, the installed nvidia-cutlass-dsl needs CUDA {majors[0]}; update the driver or install "
            "nvidia-cutlass-dsl without the cu13 extra"
        )
    return f"cu{usable[-1]}"


def _driver_major() -> int | None:
    """The newest CUDA major version that the driver supports; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    return version.value // 1000 if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
