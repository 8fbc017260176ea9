"""FlashAttention-1: no N x N matrix in device memory (arXiv 2205.14135, section 3.1 and Algorithm 1)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fa4.reference.heads import Head, run_forward
from fa4.reference.online import divide_rows, finite, log
from fa4.reference.problem import AttentionOptions, AttentionResult, Tiles, check_inputs


def flash1_attention(
    q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, *, options: AttentionOptions | None = None, tiles: Tiles | None = None
) -> AttentionResult:
    """Compute attention by FlashAttention-1: keys in the outer loop, queries in the inner one.

    The inner loop visits all queries before the next key tile, so O and its statistics go to device memory and back at every
    step, and O is normalised there at every step. Tiles that the mask hides are skipped.

    Args:
        q: queries, as for ``standard_attention``.
        k: keys, likewise.
        v: values, likewise.
        options: scale, mask and softcap; default ``AttentionOptions()``.
        tiles: tile sizes; default ``Tiles()``.

    Returns:
        As ``standard_attention``. lse is made from the statistics that the algorithm leaves in memory; that is not counted.

    Raises:
        DtypeError, ShapeError: see ``check_inputs``.
    """
    sizes = tiles or Tiles()
    return run_forward(check_inputs(q, k, v), options or AttentionOptions(), lambda head: _forward(head, sizes))


def _forward(head: Head, tiles: Tiles) -> None:
    memory = head.memory
    memory.initialise("O", memory.result("O").shape)
    memory.initialise("row_max", (head.seqlen_q,), -np.inf)
    memory.initialise("row_sum", (head.seqlen_q,))

    for columns in head.column_tiles(tiles.columns):
        k, v = memory.read("K", columns), memory.read("V", columns)
        for rows in head.row_tiles(tiles.rows):
            if head.is_empty(rows, columns):
                continue
            q, out = memory.read("Q", rows), memory.read("O", rows)
            row_max, row_sum = memory.read("row_max", rows), memory.read("row_sum", rows)

            scores = head.scores(q @ k.T, rows, columns)
            tile_max = scores.max(axis=1)
            p = np.exp(scores - finite(tile_max)[:, None])

            new_max = np.maximum(row_max, tile_max)
            old_factor = np.exp(row_max - finite(new_max))
            tile_factor = np.exp(tile_max - finite(new_max))
            new_sum = old_factor * row_sum + tile_factor * p.sum(axis=1)

            # O in memory is normalised: undo the old sum, correct both parts to the new maximum, divide by the new sum.
            unnormalised = (old_factor * row_sum)[:, None] * out + tile_factor[:, None] * (p @ v)
            memory.write("O", divide_rows(unnormalised, new_sum), rows)
            memory.write("row_max", new_max, rows)
            memory.write("row_sum", new_sum, rows)

    memory.result("lse")[:] = memory.result("row_max") + log(memory.result("row_sum"))
