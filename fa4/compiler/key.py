"""The compile key: a hash over everything that decides what code a kernel becomes, computed without importing torch or cutlass.

Nothing that changes at run time is in it: lengths, batch, pointers and scales are arguments of a compiled kernel.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fa4 import dispatch
from fa4._settings import compiler_environment
from fa4.compiler import toolchain
from fa4.compiler.plain import plain
from fa4.compiler.sources import source_digest
from fa4.problem import AttentionProblem

# Raise it when an entry's files or metadata change their meaning; older entries are then never looked at.
FORMAT = 1

# What turns a kernel class into an artifact is as much a source of it as the class.
_COMPILER = "fa4.compiler.compile"


def kernel_key(problem: AttentionProblem, config: Any, arch: str, line_info: bool = False) -> str:
    """The key of a request, 64 hexadecimal digits.

    Raises:
        CompileError: the toolchain is not usable, or a function in ``problem`` or ``config`` cannot be keyed.
        UnsupportedError: there is no kernel for the request.
    """
    return digest(key_parts(problem, config, arch, line_info))


def key_parts(problem: AttentionProblem, config: Any, arch: str, line_info: bool = False) -> dict[str, Any]:
    """What the key is a hash of, by name."""
    kernel = dispatch.kernel(problem, arch)
    return {
        "format": FORMAT,
        "kernel": kernel,
        "sources": source_digest((kernel.partition(":")[0], _COMPILER)),
        "problem": plain(problem, "problem"),
        "config": plain(config, "config"),
        "arch": arch,
        "toolchain": asdict(toolchain.current()),
        "options": toolchain.options(line_info),
        "environment": dict(compiler_environment()),
    }


def function_key(function: Callable[..., Any]) -> str:
    """The key of a user's function: equal only where the function would compute the same.

    Raises:
        CompileError: a default, closure value or global of it cannot be keyed.
    """
    return digest(plain(function, getattr(function, "__qualname__", "function")))


def digest(data: Any) -> str:
    """SHA-256 of JSON-able data, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, allow_nan=False).encode()).hexdigest()
