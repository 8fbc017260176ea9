from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import fa4
from fa4 import tuning
from fa4.arch import get_arch
from fa4.compiler import get
from fa4.inspection.report import Report, report
from fa4.problem import AttentionProblem

REQUEST = {"head_dim": 64, "arch": "sm_80"}


@pytest.fixture(scope="session")
def full(compile_cache) -> Report:
    with fa4.settings(cache=True, cache_dir=compile_cache):
        return fa4.inspect(**REQUEST)


@pytest.fixture(scope="session")
def causal(compile_cache) -> Report:
    """Without the lines, since other tests compile that."""
    problem = AttentionProblem("forward", "bfloat16", 64, 64, causal=True)
    with fa4.settings(cache=True, cache_dir=compile_cache):
        return report(get(problem, tuning.config(problem, get_arch("sm_80")), "sm_80"))


@pytest.fixture(scope="session")
def blackwell(compile_cache) -> Report:
    """Of one persistent CTA, which the tests of the performance model compile too."""
    problem = AttentionProblem("forward", "bfloat16", 64, 64)
    config = replace(tuning.config(problem, get_arch("sm_100a")), ctas=1)
    with fa4.settings(cache=True, cache_dir=compile_cache):
        return report(get(problem, config, "sm_100a", line_info=True))


@pytest.fixture
def no_nvdisasm(monkeypatch, tmp_path) -> Path:
    """Neither the wheel nor a program on PATH; returns the only folder that is on PATH."""
    from importlib import metadata

    def files(_distribution):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr("fa4.inspection.nvdisasm.metadata.files", files)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path
