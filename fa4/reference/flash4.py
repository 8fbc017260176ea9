"""FlashAttention-4's softmax: fewer rescales, and part of the exponentials on the multiply-add units (arXiv 2603.05451).

Its pipeline (what overlaps with what) changes no number and is not here. Two changes do:

* conditional rescaling: the reference subtracted from the scores may lag behind the true row maximum by up to tau, in powers of
  two. While it does, no correction of O is due. The division at the end uses a sum relative to the same reference: exact.
* emulated exp2: for a share of the elements, 2^x comes from a polynomial instead of the special-function unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fa4.emulate_exp.twin import emulated_exp2
from fa4.errors import ArgumentError
from fa4.reference.heads import Head, run_forward
from fa4.reference.online import RowState, finite
from fa4.reference.problem import AttentionOptions, AttentionResult, Tiles, check_inputs

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]

LOG2_E = 1 / math.log(2)


@dataclass(frozen=True)
class Flash4Options:
    """The two changes, each of which can be turned off.

    Attributes:
        tau: how far the true row maximum may exceed the reference before O is rescaled, in log2 units (8: a factor of 256);
            0 rescales at every key tile.
        warp: rows that decide together: if one of them needs it, all take their true maximum as the new reference.
        emulated_share: share of each row's elements whose exp2 is emulated, 0 to 1, spread evenly over the columns of a tile.
        exp2: 2^x for a float32 array, elementwise; called on the emulated elements, hidden ones (-inf) included.

    Raises:
        ArgumentError: a value out of range.
    """

    tau: float = 8.0
    warp: int = 32
    emulated_share: float = 0.25
    exp2: Callable[[Float32Array], Float32Array] = field(default=emulated_exp2)

    def __post_init__(self) -> None:
        """Check the values."""
        if not self.tau >= 0:
            raise ArgumentError("tau", self.tau, "must be at least 0", "pass 0 to rescale always, or 8 as the paper does")
        if self.warp < 1:
            raise ArgumentError("warp", self.warp, "must be at least 1", "pass 32, the rows of one warp")
        if not 0 <= self.emulated_share <= 1:
            raise ArgumentError("emulated_share", self.emulated_share, "must be from 0 to 1", "pass 0 to emulate nothing")


def flash4_attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    options: AttentionOptions | None = None,
    tiles: Tiles | None = None,
    flash4: Flash4Options | None = None,
) -> AttentionResult:
    """Compute attention by FlashAttention-4's algorithm, in float64 but for the emulated exponentials, which are float32.

    The ledger counts one decision per warp and key tile after the first: ``rescales_done`` and ``rescales_skipped``.

    Args:
        q: queries, as for ``standard_attention``.
        k: keys, likewise.
        v: values, likewise.
        options: scale, mask and softcap; default ``AttentionOptions()``.
        tiles: tile sizes; default ``Tiles()``.
        flash4: threshold and emulation; default ``Flash4Options()``.

    Returns:
        As ``standard_attention``.

    Raises:
        DtypeError, ShapeError: see ``check_inputs``.
    """
    sizes, variant = tiles or Tiles(), flash4 or Flash4Options()
    return run_forward(check_inputs(q, k, v), options or AttentionOptions(), lambda head: _forward(head, sizes, variant))


def _forward(head: Head, tiles: Tiles, variant: Flash4Options) -> None:
    memory = head.memory
    for rows in head.row_tiles(tiles.rows):
        q = memory.read("Q", rows)
        state = RowState.start(memory.result("O")[rows].shape)
        first = True
        for columns in head.column_tiles(tiles.columns):
            if head.is_empty(rows, columns):
                continue
            k, v = memory.read("K", columns), memory.read("V", columns)
            scores = head.scores(q @ k.T, rows, columns) * LOG2_E  # a kernel folds this factor into the scale

            rescale = needs_rescale(state, scores, variant)
            if not first:  # before the first tile there is nothing to rescale and no decision to take
                head.memory.ledger.rescales_done += int(rescale[:: variant.warp].sum())
                head.memory.ledger.rescales_skipped += int((~rescale[:: variant.warp]).sum())
            first = False

            apply_rescale(state, scores, rescale)
            p = exponentials(scores, state.row_max, variant)
            state.row_sum = state.row_sum + p.sum(axis=1)
            state.out = state.out + p @ v
        state.row_max = state.row_max / LOG2_E  # back to natural-log units, for lse
        out, lse = state.finish()
        memory.write("O", out, rows)
        memory.write("lse", lse, rows)


def needs_rescale(state: RowState, scores: Array, variant: Flash4Options) -> npt.NDArray[np.bool_]:
    """Decide for each row, uniformly in a warp, whether its reference moves up to the true maximum; scores in log2 units."""
    true_max = scores.max(axis=1)
    excess = np.zeros(len(true_max))
    np.subtract(true_max, state.row_max, out=excess, where=true_max > state.row_max)  # inf for a row that sees its first key
    row_needs = excess > variant.tau if variant.tau else np.ones(len(excess), dtype=np.bool_)
    decision = np.empty(len(excess), dtype=np.bool_)
    for start in range(0, len(excess), variant.warp):
        warp = slice(start, start + variant.warp)
        decision[warp] = row_needs[warp].any()
    return decision


def apply_rescale(state: RowState, scores: Array, rescale: npt.NDArray[np.bool_]) -> None:
    """Move the reference of the rows marked, and correct what they have summed so far."""
    new_max = np.where(rescale, np.maximum(state.row_max, scores.max(axis=1)), state.row_max)
    factor = np.where(rescale, np.exp2(state.row_max - finite(new_max)), 1.0)
    state.row_max = new_max
    state.row_sum = factor * state.row_sum
    state.out = factor[:, None] * state.out


def exponentials(scores: Array, reference: Array, variant: Flash4Options) -> Array:
    """Return 2^(scores - reference), shape (rows, columns), some columns of it emulated; 0 where scores are -inf."""
    exponents = scores - finite(reference)[:, None]
    p = np.exp2(exponents)
    emulated = emulated_columns(scores.shape[1], variant.emulated_share)
    p[:, emulated] = variant.exp2(exponents[:, emulated].astype(np.float32))
    # An emulation may clamp its argument and return a tiny number for -inf; a hidden key counts exactly 0.
    return np.where(scores == -np.inf, 0.0, p)


def emulated_columns(columns: int, share: float) -> npt.NDArray[np.bool_]:
    """Mark floor(columns * share) columns, evenly spread: the one where the running count j * share passes an integer."""
    counts = np.floor(np.arange(columns + 1) * share)
    return np.asarray(np.diff(counts) > 0)
