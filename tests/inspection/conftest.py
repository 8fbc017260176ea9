from __future__ import annotations

from pathlib import Path

import pytest

import fa4
from fa4.inspection.report import Report

REQUEST = {"head_dim": 64, "arch": "sm_80"}


@pytest.fixture(scope="session")
def full(compile_cache) -> Report:
    with fa4.settings(cache=True, cache_dir=compile_cache):
        return fa4.inspect(**REQUEST)


@pytest.fixture(scope="session")
def causal(compile_cache) -> Report:
    with fa4.settings(cache=True, cache_dir=compile_cache):
        return fa4.inspect(**REQUEST, causal=True)


@pytest.fixture(scope="session")
def blackwell(compile_cache) -> Report:
    with fa4.settings(cache=True, cache_dir=compile_cache):
        return fa4.inspect(head_dim=64, arch="sm_100a")  # which the report of the virtual GPU compiles too


@pytest.fixture
def no_nvdisasm(monkeypatch, tmp_path) -> Path:
    """Neither the wheel nor a program on PATH; returns the only folder that is on PATH."""
    from importlib import metadata

    def files(_distribution):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr("fa4.inspection.nvdisasm.metadata.files", files)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path
