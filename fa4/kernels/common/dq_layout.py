"""Where the float32 accumulator of dQ keeps an element: what the main kernel of the Blackwell backward adds to, and the postprocess reads.

Four columns of a row lie together (16 bytes), then the same columns of the other rows of a block of 64, then the next four columns. A warp
whose lanes hold consecutive rows writes 512 contiguous bytes at a time, in shared memory without bank conflicts, and the bytes of a block
of 64 rows are contiguous, so that one bulk operation moves any range of its columns.
"""

from __future__ import annotations

BLOCK_ROWS = 64
VECTOR = 4
"""Columns that lie together."""


def dq_offset(row: int, column: int, columns: int) -> int:
    """Floats from the start of a (batch, head) to an element; ``columns`` is the padded head dim. Integers, of Python or of a kernel."""
    block, within = row // BLOCK_ROWS, row % BLOCK_ROWS
    return block * (BLOCK_ROWS * columns) + column // VECTOR * (BLOCK_ROWS * VECTOR) + within * VECTOR + column % VECTOR
