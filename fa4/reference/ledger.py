"""Counts of device-memory traffic, in elements, and the published formulas they must equal.

A GPU reads its operands from device memory (HBM) into a small on-chip memory. Attention is limited by that traffic more often
than by arithmetic, so every algorithm here moves its tensors through :class:`DeviceMemory`, and the :class:`Ledger` counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fa4.errors import ArgumentError

Array = npt.NDArray[Any]

COLUMNS: dict[str, tuple[str, ...]] = {
    "operands": ("Q", "K", "V", "O", "dO", "dQ", "dK", "dV"),
    "intermediates": ("S", "P", "dP", "dS"),
    "statistics": ("row_max", "row_sum", "lse", "delta", "dlse"),
}
"""Which tensors are summed in which column. Only ``intermediates`` are of size N x N."""


@dataclass
class Ledger:
    """Device-memory traffic of one call, in elements, summed over batch and query heads.

    Heads of a group each read their own copy of K and V: sharing between heads is left to a cache, which is not modelled.

    Attributes:
        heads: number of (batch, query head) pairs counted so far.
        reads, writes: elements by tensor name (see ``COLUMNS``).
        initialised: elements set to a constant before the algorithm starts. The published formulas do not count them, so they
            are kept apart.
        rescales_done, rescales_skipped: decisions about rescaling the output accumulator; see ``flash4``.
        largest_intermediate: elements of the largest piece of S that exists at one time, for one head: N * N for standard
            attention, tile rows * tile columns for a tiled one.
    """

    heads: int = 0
    reads: dict[str, int] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)
    initialised: dict[str, int] = field(default_factory=dict)
    rescales_done: int = 0
    rescales_skipped: int = 0
    largest_intermediate: int = 0

    @property
    def operands(self) -> int:
        """Elements of Q, K, V, O and their gradients, read and written."""
        return self._column("operands")

    @property
    def intermediates(self) -> int:
        """Elements of the N x N matrices (scores, probabilities and their gradients), read and written."""
        return self._column("intermediates")

    @property
    def statistics(self) -> int:
        """Elements of the per-row statistics, read and written."""
        return self._column("statistics")

    @property
    def total(self) -> int:
        """Elements of all columns."""
        return self.operands + self.intermediates + self.statistics

    def hold(self, elements: int) -> None:
        """Note that a piece of S with ``elements`` elements exists now."""
        self.largest_intermediate = max(self.largest_intermediate, elements)

    def _column(self, column: str) -> int:
        return sum(counts.get(name, 0) for counts in (self.reads, self.writes) for name in COLUMNS[column])


class DeviceMemory:
    """The tensors of one head in device memory; every access is counted in a ledger.

    A tensor is a matrix (rows, features) or a vector (rows). What an algorithm keeps in local variables is on chip and free.
    """

    def __init__(self, ledger: Ledger, tensors: dict[str, Array]) -> None:
        self.ledger = ledger
        self._tensors = dict(tensors)
        ledger.heads += 1

    def initialise(self, name: str, shape: tuple[int, ...], value: float = 0.0) -> None:
        """Create a float64 tensor filled with ``value``."""
        self._tensors[name] = np.full(shape, value)
        _count(self.ledger.initialised, name, self._tensors[name].size)

    def allocate(self, name: str, shape: tuple[int, ...]) -> None:
        """Create a float64 tensor whose contents are undefined: NaN, so that reading before writing shows."""
        self._tensors[name] = np.full(shape, np.nan)

    def read(self, name: str, rows: slice = slice(None)) -> Array:
        """Read the given rows of a tensor."""
        values = self._tensors[name][rows]
        _count(self.ledger.reads, name, values.size)
        return values

    def write(self, name: str, values: Array, rows: slice = slice(None)) -> None:
        """Write ``values`` over the given rows of a tensor."""
        self._tensors[name][rows] = values
        _count(self.ledger.writes, name, values.size)

    def result(self, name: str) -> Array:
        """Look at a whole tensor after the algorithm has ended; not counted."""
        return self._tensors[name]


def standard_operand_traffic(n: int, d: int) -> int:
    """Q, K, V, O traffic of standard attention per head, in elements: each is moved once (arXiv 2205.14135, Algorithm 0)."""
    return 4 * n * d


def standard_intermediate_traffic(n: int) -> int:
    """S and P traffic of standard attention per head, in elements: each is written once and read once (Algorithm 0)."""
    return 4 * n * n


def flash1_operand_traffic(n: int, d: int, tile_columns: int) -> int:
    """Q, K, V, O traffic of FlashAttention-1 per head, in elements (arXiv 2205.14135, Algorithm 1, Theorem 2).

    K and V once, ``2 n d``, and for each of the ``n / tile_columns`` key tiles Q read, O read and O written, ``3 n d``.

    Raises:
        ArgumentError: ``tile_columns`` does not divide ``n``.
    """
    return 2 * n * d + 3 * n * d * _tile_count("tile_columns", n, tile_columns)


def flash2_operand_traffic(n: int, d: int, tile_rows: int) -> int:
    """Q, K, V, O traffic of FlashAttention-2 per head, in elements (arXiv 2307.08691, section 3.1, Algorithm 1).

    Q and O once, ``2 n d``, and for each of the ``n / tile_rows`` query tiles all of K and V, ``2 n d``.

    Raises:
        ArgumentError: ``tile_rows`` does not divide ``n``.
    """
    return 2 * n * d + 2 * n * d * _tile_count("tile_rows", n, tile_rows)


def _tile_count(argument: str, n: int, tile: int) -> int:
    if tile < 1 or n % tile:
        raise ArgumentError(argument, tile, f"the formula holds where the tile divides n={n}", "choose a divisor of n")
    return n // tile


def _count(counts: dict[str, int], name: str, elements: int) -> None:
    counts[name] = counts.get(name, 0) + elements
