"""Online softmax: the softmax of a row whose scores arrive tile by tile (Milakov and Gimelshein, arXiv 1805.02867).

A softmax does not change when one number is subtracted from all scores of a row. Any reference will do in exact arithmetic; the
maximum keeps exp from overflowing. When a later tile brings a larger maximum, what was summed so far is corrected by one factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass
class RowState:
    """What a tile of query rows carries from key tile to key tile; it lives on chip.

    Attributes:
        row_max: reference subtracted from the scores, shape (rows,); -inf until a key was seen.
        row_sum: sum of exponentials relative to ``row_max``, shape (rows,).
        out: sum of exponentials times rows of V, not yet divided by ``row_sum``, shape (rows, Dv).
    """

    row_max: Array
    row_sum: Array
    out: Array

    @classmethod
    def start(cls, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float64) -> RowState:
        """Return the state before the first key tile, for an output tile of ``shape`` (rows, Dv)."""
        return cls(np.full(shape[0], -np.inf, dtype), np.zeros(shape[0], dtype), np.zeros(shape, dtype))

    def finish(self) -> tuple[Array, Array]:
        """Divide at last: return the output (rows, Dv) and lse (rows,) in natural-log units if ``row_max`` is."""
        return divide_rows(self.out, self.row_sum), self.row_max + log(self.row_sum)


def online_softmax(state: RowState, scores: Array) -> tuple[Array, Array]:
    """Take in a tile of scores: update ``row_max`` and ``row_sum``, but leave ``out`` to the caller.

    Args:
        state: what the rows carry; changed in place.
        scores: shape (rows, columns), natural-log units, -inf where hidden.

    Returns:
        The exponentials relative to the new maximum, shape (rows, columns), and the factor, shape (rows,), by which the caller
        must multiply ``out`` before it adds the tile's contribution.
    """
    row_max = np.maximum(state.row_max, scores.max(axis=1))
    p = np.exp(scores - finite(row_max)[:, None])
    factor = np.exp(state.row_max - finite(row_max))
    state.row_max = row_max
    state.row_sum = factor * state.row_sum + p.sum(axis=1)
    return p, factor


def finite(row_max: Array) -> Array:
    """Replace a maximum of -inf by 0, so that exp(-inf - reference) is 0 and not NaN in rows that have seen no key."""
    return np.where(row_max == -np.inf, 0.0, row_max).astype(row_max.dtype)


def log(row_sum: Array) -> Array:
    """Take the natural logarithm; a sum of 0 gives -inf without a warning: the value meant for rows that see no key."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(row_sum))


def divide_rows(out: Array, row_sum: Array) -> Array:
    """Divide each row by its sum; rows that see no key (sum 0) give 0 whatever stands in V."""
    empty = row_sum == 0
    return np.where(empty[:, None], 0.0, out / np.where(empty, 1.0, row_sum)[:, None])


def only(rows: npt.NDArray[np.bool_], values: Array) -> Array:
    """Zero all rows but those marked: a row that sees no key must give 0 even where an operand holds NaN (0 * NaN is NaN)."""
    return np.where(rows[:, None], values, 0.0)
