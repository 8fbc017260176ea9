"""Which keys a query sees: the one rule that every algorithm here uses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Window = tuple[int | None, int | None]

OPEN = (None, -1)
"""Values of a window bound that mean "no limit on this side"."""


def visible(
    queries: npt.NDArray[np.int64], keys: npt.NDArray[np.int64], *, offset: int, causal: bool = False, window_size: Window = (None, None)
) -> npt.NDArray[np.bool_]:
    """Tell which keys each query sees.

    The mask is aligned bottom-right: query ``i`` stands at key position ``i + offset`` with ``offset = Sk - Sq``, so that the
    last query stands at the last key. It sees key ``j`` iff ``i + offset - left <= j <= i + offset + right``.

    Args:
        queries: query indices i, shape (rows,), int64.
        keys: key indices j, shape (columns,), int64.
        offset: Sk - Sq, in keys.
        causal: clamp ``right`` to at most 0; an open right becomes 0.
        window_size: (left, right) in keys. None or -1 means open on that side; any other value, negative ones included, is an
            offset like any number: right = -8 hides the 8 nearest keys up to and including the query's own position.

    Returns:
        Booleans, shape (rows, columns): True where query i sees key j.
    """
    left, right = (None if bound in OPEN else bound for bound in window_size)
    if causal:
        right = 0 if right is None else min(right, 0)
    distance = keys[None, :] - (queries[:, None] + offset)
    seen = np.ones(distance.shape, dtype=np.bool_)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen
