"""The toy kernel's config, apart from it so that a process which finds the kernel in the cache never imports cutlass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToyConfig:
    threads: int = 128
    factor: float = 2.0
    broken: bool = False
