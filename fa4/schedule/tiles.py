"""The tiles of an attention, and what each costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fa4.errors import ArgumentError, UnsupportedError

OVERHEAD = 1
"""Steps that a tile takes beside its loop, for its first loads and its last stores: an assumption, of the right order."""

_ELEMENT_BYTES = 2
_MAX_TILES = 1 << 63


class Tile(NamedTuple):
    """One tile: a block of queries (of keys in the backward pass) of one query head of one sequence."""

    block: int
    head: int
    batch: int


@dataclass(frozen=True)
class TileProblem:
    """What is to be cut into tiles.

    Attributes:
        lengths: (Sq, Sk) of each sequence of a packed batch; a single pair is that of every sequence of a dense batch.
        batch: number of sequences.
        heads: query heads.
        heads_kv: key heads; divides ``heads``.
        head_dims: (D, Dv).
        tile: queries and keys of one step, (tile_m, tile_n).
        window: (left, right) as in ``fa4.problem.AttentionOptions``: None is an open side, causal is right = 0.
        backward: tiles are blocks of keys, each of which meets blocks of queries.

    Raises:
        ArgumentError: a number out of range, or lengths that are neither one nor ``batch`` pairs.
        UnsupportedError: 2^63 tiles or more.
    """

    lengths: tuple[tuple[int, int], ...]
    batch: int = 1
    heads: int = 1
    heads_kv: int = 1
    head_dims: tuple[int, int] = (128, 128)
    tile: tuple[int, int] = (128, 128)
    window: tuple[int | None, int | None] = (None, None)
    backward: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, low in (("batch", 0), ("heads", 1), ("heads_kv", 1)):
            if getattr(self, name) < low:
                raise ArgumentError(name, getattr(self, name), f"must be at least {low}", "pass a count")
        if self.heads % self.heads_kv:
            raise ArgumentError("heads", self.heads, f"must be a multiple of heads_kv={self.heads_kv}", "for example heads=8, heads_kv=2")
        if min(*self.tile, *self.head_dims) < 1:
            raise ArgumentError("tile", (self.tile, self.head_dims), "tiles and head dims must be at least 1", "for example 128")
        if len(self.lengths) not in (1, self.batch):
            rule = f"must be one pair (Sq, Sk), or one for each of {self.batch} sequences"
            raise ArgumentError("lengths", f"{len(self.lengths)} pairs", rule, "pass ((Sq, Sk),) for a dense batch")
        if any(min(pair) < 0 for pair in self.lengths):
            raise ArgumentError("lengths", min(self.lengths), "must not be negative", "pass 0 for an empty sequence")
        if self.tiles >= _MAX_TILES:
            raise UnsupportedError("batch", self.batch, f"{self.tiles} tiles do not fit 64 bits", "split the batch")

    @property
    def packed(self) -> bool:
        """Whether sequences have lengths of their own."""
        return len(self.lengths) > 1

    @property
    def group(self) -> int:
        """Query heads whose tiles read the same operand: keys and values; in the backward pass, the queries of one head."""
        return 1 if self.backward else self.heads // self.heads_kv

    def length(self, batch: int) -> tuple[int, int]:
        """(Sq, Sk) of a sequence."""
        return self.lengths[batch if self.packed else 0]

    def blocks(self, batch: int = 0) -> int:
        """Tiles of one head of a sequence."""
        return -(-self.length(batch)[self.backward] // self.tile[self.backward])

    @property
    def tiles(self) -> int:
        """All tiles."""
        blocks = sum(map(self.blocks, range(self.batch))) if self.packed else self.blocks() * self.batch
        return blocks * self.heads

    def operand_bytes(self, batch: int = 0) -> int:
        """Bytes that all tiles of a group read again and again: K and V of a key head; Q and dO in the backward pass."""
        return self.length(batch)[not self.backward] * sum(self.head_dims) * _ELEMENT_BYTES

    def steps(self, block: int, batch: int = 0) -> range:
        """The blocks of the other operand that a tile meets, by number; without a mask all of them."""
        own, other = self.tile[self.backward], self.tile[not self.backward]
        seqlen_q, seqlen_k = self.length(batch)
        size, bound = (seqlen_k, seqlen_q) if self.backward else (seqlen_q, seqlen_k)
        first, last = block * own, min(block * own + own, size) - 1
        offset = seqlen_k - seqlen_q
        left, right = self.window
        if self.backward:  # queries i with j - offset - right <= i <= j - offset + left
            offset, left, right = -offset, right, left
        if left is not None and right is not None and left + right < 0:  # a window without any key
            return range(0)
        begin = 0 if left is None else max(0, first + offset - left)
        end = bound if right is None else min(bound, last + offset + right + 1)
        return range(begin // other, -(-end // other)) if begin < end else range(0)

    def cost(self, block: int, batch: int = 0) -> int:
        """Steps of a tile, ``OVERHEAD`` included."""
        return len(self.steps(block, batch)) + OVERHEAD
