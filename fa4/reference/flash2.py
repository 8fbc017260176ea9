"""FlashAttention-2: queries in the outer loop, one division at the end, and a tiled backward (arXiv 2307.08691, section 3.1)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fa4.errors import ShapeError
from fa4.reference.heads import Head, run_backward, run_forward
from fa4.reference.online import RowState, finite, online_softmax, only
from fa4.reference.problem import AttentionOptions, AttentionResult, Gradients, Tiles, check_inputs, check_output_gradients


def flash2_attention(
    q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, *, options: AttentionOptions | None = None, tiles: Tiles | None = None
) -> AttentionResult:
    """Compute attention by FlashAttention-2 (Algorithm 1).

    A tile of queries meets all its keys before the next one starts, so O and the statistics stay on chip and are written once.
    O is divided by the row sum once, at the end; the backward needs one number a row, lse. Hidden tiles are skipped.

    Args:
        q: queries, as for ``standard_attention``.
        k: keys, likewise.
        v: values, likewise.
        options: scale, mask and softcap; default ``AttentionOptions()``.
        tiles: tile sizes; default ``Tiles()``.

    Returns:
        As ``standard_attention``.

    Raises:
        DtypeError, ShapeError: see ``check_inputs``.
    """
    sizes = tiles or Tiles()
    return run_forward(check_inputs(q, k, v), options or AttentionOptions(), lambda head: _forward(head, sizes))


def flash2_attention_backward(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    forward: AttentionResult,
    dout: npt.ArrayLike | None,
    dlse: npt.ArrayLike | None = None,
    *,
    options: AttentionOptions | None = None,
    tiles: Tiles | None = None,
) -> Gradients:
    """Compute gradients tile by tile, a tile of keys staying on chip (Algorithm 2).

    P is not stored: it is computed again from Q, K and lse. The gradient of lse enters by one subtraction in ``delta``.

    Args:
        q: queries, as for ``standard_attention``.
        k: keys, likewise.
        v: values, likewise.
        forward: result of a forward pass with the same options; its out and lse are used.
        dout: gradient of out, as for ``standard_attention_backward``.
        dlse: gradient of lse, likewise.
        options: scale, mask and softcap; default ``AttentionOptions()``.
        tiles: tile sizes; default ``Tiles()``.

    Returns:
        As ``standard_attention_backward``; the ledger counts the backward pass alone.

    Raises:
        DtypeError, ShapeError, ArgumentError: see ``check_inputs`` and ``check_output_gradients``; ShapeError too if ``forward``
            is of other shapes.
    """
    sizes = tiles or Tiles()
    inputs = check_inputs(q, k, v)
    dout, dlse = check_output_gradients(inputs, dout, dlse)
    if forward.out.shape != inputs.out_shape or forward.lse.shape != inputs.lse_shape:
        raise ShapeError(
            "forward", forward.out.shape, f"its out must have the shape {inputs.out_shape}", "pass the result for these operands"
        )
    row_tensors = {"O": forward.out, "lse": forward.lse, "dO": dout, "dlse": dlse}
    return run_backward(inputs, options or AttentionOptions(), row_tensors, lambda head: _backward(head, sizes))


def _forward(head: Head, tiles: Tiles) -> None:
    memory = head.memory
    for rows in head.row_tiles(tiles.rows):
        q = memory.read("Q", rows)
        state = RowState.start(memory.result("O")[rows].shape)
        for columns in head.column_tiles(tiles.columns):
            if head.is_empty(rows, columns):
                continue
            k, v = memory.read("K", columns), memory.read("V", columns)
            p, factor = online_softmax(state, head.scores(q @ k.T, rows, columns))
            state.out = factor[:, None] * state.out + p @ v
        out, lse = state.finish()
        memory.write("O", out, rows)
        memory.write("lse", lse, rows)


def _backward(head: Head, tiles: Tiles) -> None:
    memory = head.memory
    memory.initialise("dQ", memory.result("Q").shape)
    memory.allocate("dK", memory.result("K").shape)
    memory.allocate("dV", memory.result("V").shape)
    memory.allocate("delta", (head.seqlen_q,))
    memory.write("delta", (memory.read("O") * memory.read("dO")).sum(axis=1) - memory.read("dlse"))

    for columns in head.column_tiles(tiles.columns):
        k, v = memory.read("K", columns), memory.read("V", columns)
        dk, dv = np.zeros(k.shape), np.zeros(v.shape)
        for rows in head.row_tiles(tiles.rows):
            if head.is_empty(rows, columns):
                continue
            q, dout = memory.read("Q", rows), memory.read("dO", rows)
            lse, delta = memory.read("lse", rows), memory.read("delta", rows)
            sees_a_key = lse != -np.inf

            scores = head.scores(q @ k.T, rows, columns)
            p = np.exp(scores - finite(lse)[:, None])  # normalised at once: exp(s - lse) = exp(s - max) / sum
            dv += p.T @ only(sees_a_key, dout)

            score_gradient = p * (dout @ v.T - delta[:, None])
            ds = only(sees_a_key, head.product_gradient(score_gradient, scores, rows, columns))
            dk += ds.T @ only(sees_a_key, q)
            # Each key tile adds to the same rows of dQ: the read-modify-write that a GPU does with atomic adds.
            memory.write("dQ", memory.read("dQ", rows) + only(sees_a_key, ds @ k), rows)
        memory.write("dK", dk, columns)
        memory.write("dV", dv, columns)
