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
from typing import Any

from fa4.errors import ArgumentError

PREFIX = "FA4_"

_CHOICES = {"cpu_path": ("auto", "tiled")}


@dataclass(frozen=True)
class Settings:
    """``cpu_path``: "auto" uses torch's own CPU attention where a request fits it; "tiled" never does (to tell the two apart)."""

    cpu_path: str = "auto"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ArgumentError(name, value, "unknown setting value", f"use one of {', '.join(choices)}")


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Settings from ``FA4_*`` variables; an unknown one warns, since a misspelt setting would otherwise do nothing.

    Raises:
        ArgumentError: a value is not allowed.
    """
    known = {PREFIX + field.name.upper(): field.name for field in fields(Settings)}
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            warnings.warn(f"unknown environment variable {variable}; known ones: {', '.join(sorted(known))}", stacklevel=2)
    return Settings(**{name: environ[variable] for variable, name in known.items() if variable in environ})


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
