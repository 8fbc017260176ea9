"""Case 45: many processes and threads want one kernel, and some of them die."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from compiler_helpers import CHILD, REQUEST, compile_count, run_python, start_python

import fa4
from fa4.compiler import get
from fa4.compiler.cache import DiskCache
from fa4.compiler.key import kernel_key

GET = CHILD + "\nprint(lookup.get(*REQUEST).function)"
HOLD = """
import os, time
from pathlib import Path
from compiler_helpers import REQUEST
from fa4.compiler.cache import default_cache
from fa4.compiler.key import kernel_key
with default_cache().lock(kernel_key(*REQUEST)):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("processes", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_processes_compile_once(folder, processes):
    children = [start_python(GET, folder, COMPILE_SECONDS="1") for _ in range(processes)]
    for child in children:
        output, errors = child.communicate(timeout=120)
        assert (child.returncode, output.strip(), errors) == (0, "fake", "")
    assert compile_count(folder) == 1


UNLOCKED = """
from contextlib import nullcontext
from fa4.compiler.cache import DiskCache
DiskCache.lock = lambda self, key: nullcontext()
"""


def test_without_the_lock_they_would_not(folder):
    """Planted fault: the same, with a lock that nobody holds."""
    children = [start_python(UNLOCKED + GET, folder, COMPILE_SECONDS="2") for _ in range(2)]
    for child in children:
        _, errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors
    assert compile_count(folder) == 2


def test_a_dead_lock_holder_does_not_block(folder, compiles):
    holder = start_python(HOLD, folder)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(TimeoutError):
        DiskCache(folder, 1)._acquire(kernel_key(*REQUEST), wait=False)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    start = time.perf_counter()
    get(*REQUEST)
    assert time.perf_counter() - start < 10
    assert len(compiles) == 1


def test_waiting_is_logged(folder, compiles, caplog, monkeypatch):
    monkeypatch.setattr("fa4.compiler.cache._WAIT_SECONDS", 0.2)
    holder = start_python(HOLD, folder)
    assert holder.stdout.readline() == "held\n"
    threading.Timer(0.7, holder.kill).start()
    with caplog.at_level("INFO", logger="fa4"):
        get(*REQUEST)
    holder.communicate()
    messages = [record.getMessage() for record in caplog.records]
    assert "waiting for another process" in messages[0]
    assert any("still waiting" in message for message in messages)


def test_threads_compile_once(folder, compiles, monkeypatch):
    import fa4.compiler.compile as module

    counted = module.compile_kernel

    def slow(*request):
        time.sleep(0.2)
        return counted(*request)

    monkeypatch.setattr(module, "compile_kernel", slow)
    found = []

    def ask():
        with fa4.settings(cache_dir=str(folder)):
            found.append(get(*REQUEST))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(artifact is found[0] for artifact in found)
    assert len(compiles) == 1


HIT = """
import sys
from compiler_helpers import REQUEST
import fa4
from fa4.compiler import get
from fa4.compiler.compile import compile_kernel
import fa4.compiler.compile
assert "cutlass" not in sys.modules and "torch" not in sys.modules
def fail(*request):
    raise AssertionError("compiled again")
fa4.compiler.compile.compile_kernel = fail
print(get(*REQUEST).function, "cutlass" in sys.modules, "torch" in sys.modules)
"""


def test_a_second_process_finds_the_kernel_without_cutlass_or_torch(folder, compiles):
    get(*REQUEST)
    assert run_python(HIT, folder) == "fake_1 False False"


def test_a_miss_is_noticed_by_the_same_check(folder):
    """Planted fault: nothing is in the cache."""
    with pytest.raises(AssertionError, match="compiled again"):
        run_python(HIT, folder)
