"""The tiled algorithm's common half: which keys a row sees, how work is cut into tiles, and one tile of scores.

A tile belongs to a few (batch, key head) pairs; the ``group`` query heads that share a key head are rows of the same tile, so keys
and values are never repeated. Tiles are fresh, contiguous float32 tensors of shape (pairs, rows, columns): the arithmetic does not
see the caller's strides, dtype or alignment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fa4.problem import AttentionOptions

TILE_ROWS = 256
TILE_KEYS = 512
# A tile's float32 elements over all its (batch, key head) pairs: few enough for the caches, enough to pay for a torch call.
TILE_ELEMENTS = 1 << 19


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

    def _view(self, x: Tensor, positions: range, group: int) -> Tensor:
        """The tile's part of (B, S, H, D) as (batches, key heads, positions, group, D)."""
        heads = slice(self.heads.start * group, self.heads.stop * group)
        part = x[self.batches, positions.start : positions.stop, heads]
        return part.unflatten(2, (-1, group)).permute(0, 2, 1, 3, 4)

    def load(self, x: Tensor, positions: range) -> Tensor:
        """Float32 copy (pairs, positions * group, D) from a query-side (B, S, Hq, D) tensor."""
        view = self._view(x, positions, self.group)
        return torch.empty(view.shape).copy_(view).view(-1, len(positions) * self.group, x.shape[3])

    def load_keys(self, x: Tensor, positions: range) -> Tensor:
        """Float32 copy (pairs, positions, D) from a key-side (B, S, Hkv, D) tensor."""
        view = self._view(x, positions, 1)
        return torch.empty(view.shape).copy_(view).view(-1, len(positions), x.shape[3])

    def store(self, x: Tensor, positions: range, tile: Tensor) -> None:
        """Write a query-side tile into ``x``, rounding to its dtype."""
        view = self._view(x, positions, self.group)
        view.copy_(tile.view(view.shape))

    def add(self, x: Tensor, positions: range, tile: Tensor) -> None:
        """Add a query-side tile to ``x``; the sum is float32, then rounded."""
        view = self._view(x, positions, self.group)
        view.copy_(view + tile.view(view.shape))

    def store_keys(self, x: Tensor, positions: range, tile: Tensor) -> None:
        """Write a key-side tile into ``x``, rounding to its dtype."""
        view = self._view(x, positions, 1)
        view.copy_(tile.view(view.shape))


def pairs_of(q: Tensor, k: Tensor, elements: int, deterministic: bool) -> Iterator[Pairs]:
    """Cut (batch, key head) into tiles' pairs, ``elements`` being the float32 elements that one pair needs.

    Deterministic: one pair at a time, so that the shape and the alignment of every product are the same alone and in any batch.
    """
    batch, heads, group = q.shape[0], k.shape[2], q.shape[2] // k.shape[2]
    most = 1 if deterministic else max(1, TILE_ELEMENTS // elements)
    head_step = min(heads, most)
    batch_step = max(1, most // heads)
    for b in range(0, batch, batch_step):
        for h in range(0, heads, head_step):
            yield Pairs(slice(b, min(b + batch_step, batch)), slice(h, min(h + head_step, heads)), group)


def split(whole: range, size: int) -> Iterator[range]:
    """Consecutive ranges of at most ``size``."""
    for start in range(whole.start, whole.stop, size):
        yield range(start, min(start + size, whole.stop))


def scores(q: Tensor, k: Tensor, hidden: Tensor | None, options: AttentionOptions) -> Tensor:
    """Scaled, capped and masked scores (pairs, rows, keys) of float32 tiles q (pairs, rows, D) and k (pairs, keys, D)."""
    s = torch.empty(q.shape[0], q.shape[1], k.shape[1])
    torch.baddbmm(s, q, k.transpose(1, 2), beta=0, alpha=options.softmax_scale, out=s)
    if options.softcap:
        s.div_(options.softcap).tanh_().mul_(options.softcap)
    if hidden is not None:
        s.view(s.shape[0], hidden.shape[0], -1, s.shape[2]).masked_fill_(hidden, float("-inf"))
    return s
