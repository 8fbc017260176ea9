"""The tiled algorithm's common half: which keys a row sees, how work is cut into tiles, and one tile of scores.

A tile belongs to a few (batch, key head) pairs; the ``group`` query heads that share a key head are rows of the same tile, so keys
and values are never repeated. Tiles are fresh, contiguous float32 tensors of shape (pairs, rows, columns): the arithmetic does not
see the caller's strides, dtype or alignment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fa4.problem import AttentionOptions

TILE_ROWS = 256
TILE_KEYS = 512
# A tile's float32 elements over all its (batch, key head) pairs: few enough for the caches, enough to pay for a torch call.
TILE_ELEMENTS = 1 << 20

Needed = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Saved:
    """What the backward reads; see ``fa4.cpu.backward.attention_backward``."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


@dataclass(frozen=True)
class Band:
    """The keys each row sees: row i sees key j where ``i + first <= j <= i + last`` and ``0 <= j < keys``."""

    rows: int
    keys: int
    first: int
    last: int

    @classmethod
    def of(cls, rows: int, keys: int, options: AttentionOptions) -> Band:
        """The band of a call; bounds beyond every row and key are clamped, so that any Python integer works."""
        limit = rows + keys + 1

        def clamp(bound: int | None) -> int:
            return limit if bound is None else max(-limit, min(bound, limit))

        offset = keys - rows
        return cls(rows, keys, offset - clamp(options.window_left), offset + clamp(options.window_right))

    @property
    def full(self) -> bool:
        """Whether every row sees every key."""
        return self.rows - 1 + self.first <= 0 and self.last >= self.keys - 1

    @property
    def square_causal(self) -> bool:
        """Whether row i sees exactly the keys 0..i of as many keys as rows."""
        return self.rows == self.keys and self.last == 0 and self.rows - 1 + self.first <= 0

    @property
    def live(self) -> range:
        """The rows that see at least one key."""
        if self.first > self.last:
            return range(0)
        start = min(max(0, -self.last), self.rows)
        return range(start, max(start, min(self.rows, self.keys - self.first)))

    def seeing(self, keys: range) -> range:
        """The rows that see some key of ``keys`` (not empty)."""
        start = max(self.live.start, keys[0] - self.last)
        return range(start, max(start, min(self.live.stop, keys[-1] - self.first + 1)))

    def visible(self, rows: range) -> range:
        """The keys that some row of ``rows`` (live, not empty) sees."""
        return range(max(0, rows[0] + self.first), min(self.keys, rows[-1] + self.last + 1))

    def hidden(self, rows: range, keys: range) -> Tensor | None:
        """Bool (rows, 1, keys), true where a row does not see a key; None where every row sees every key."""
        if rows[-1] + self.first <= keys[0] and keys[-1] <= rows[0] + self.last:
            return None
        distance = torch.arange(keys[0], keys[-1] + 1) - torch.arange(rows[0], rows[-1] + 1)[:, None]
        return ((distance < self.first) | (distance > self.last))[:, None]


@dataclass(frozen=True)
class Pairs:
    """The (batch, key head) pairs of one tile: a block of batches by a block of key heads, each with ``group`` query heads."""

    batches: slice
    heads: slice
    group: int

    @property
    def count(self) -> int:
        """How many pairs these are."""
        batches, heads = (len(range(s.start, s.stop)) for s in (self.batches, self.heads))
        return batches * heads

    def view(self, x: Tensor, positions: range | None = None) -> Tensor:
        """The block's part of a (B, S, H, D) tensor as (batches, key heads, S or positions, H / Hkv, D), a view.

        ``H`` may be the query heads or the key heads; ``positions`` None means all of them.
        """
        positions = range(x.shape[1]) if positions is None else positions
        heads = slice(self.heads.start * self.group, self.heads.stop * self.group)
        part = x[self.batches, positions.start : positions.stop, heads]
        batches, rows, _, dim = part.shape
        return part.view(batches, rows, -1, self.group, dim).permute(0, 2, 1, 3, 4)

    @property
    def keys(self) -> Pairs:
        """The same block for key-side tensors, which have one head where the query side has ``group``."""
        return replace(self, group=1)

    def load(self, x: Tensor, positions: range) -> Tensor:
        """Float32 copy (pairs, positions * group, D) of a part of (B, S, H, D)."""
        view = self.view(x, positions)
        return torch.empty(view.shape).copy_(view).view(-1, len(positions) * self.group, x.shape[3])

    def store(self, x: Tensor, positions: range, tile: Tensor) -> None:
        """Write a tile into its part of ``x``, rounding to the dtype of ``x``."""
        view = self.view(x, positions)
        view.copy_(tile.view(view.shape))

    def add(self, x: Tensor, positions: range, tile: Tensor) -> None:
        """Add a tile to its part of ``x``: a float32 sum, rounded to the dtype of ``x``."""
        view = self.view(x, positions)
        view.copy_(tile.view(view.shape).add_(view))


@dataclass(frozen=True)
class Plan:
    """How a call is cut: ``row_step`` query positions (times group) by ``key_step`` keys, for every pair of ``pairs``."""

    pairs: tuple[Pairs, ...]
    row_step: int
    key_step: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, deterministic: bool) -> Plan:
        """Tiles of at most ``TILE_ELEMENTS`` where a single position allows it.

        Deterministic: one pair at a time, so that the shape and the alignment of every product are the same alone and in any batch.
        """
        (batch, rows, _, dim), (keys, heads), group = q.shape, k.shape[1:3], q.shape[2] // k.shape[2]
        width = max(dim, v.shape[3], 1)
        row_step = max(1, min(TILE_ROWS, TILE_ELEMENTS // width) // group)
        key_step = max(1, min(TILE_KEYS, TILE_ELEMENTS // width))
        tile_rows, tile_keys = max(1, min(row_step, rows) * group), max(1, min(key_step, keys))
        elements = max(tile_rows * tile_keys, tile_rows * width, tile_keys * width)
        most = 1 if deterministic else max(1, TILE_ELEMENTS // elements)
        return cls(tuple(blocks(batch, heads, group, (max(1, most // heads), most))), row_step, key_step)


def blocks(batch: int, heads: int, group: int, step: tuple[int, int]) -> Iterator[Pairs]:
    """Cut batch by key heads into blocks of at most ``step``."""
    for b in split(range(batch), step[0]):
        for h in split(range(heads), step[1]):
            yield Pairs(slice(b.start, b.stop), slice(h.start, h.stop), group)


def split(whole: range, size: int) -> Iterator[range]:
    """Consecutive ranges of at most ``size``."""
    for start in range(whole.start, whole.stop, size):
        yield range(start, min(start + size, whole.stop))


def by_row(lse: Tensor) -> Tensor:
    """(B, H, S) as (B, S, H, 1), a view: rows as in q."""
    return lse.transpose(1, 2).unsqueeze(3)


def scores(q: Tensor, k: Tensor, options: AttentionOptions) -> Tensor:
    """Scaled and capped scores (pairs, rows, keys) of float32 tiles q (pairs, rows, D) and k (pairs, keys, D)."""
    s = torch.empty(q.shape[0], q.shape[1], k.shape[1])
    torch.baddbmm(s, q, k.transpose(1, 2), beta=0, alpha=options.softmax_scale, out=s)
    if options.softcap:
        s.div_(options.softcap).tanh_().mul_(options.softcap)
    return s


def hide(tile: Tensor, hidden: Tensor | None, value: float) -> None:
    """Fill the hidden entries of a (pairs, rows, keys) tile."""
    if hidden is not None:
        tile.view(tile.shape[0], hidden.shape[0], -1, tile.shape[2]).masked_fill_(hidden, value)
