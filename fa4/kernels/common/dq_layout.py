"""Where the float32 accumulator of dQ keeps an element: what the main kernel of the Blackwell backward adds to, and the postprocess reads.

Four columns of a row lie together (16 bytes), then the same columns of the other rows of a block of 32, then the next four columns. A warp
whose lanes hold the rows of a block writes 512 contiguous bytes at a time, in shared memory without bank conflicts, and any range of
columns of a block is contiguous, so that a warp adds its rows by one bulk operation and waits for no other warp.
"""

from __future__ import annotations

BLOCK_ROWS = 32
VECTOR = 4
"""Columns that lie together."""


def dq_offset(row: int, column: int, columns: int) -> int:
    """Floats from the start of a (batch, head) to an element; ``columns`` is the padded head dim. Integers, of Python or of a kernel."""
    block, within = row // BLOCK_ROWS, row % BLOCK_ROWS
    return block * (BLOCK_ROWS * columns) + column // VECTOR * (BLOCK_ROWS * VECTOR) + within * VECTOR + column % VECTOR


def dq_element(offset: int, columns: int) -> tuple[int, int]:
    """(row, column) of the float at an offset: the inverse of ``dq_offset``."""
    block, rest = offset // (BLOCK_ROWS * columns), offset % (BLOCK_ROWS * columns)
    vector, within = rest // (BLOCK_ROWS * VECTOR), rest % (BLOCK_ROWS * VECTOR)
    return block * BLOCK_ROWS + within // VECTOR, vector * VECTOR + within % VECTOR
