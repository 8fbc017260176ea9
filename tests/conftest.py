"""Shared test configuration."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile

# Before numpy and torch are imported: small products gain nothing from threads, and lose much where other work shares the cores, such as
# pytest's other workers. Tests that are about threads ask for them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# One cache of compiled kernels for this run and the processes it starts. With FA4_CACHE_DIR set, that folder, which later runs find filled.
if "FA4_CACHE_DIR" not in os.environ:
    os.environ["FA4_CACHE_DIR"] = tempfile.mkdtemp(prefix="fa4-tests-")
    atexit.register(shutil.rmtree, os.environ["FA4_CACHE_DIR"], ignore_errors=True)

import hypothesis
import pytest

# Reproducible in CI, no time limit per example (machines differ), and a budget that keeps the default run short.
hypothesis.settings.register_profile("fa4", deadline=None, derandomize=True, max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "25")))
hypothesis.settings.load_profile("fa4")


def pytest_collection_modifyitems(config, items):
    """The slow matrix runs only when asked for with -m."""
    if config.option.markexpr:
        return
    selected = [item for item in items if "slow" not in item.keywords]
    config.hook.pytest_deselected(items=[item for item in items if "slow" in item.keywords])
    items[:] = selected


def pytest_configure():
    """No collector while tests are imported; what is there then lives on, and it need not look at that again and again."""
    gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session")
def compile_cache():
    """The folder in which the kernels that this run compiles are kept, for processes and threads with settings of their own."""
    return os.environ["FA4_CACHE_DIR"]
