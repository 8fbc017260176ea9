"""Bytes that the Blackwell forward moves, as formulas: FlashAttention-2's, and by name what is added to it and saved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fa4.config import ELEMENT_BYTES, TMEM_LANES, BlackwellForwardConfig, padded_head_dim
from fa4.testing.inputs import AttentionShape


@dataclass(frozen=True)
class ForwardTraffic:
    """Bytes of a call of the Blackwell forward, with ``window`` = (left, right), None where a side is open; causal is (None, 0).

    A *tile* is what the CTAs that multiply together compute in one step: Br = ``rows`` query rows of one head, or of one key head where
    heads are packed. Copies by TMA count whole boxes, with what lies beyond the tensor, as the virtual GPU counts them. Of all tiles
    together::

        loads + stores = flash2 + beyond_queries + beyond_keys - masked - without_keys

    Threads write the statistics, and zeros to rows of tiles without keys. Tensor maps are parameters of the kernel, not device memory.
    """

    shape: AttentionShape
    config: BlackwellForwardConfig
    window: tuple[int | None, int | None] = (None, None)

    @property
    def rows(self) -> int:
        """Query rows of a tile, Br of FlashAttention-2 (arXiv 2307.08691, section 3.1): of a CTA, or of a pair."""
        return self.config.cluster * self.config.q_tiles * TMEM_LANES

    @property
    def heads(self) -> int:
        """Heads of all batches that have tiles of their own, each of which reads K and V."""
        return self.shape.batch * (self.shape.heads_q if self.config.pack_heads == 1 else self.shape.heads_kv)

    @property
    def queries(self) -> int:
        """Query rows of a head; where heads are packed of its whole group."""
        return self.shape.batch * self.shape.heads_q * self.shape.seqlen_q // max(self.heads, 1)

    @cached_property
    def key_tiles(self) -> list[int]:
        """How many key tiles each tile of a head visits."""
        s, (left, right) = self.shape, self.window
        positions, offset = self.rows // self.config.pack_heads, s.seqlen_k - s.seqlen_q
        counts = []
        for first in range(0, s.seqlen_q, positions):
            last = min(first + positions, s.seqlen_q) - 1
            begin = 0 if left is None else min(max(first + offset - left, 0), s.seqlen_k)
            end = s.seqlen_k if right is None else min(max(last + offset + right + 1, 0), s.seqlen_k)
            n = self.config.tile_n
            counts.append(-(-end // n) - begin // n if end > begin else 0)
        return counts

    @property
    def flash2(self) -> int:
        """FlashAttention-2: Q and O once, and K and V for each tile."""
        s = self.shape
        return ELEMENT_BYTES * self.heads * (self.queries + len(self.key_tiles) * s.seqlen_k) * (s.head_dim + s.dim_v)

    @property
    def beyond_queries(self) -> int:
        """What boxes of Q and O have beyond the tensors: rows that fill the last tile, head dims up to 16, places of absent heads."""
        real = self.queries * (self.shape.head_dim + self.shape.dim_v)
        return ELEMENT_BYTES * self.heads * (len(self.key_tiles) * self.rows * self._columns - real)

    @property
    def beyond_keys(self) -> int:
        """The same of K and V, for each tile."""
        s, n = self.shape, self.config.tile_n
        box = -(-s.seqlen_k // n) * n * self._columns
        return ELEMENT_BYTES * self.heads * len(self.key_tiles) * (box - s.seqlen_k * (s.head_dim + s.dim_v))

    @property
    def masked(self) -> int:
        """Key tiles that no row of a tile sees: not read."""
        hidden = sum(-(-self.shape.seqlen_k // self.config.tile_n) - visited for visited in self.key_tiles)
        return ELEMENT_BYTES * self.heads * hidden * self.config.tile_n * self._columns

    @property
    def without_keys(self) -> int:
        """Q and O of tiles that visit no key: neither read nor stored by TMA."""
        return ELEMENT_BYTES * self.heads * self.key_tiles.count(0) * self.rows * self._columns

    @property
    def loads(self) -> int:
        """By TMA: Q of tiles with keys, K and V of the key tiles they visit."""
        q = sum(self.rows * padded_head_dim(self.shape.head_dim) for visited in self.key_tiles if visited)
        return ELEMENT_BYTES * self.heads * (q + sum(self.key_tiles) * self.config.tile_n * self._columns)

    @property
    def stores(self) -> int:
        """By TMA: O of tiles with keys."""
        with_keys = len(self.key_tiles) - self.key_tiles.count(0)
        return ELEMENT_BYTES * self.heads * with_keys * self.rows * padded_head_dim(self.shape.dim_v)

    @property
    def zeros(self) -> int:
        """By threads: O of rows of tiles without keys."""
        s, positions = self.shape, self.rows // self.config.pack_heads
        firsts = [i * positions for i, visited in enumerate(self.key_tiles) if not visited]
        return ELEMENT_BYTES * s.batch * s.heads_q * sum(min(positions, s.seqlen_q - first) for first in firsts) * s.dim_v

    @property
    def statistics(self) -> int:
        """By threads: lse in float32."""
        return 4 * self.shape.batch * self.shape.heads_q * self.shape.seqlen_q

    @property
    def _columns(self) -> int:
        """Columns of Q and O, or of K and V, together."""
        return padded_head_dim(self.shape.head_dim) + padded_head_dim(self.shape.dim_v)
