from __future__ import annotations

import pytest
from compiler_helpers import fake_artifact

import fa4
from fa4.compiler import cache, lookup


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """An empty cache folder, and nothing in memory."""
    lookup.forget()
    cache._warned.clear()
    with fa4.settings(cache=True, cache_dir=str(tmp_path / "cache"), cache_size=64):
        yield tmp_path / "cache"
    lookup.forget()


@pytest.fixture
def compiles(monkeypatch):
    """Replaces the compiler: a list of the requests that reached it."""
    calls: list[tuple] = []

    def compile_kernel(*request):
        calls.append(request)
        return fake_artifact(f"fake_{len(calls)}")

    import fa4.compiler.compile  # noqa: F401 -- so that there is something to replace

    monkeypatch.setattr("fa4.compiler.compile.compile_kernel", compile_kernel)
    return calls
