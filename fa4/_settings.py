"""Process settings: the only reader of ``os.environ``.

Every setting has an environment variable, ``FA4_`` and its name in capitals, read once; ``with fa4.settings(...)`` overrides it for
the current thread or task. Settings are read when work is done, not when it is traced, so ``torch.compile`` never bakes one in.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal

from fa4.errors import ArgumentError

PREFIX = "FA4_"

_CHOICES = {
    "cpu_path": ("auto", "tiled"),
    "cache": (True, False),
    "vgpu_schedule": ("round_robin", "random", "priority"),
    "vgpu_delay": ("late", "early"),
    "vgpu_checks": ("basic", "hazards", "isa"),
    "vgpu_execution": ("grouped", "plain"),
}
_SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


@dataclass(frozen=True)
class Settings:
    """What can be set.

    ``cpu_path``: "auto" uses torch's own CPU attention where a request fits it; "tiled" never does (to tell the two apart).
    ``cache``: keep compiled kernels on disk. ``cache_dir``: the folder for them, None for the user's cache folder. ``cache_size``: its
    bound in MiB. ``vgpu_seed``: of every random choice of the virtual GPU; ``vgpu_schedule``: the order in which it runs warps, see
    ``fa4.vgpu.scheduler``; ``vgpu_delay``: when its asynchronous copies read their source, ``vgpu_checks``: how strict it
    is, ``vgpu_processes``: how many processes share a grid, ``vgpu_execution``: instructions alone or in groups, see ``fa4.vgpu.Gpu``.
    """

    cpu_path: str = "auto"
    cache: bool = True
    cache_dir: str | None = None
    cache_size: int = 1024
    vgpu_seed: int = 0
    vgpu_schedule: Literal["round_robin", "random", "priority"] = "round_robin"
    vgpu_delay: Literal["late", "early"] = "late"
    vgpu_checks: Literal["basic", "hazards", "isa"] = "hazards"
    vgpu_processes: int = 1
    vgpu_execution: Literal["grouped", "plain"] = "grouped"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
                raise ArgumentError(name, value, "unknown setting value", f"use one of {', '.join(map(str, choices))}")
        if self.cache_dir is not None and not (isinstance(self.cache_dir, str) and self.cache_dir):
            raise ArgumentError("cache_dir", self.cache_dir, "must name a folder", "give a path as a string, or None for the default")
        if type(self.cache_size) is not int or self.cache_size < 1:
            raise ArgumentError("cache_size", self.cache_size, "must be a whole number of MiB, at least 1", "for example 1024")
        if type(self.vgpu_seed) is not int or self.vgpu_seed < 0:
            raise ArgumentError("vgpu_seed", self.vgpu_seed, "must be a whole number, at least 0", "for example 3")
        if type(self.vgpu_processes) is not int or self.vgpu_processes < 1:
            raise ArgumentError("vgpu_processes", self.vgpu_processes, "must be a whole number, at least 1", "1 is the default")


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Settings from ``FA4_*`` variables; an unknown one warns, since a misspelt setting would otherwise do nothing.

    Raises:
        ArgumentError: a value is not allowed.
    """
    known = {PREFIX + field.name.upper(): field.name for field in fields(Settings)}
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            warnings.warn(f"unknown environment variable {variable}; known ones: {', '.join(sorted(known))}", stacklevel=2)
    values = {name: _parse(name, environ[variable]) for variable, name in known.items() if environ.get(variable)}
    try:
        return Settings(**values)
    except ArgumentError as error:
        variable = PREFIX + error.argument.upper()
        raise ArgumentError(variable, environ[variable], error.rule, error.remedy) from None


def _parse(name: str, text: str) -> Any:
    """The value that an environment variable's text means; text that means nothing is left for ``Settings`` to refuse."""
    if name == "cache":
        return _SWITCH.get(text.lower(), text)
    if name in ("cache_size", "vgpu_seed", "vgpu_processes"):
        return int(text) if text.isdecimal() else text
    return text


# Variables of the DSL that choose what it prints, logs, keeps or caches: it declares them itself to have no part in what is compiled
# (``affects_compile=False`` in its ``env_manager.py``). Any other ``CUTE_DSL_`` variable, known or not, counts as changing code.
_HARMLESS_COMPILER_VARIABLES = (
    *("CUTE_DSL_CACHE_DIR", "CUTE_DSL_DISABLE_FILE_CACHING", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_ENABLE_OPTIMIZATION_WARNINGS"),
    *("CUTE_DSL_FILTER_STACKTRACE", "CUTE_DSL_JIT_CACHE_MAX_ELEMS", "CUTE_DSL_JIT_TIME_PROFILING", "CUTE_DSL_KEEP", "CUTE_DSL_KEEP_CUBIN"),
    *(
        "CUTE_DSL_KEEP_IR",
        "CUTE_DSL_KEEP_PTX",
        "CUTE_DSL_KEEP_SASS",
        "CUTE_DSL_LOG_LEVEL",
        "CUTE_DSL_LOG_TO_CONSOLE",
        "CUTE_DSL_LOG_TO_FILE",
    ),
    *(
        "CUTE_DSL_NO_CACHE",
        "CUTE_DSL_PRINT_AFTER_PREPROCESSOR",
        "CUTE_DSL_PRINT_IR",
        "CUTE_DSL_SHOW_STACKTRACE",
        "CUTE_DSL_WARNINGS_IGNORE",
    ),
)


@lru_cache(maxsize=1)
def compiler_environment() -> Mapping[str, str]:
    """The environment variables that change what the DSL generates; part of every compile key. Read once, as the DSL reads them."""
    return {
        name: os.environ[name] for name in sorted(os.environ) if name.startswith("CUTE_DSL_") and name not in _HARMLESS_COMPILER_VARIABLES
    }


def no_colour() -> bool:
    """Whether the user asked every program for output without colour (no-color.org: NO_COLOR is set and not empty)."""
    return bool(os.environ.get("NO_COLOR"))


_override: ContextVar[Settings | None] = ContextVar("fa4_settings", default=None)
_process: Settings | None = None


def current() -> Settings:
    """The settings in force here."""
    global _process
    override = _override.get()
    if override is not None:
        return override
    if _process is None:
        _process = from_environment(os.environ)
    return _process


@contextmanager
def settings(**changes: Any) -> Iterator[Settings]:
    """Change settings inside a ``with`` block, for the current thread or asyncio task.

    Raises:
        ArgumentError: an unknown setting or a value that is not allowed.
    """
    known = [field.name for field in fields(Settings)]
    for name, value in changes.items():
        if name not in known:
            raise ArgumentError(name, value, "is not a setting", f"settings are {', '.join(known)}")
    token = _override.set(replace(current(), **changes))
    try:
        yield current()
    finally:
        _override.reset(token)
