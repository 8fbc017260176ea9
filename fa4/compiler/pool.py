"""Compiling many kernels ahead of time, in worker processes, since the DSL compiles one at a time per process."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa4._settings import Settings, current, settings
from fa4.compiler.lookup import get
from fa4.errors import ArgumentError, Fa4Error
from fa4.problem import AttentionProblem

# A worker imports the DSL and keeps what it compiled: about this much memory each (measured: 0.3 to 0.5 GB).
_WORKER_BYTES = 700 << 20


@dataclass(frozen=True)
class Item:
    """One kernel to compile."""

    problem: AttentionProblem
    config: Any
    arch: str


@dataclass(frozen=True)
class Event:
    """The end of one item: ``seconds`` in its worker, ``error`` what went wrong or None. ``done`` of ``total`` items are finished."""

    item: Item
    seconds: float
    error: str | None
    done: int
    total: int


def default_jobs(items: int) -> int:
    """Worker processes for a number of items: one a core, as many as fit into available memory (proc_meminfo(5)), at least one."""
    available = next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return max(1, min(items, len(os.sched_getaffinity(0)), int(available) * 1024 // _WORKER_BYTES))


def compile_all(items: Sequence[Item], jobs: int | None = None) -> Iterator[Event]:
    """Compile every item into the cache; an event as each ends, in order of completion. An item that fails stops no other.

    Raises:
        ArgumentError: ``jobs`` is below 1.
    """
    if jobs is not None and jobs < 1:
        raise ArgumentError("jobs", jobs, "must be at least 1", "leave it out for one per core")
    waiting = list(dict.fromkeys(items))
    if not waiting:
        return
    done, total = 0, len(waiting)
    # Spawn: a forked child would inherit locks and threads of whatever the parent has loaded.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs or default_jobs(total), mp_context=context) as executor:
        futures: dict[Future[tuple[float, str | None]], Item] = {executor.submit(_compile, item, current()): item for item in waiting}
        try:
            for future in as_completed(futures):
                done += 1
                seconds, error = _outcome(future)
                yield Event(futures[future], seconds, error, done, total)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _outcome(future: Future[tuple[float, str | None]]) -> tuple[float, str | None]:
    try:
        return future.result()
    except BrokenProcessPool:
        return 0.0, "a worker process was killed; with little memory, use fewer jobs"


def _compile(item: Item, inherited: Settings) -> tuple[float, str | None]:
    """In a worker: seconds and error of one item."""
    start = time.perf_counter()
    error = None
    with settings(cache=inherited.cache, cache_dir=inherited.cache_dir, cache_size=inherited.cache_size):
        try:
            get(item.problem, item.config, item.arch)
        except Fa4Error as problem:
            error = str(problem)
    return time.perf_counter() - start, error
