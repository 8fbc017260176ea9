"""The collector of cyclic garbage, out of the way while many objects are made that all stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_blocks = 0
_was_on = False


@contextmanager
def no_collection() -> Iterator[None]:
    """No collection of cycles inside the block: each would go through every object of the process, torch's and cutlass's too.

    The switch is the process's. Blocks may be nested, and open in several threads at once: the last to end, also by an exception, leaves
    the collector as the first has found it.
    """
    global _blocks, _was_on
    with _lock:
        if _blocks == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0 and _was_on:
                gc.enable()
