"""Peak memory of a piece of work in this process."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class PeakMemory:
    """``extra_bytes``: how far resident memory rose above its level at the start; known after the block."""

    extra_bytes: int = 0


@contextmanager
def measure_peak_memory() -> Iterator[PeakMemory]:
    """Measure the peak of resident memory above its level at the start of the block (Linux: /proc/self, proc(5)).

    Whatever the block allocates and keeps, its outputs, is included. Memory that the allocator holds free is given back first where
    it can be (malloc_trim(3) of glibc); elsewhere measure in a fresh process.

    Raises:
        OSError: not on Linux.
    """
    peak = PeakMemory()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the current resident size
    start = _status_bytes("VmRSS")
    yield peak
    peak.extra_bytes = max(_status_bytes("VmHWM") - start, 0)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
