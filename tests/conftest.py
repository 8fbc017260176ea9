"""Shared test configuration."""

from __future__ import annotations

import os

# Before numpy is imported: small products gain nothing from threads, and lose much where other work shares the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

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


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory):
    """A folder in which the kernels that this run compiles are kept, for ``fa4.settings(cache_dir=...)``."""
    return str(tmp_path_factory.mktemp("compiled"))
