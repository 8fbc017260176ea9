from __future__ import annotations

import os
from pathlib import Path

import pytest
from toy_config import ToyConfig, toy_problem

import fa4
from fa4.compiler.cache import DiskCache
from fa4.compiler.pool import Item, compile_all, default_jobs


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Workers are fresh processes: they find fa4 and the toy kernel by path."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(fa4.__file__).parents[1]), str(Path(__file__).parent)]))


@pytest.mark.compile
@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_items_are_compiled_into_the_cache_and_failures_are_collected(folder, jobs):
    good = [Item(toy_problem(dim), ToyConfig(), "sm_80") for dim in (8, 16)]
    bad = Item(toy_problem(), ToyConfig(broken=True), "sm_80")
    events = list(compile_all([*good, bad, good[0]], jobs))
    assert [(event.done, event.total) for event in events] == [(1, 3), (2, 3), (3, 3)], "doubles are compiled once"
    errors = {event.item: event.error for event in events}
    assert errors.pop(bad).startswith("toy_kernel:Toy does not compile for sm_80")
    assert errors == dict.fromkeys(good)
    assert len(DiskCache(folder, 1 << 30).entries()) == 2
    again = list(compile_all(good, jobs=1))
    assert all(event.error is None and event.seconds < 1 for event in again), "served from the cache"


class Killer:
    """A config that ends the process that unpickles it."""

    def __reduce__(self):
        return os._exit, (9,)


def test_a_killed_worker_is_an_error_of_its_item():
    (event,) = compile_all([Item(toy_problem(), Killer(), "sm_80")], jobs=1)
    assert "a worker process was killed" in event.error


def test_nothing_to_do_and_bad_arguments():
    assert list(compile_all([])) == []
    with pytest.raises(fa4.ArgumentError, match="jobs=0"):
        list(compile_all([Item(toy_problem(), ToyConfig(), "sm_80")], jobs=0))
    assert 1 <= default_jobs(100) <= os.cpu_count()
    assert default_jobs(1) == 1
