"""The load warp."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from fa4.config import ELEMENT_BYTES, padded_head_dim
from fa4.kernels.blackwell.forward.context import Context, Slot, following
from fa4.kernels.blackwell.forward.storage import TILE_M


@dataclass(frozen=True)
class Source:
    """Tiles of one head in global memory, ``gX`` by tile, and where they go, ``sX`` by slot."""

    atom: cute.CopyAtom
    gX: cute.Tensor
    sX: cute.Tensor
    bytes: int

    @staticmethod
    def of(atom: cute.CopyAtom, mX: cute.Tensor, sX: cute.Tensor, rows: int, head_dim: int) -> Source:
        """``mX`` (sequence, head dim) in tiles of ``rows``; ``sX`` (rows, padded head dim, slots)."""
        columns = padded_head_dim(head_dim)
        tiles = cute.local_tile(mX, (rows, columns), (None, 0))
        to, source = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(tiles, 0, 2))
        return Source(atom, source, to, rows * columns * ELEMENT_BYTES)

    @cute.jit
    def start(self, tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        """Copy a tile to a slot; ``full`` is told what to expect, and its phase completes when it has come."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes)
        cute.copy(self.atom, self.gX[None, tile], self.sX[None, slot], tma_bar_ptr=full)


@cute.jit
def run(c: Context, Q: Source, K: Source, V: Source) -> None:
    """Fill shared memory.

    Warps: one.
    Owns: sQ, sK, sV.
    Waits: kv_empty, before a slot is used again.
    Signals: q_full, kv_full by the bytes that arrive (elements beyond a tensor arrive as 0).
    Order: Q0, K, Q1, V of the last key tile; then K, V of each one before it.
    """
    work = c.work
    slot = Slot(Int32(0), Int32(0))
    if work.count > 0:
        Q.start(work.first_row // TILE_M, Int32(0), c.barriers.q_full.at(0))
        slot = fill(c, K, work.tiles.end - 1, slot)
        for stage in cutlass.range_constexpr(1, c.config.q_tiles):
            Q.start(work.first_row // TILE_M + stage, Int32(stage), c.barriers.q_full.at(stage))
        slot = fill(c, V, work.tiles.end - 1, slot)
    for tile in cutlass.range(work.tiles.end - 2, work.tiles.begin - 1, -1, unroll=1):
        slot = fill(c, V, tile, fill(c, K, tile, slot))


@cute.jit
def fill(c: Context, X: Source, tile: Int32, slot: Slot) -> Slot:
    """Start a tile into a slot as soon as it is empty; returns the next slot."""
    c.barriers.kv_empty.wait(slot.index, slot.phase ^ 1)
    X.start(tile, slot.index, c.barriers.kv_full.at(slot.index))
    return following(slot, c.config.stages)
