"""Kernels compiled for tests, each once per session."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

from fa4.arch import get_arch
from fa4.compiler import get
from fa4.tuning import config


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


@cache
def compile_ptx(problem, arch, configuration=None):
    """The forward kernel of ``problem`` for ``arch``, without ``configuration`` as tuned."""
    configuration = configuration or config(problem, get_arch(arch))
    artifact = get(problem, configuration, arch)
    (kernel,) = artifact.kernels
    needs = kernel.resources
    if needs.spill_stores is None:  # it has a stack: how much it spills comes with a line table only
        (told,) = get(problem, configuration, arch, line_info=True).kernels
        needs = told.resources
    spills = needs.spill_stores, needs.spill_loads
    return Compiled(kernel.name, artifact.ptx, needs.registers, needs.stack, *spills, kernel.launch.dynamic_shared)


@pytest.fixture(name="compile_ptx", scope="session")
def _compile_ptx():
    return compile_ptx
