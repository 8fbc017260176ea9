"""Shared by the compiler's tests and the processes that they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from toy_config import ToyConfig, toy_problem

import fa4
from fa4.compiler.artifact import Artifact, Kernel, Launch
from fa4.compiler.cubin import Parameter, Resources
from fa4.compiler.toolchain import Toolchain

HERE = Path(__file__).parent


def fake_artifact(name: str = "fake", size: int = 1000) -> Artifact:
    """An artifact that no compiler made, for tests of what happens to it later."""
    kernel = Kernel(name, Launch(block=(128, 1, 1), dynamic_shared=512), Resources(12, 0, 1024, 564, 0, None, (Parameter(0, 16),)))
    return Artifact(
        function=name,
        kernels=(kernel,),
        ptx=f".entry {name} é",
        cubin=b"\x7fELF" * (size // 4),
        host_object=b"\0" * size,
        source="toy_kernel:Toy",
        problem={"head_dim": 64},
        config=[1, 2],
        arch="sm_80",
        toolchain=Toolchain("3.11.0", "0.1.0", "4.8.1", "0.1.15", "cu12", "0" * 16, "x86_64"),
        options="",
        ptxas_log="",
    )


REQUEST = (toy_problem(), ToyConfig(), "sm_80")

# In a child: the compiler replaced by one that leaves a line in a file, and takes a moment.
CHILD = """
import logging, os, sys, time
import fa4
from fa4.compiler import compile, lookup
from compiler_helpers import REQUEST, fake_artifact

def compile_kernel(*request):
    with open(os.environ["COMPILE_LOG"], "a") as log:
        log.write("compiled\\n")
    time.sleep(float(os.environ.get("COMPILE_SECONDS", "0")))
    return fake_artifact()

compile.compile_kernel = compile_kernel
"""


def start_python(code: str, folder: Path, **env: str) -> subprocess.Popen:
    path = os.pathsep.join([str(Path(fa4.__file__).parents[1]), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path, "FA4_CACHE_DIR": str(folder), "COMPILE_LOG": str(folder.parent / "log"), **env}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder.parent
    )


def run_python(code: str, folder: Path, **env: str) -> str:
    """Output of ``code`` in a fresh interpreter with the same fa4, the tests' folder on its path, and ``folder`` as cache."""
    process = start_python(code, folder, **env)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output.strip()


def compile_count(folder: Path) -> int:
    log = folder.parent / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0
