"""``get``: memory, then disk, then the compiler."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from fa4.compiler.artifact import Artifact
from fa4.compiler.cache import default_cache
from fa4.compiler.key import digest, key_parts
from fa4.compiler.plain import contains_function
from fa4.problem import AttentionProblem

Request = tuple[AttentionProblem, Any, str, bool]

_log = logging.getLogger(__name__)

# What a request led to, and the key it had if that may change while the request stays the same object: a function's globals may.
_requests: dict[Request, tuple[Artifact, str | None]] = {}
_artifacts: dict[str, Artifact] = {}
_locks: dict[str, threading.Lock] = {}


def get(problem: AttentionProblem, config: Any, arch: str, line_info: bool = False) -> Artifact:
    """The compiled kernel of a request: from this process, from the cache on disk, or compiled now.

    ``config`` is hashable. Processes and threads that ask for one kernel at a time compile it once. Neither torch nor cutlass is
    imported unless something is compiled. With ``line_info`` the artifact has a line table, and took longer to compile.

    Raises:
        CompileError: the toolchain is not usable, the kernel does not compile, or a function in the request cannot be keyed.
        UnsupportedError: there is no kernel for the request.
    """
    request = problem, config, arch, line_info
    known = _requests.get(request)
    if known is not None and (known[1] is None or known[1] == digest(key_parts(*request))):
        return known[0]
    parts = key_parts(*request)
    key = digest(parts)
    with _locks.setdefault(key, threading.Lock()):
        if key not in _artifacts:
            _artifacts[key] = _find(key, request)
    changeable = contains_function([parts["problem"], parts["config"]])
    _requests[request] = _artifacts[key], key if changeable else None
    return _artifacts[key]


def forget() -> None:
    """Forget what this process holds in memory; the disk keeps its entries."""
    _requests.clear()
    _artifacts.clear()


def _find(key: str, request: Request) -> Artifact:
    cache = default_cache()
    if cache is None:
        return _compile(request)
    artifact = cache.load(key)
    if artifact is None:
        with cache.lock(key):
            artifact = cache.load(key, report=True)  # whoever held the lock may have compiled it
            if artifact is None:
                artifact = _compile(request)
                cache.store(key, artifact)
    return artifact


def _compile(request: Request) -> Artifact:
    from fa4.compiler.compile import compile_kernel

    start = time.perf_counter()
    artifact = compile_kernel(*request)
    _log.info("compiled %s for %s in %.1f s", artifact.source, artifact.arch, time.perf_counter() - start)
    return artifact
