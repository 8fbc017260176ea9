"""What the kernel hands to its roles: the key tile of this CTA, and the query tiles that it meets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fa4.config import TMEM_LANES, BackwardColumns, BlackwellBackwardConfig, backward_columns, serial_pair
from fa4.kernels.blackwell.backward.pipelines import Barriers
from fa4.kernels.blackwell.backward.storage import Shared
from fa4.kernels.common.barrier import sync_cluster
from fa4.kernels.common.host import Limits
from fa4.kernels.common.mask import Band, KeyTiles
from fa4.kernels.common.modifier import Modifiers
from fa4.kernels.common.score import ScoreScalars
from fa4.schedule.device import TileOrder, tile_at


@dataclass(frozen=True)
class Work:
    """A key tile of one (key head, batch), and the query tiles it meets, in each of the ``group`` query heads that share the key head.

    A key tile has the keys of all CTAs of the cluster, which meet the same query tiles; ``first_key`` is this CTA's. ``queries`` is the
    band seen from the keys: row j of it, a key, sees the queries that see key j.
    """

    key_tile: Int32
    first_key: Int32
    head: Int32
    batch: Int32
    group: Int32
    queries: Band
    tiles: KeyTiles

    @property
    def steps(self) -> Int32:
        """Query tiles of all heads."""
        return self.group * (self.tiles.end - self.tiles.begin)


class Tiles(NamedTuple):
    """All tiles of the launch: their order, query heads for each key head, and what tells which queries a key tile meets."""

    order: TileOrder
    group: Int32
    limits: Limits


@dataclass(frozen=True)
class Context:
    """Everything a role needs. ``rank`` is that of the CTA in its cluster."""

    config: BlackwellBackwardConfig
    head_dims: tuple[int, int]
    dtype: Any
    shared: Shared
    rank: Int32
    tiles: Tiles
    seqlens: tuple[Int32, Int32]
    scalars: ScoreScalars
    modifiers: Modifiers

    @property
    def barriers(self) -> Barriers:
        """The barriers."""
        return self.shared.barriers

    @property
    def columns(self) -> BackwardColumns:
        """The map of tensor memory."""
        return backward_columns(*self.head_dims, self.config.cta_pair)

    @property
    def serial_pair(self) -> bool:
        """Whether a pair has no room to overlap tiles."""
        return serial_pair(self.config, *self.head_dims)

    @property
    def falling(self) -> bool:
        """Whether key tiles are numbered from the last one, as ``fa4.schedule.order.Schedule.falling`` has it for the backward pass."""
        limits, order = self.tiles.limits, self.config.order
        if order not in ("lpt", "spt") or (limits.left is None and limits.right is None):
            return False
        return (limits.right is None) == (order == "lpt")

    @property
    def band(self) -> Band:
        """The keys that a query sees."""
        return Band(*self.seqlens, *self.tiles.limits)

    @property
    def tile_n(self) -> int:
        """Keys of a cluster."""
        return self.config.cluster * TMEM_LANES

    @cute.jit
    def begin(self) -> Work:
        """``work``, found while barriers are being initialised; when it returns they are."""
        work = self.work()
        sync_cluster(self.config.cluster)
        return work

    @cute.jit
    def work(self) -> Work:
        """The key tile of this CTA."""
        key_tile, head, batch = tile_at(cute.arch.block_idx()[0] // self.config.cluster, self.tiles.order, self.falling)
        first_key = key_tile * self.tile_n + self.rank * TMEM_LANES
        queries = transposed(self.band)
        found = queries.key_tiles(key_tile * self.tile_n, self.tile_n, TMEM_LANES)
        begin, end = found.begin, found.end
        if const_expr(self.tiles.limits.left is not None and self.tiles.limits.right is not None):
            if Int32(self.tiles.limits.right) <= self.tiles.limits.left:  # no query sees a key, though some tile may look as if
                end = begin
        tiles = unmasked(queries, begin, end, first_key, self.modifiers.present)
        return Work(key_tile, first_key, head, batch, self.tiles.group, queries, tiles)


@cute.jit
def unmasked(queries: Band, begin: Int32, end: Int32, first_key: Int32, modified: cutlass.Constexpr[bool]) -> KeyTiles:
    """The query tiles from ``begin`` to ``end``, and which of them need no mask for the keys from ``first_key`` on.

    Those whose queries all see all of the keys. Queries that do not exist need none, since their lse is +inf, but where scores are
    ``modified`` users' functions might be asked about them; where a key does not exist all tiles need one.
    """
    seqlen_k, seqlen_q = queries.seqlen_q, queries.seqlen_k
    first_end = queries.end_key(first_key)
    full_end = first_end // TMEM_LANES if const_expr(modified) else end if first_end >= seqlen_q else first_end // TMEM_LANES
    full_begin = cute.ceil_div(queries.first_key(min(first_key + TMEM_LANES, seqlen_k) - 1), TMEM_LANES)
    full_end = min(max(full_end, begin), end)
    full_begin = min(max(full_begin, begin), full_end)
    if first_key + TMEM_LANES > seqlen_k:
        full_begin = end
        full_end = end
    return KeyTiles(begin, full_begin, full_end, end)


@cute.jit
def transposed(band: Band) -> Band:
    """The band with queries and keys in each other's place: key j is seen by the queries from j - right_limit + 1 up to j - left_limit."""
    left, right = None, None
    if const_expr(band.right_limit is not None):
        left = Int32(1) - band.right_limit
    if const_expr(band.left_limit is not None):
        right = Int32(1) - band.left_limit
    return Band(band.seqlen_k, band.seqlen_q, left, right)
