"""Kernels compiled for tests, each once per session."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import cache

import pytest


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one problem."""

    name: str
    ptx: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    @property
    def resources(self):
        return [self.registers, self.stack, self.spill_stores, self.spill_loads, self.shared]


@contextlib.contextmanager
def standard_error(file):
    """Everything written to standard error, by Python or not, goes to ``file``."""
    saved = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        with contextlib.redirect_stderr(file):
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


@cache
def compile_ptx(problem, arch):
    """Compile the forward kernel of ``problem`` for ``arch`` with the tuned configuration."""
    import cutlass.cute as cute

    from fa4.arch import get_arch
    from fa4.kernels.ampere.forward.kernel import AmpereForward
    from fa4.tuning import ampere_forward_config

    kernel = AmpereForward(problem, ampere_forward_config(problem, get_arch(arch)))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        with standard_error(log):
            options = f"--gpu-arch {arch} --keep-ptx --dump-dir {folder} remarks{{ptx}}"
            compiled = cute.compile(kernel, *kernel.compile_arguments(), options=options)
            sys.stderr.flush()
        log.seek(0)
        text = log.read()
        # CUDA's assembler reports "bytes stack frame, bytes spill stores, bytes spill loads" and "Used N registers".
        stack, stores, loads = map(
            int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text).groups()
        )
        registers = int(re.search(r"Used (\d+) registers", text)[1])
        ptx = compiled.__ptx__
    shared = dynamic_shared_memory(str(compiled.ir_module))
    return Compiled(re.search(r"\.entry (\w+)", ptx)[1], ptx, registers, stack, stores, loads, shared)


def dynamic_shared_memory(module: str) -> int:
    """Bytes of dynamic shared memory of the launch: besides 1 and 2**32 the only 64-bit constant of the generated host code."""
    (size,) = {int(n) for n in re.findall(r"llvm\.mlir\.constant\((\d+) : i64\)", module)} - {1, 2**32}
    return size


@pytest.fixture(name="compile_ptx", scope="session")
def _compile_ptx():
    return compile_ptx
