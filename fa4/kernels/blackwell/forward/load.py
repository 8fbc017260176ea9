"""The load warp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from fa4.config import ELEMENT_BYTES, TMEM_LANES
from fa4.kernels.blackwell.forward.context import Context, Slot, Work, each_tile, following


@dataclass(frozen=True)
class Source:
    """A tensor in global memory, (sequence, head dim, head, batch), and the tiles of shared memory that it fills."""

    atom: cute.CopyAtom
    tensor: cute.Tensor
    tiles: cute.Tensor

    @cute.jit
    def start(self, tile: Int32, at: tuple[Int32, Int32], slot: Int32, full: cute.Pointer) -> None:
        """Copy a tile of ``at`` = (head, batch) to a slot; ``full`` is told what to expect, and its phase completes when it has come."""
        rows, columns = cute.size(self.tiles, mode=[0]), cute.size(self.tiles, mode=[1])
        gX = cute.local_tile(self.tensor[None, None, at[0], at[1]], (rows, columns), (None, 0))
        to, source = cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(self.tiles, 0, 2), cute.group_modes(gX, 0, 2)
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, rows * columns * ELEMENT_BYTES)
        cute.copy(self.atom, source[None, tile], to[None, slot], tma_bar_ptr=full)


class State(NamedTuple):
    """The next slot, and query tiles with keys so far."""

    slot: Slot
    used: Int32


def run(c: Context, Q: Source, K: Source, V: Source) -> None:
    """Fill shared memory.

    Warps: one.
    Owns: sQ, sK, sV.
    Waits: q_empty, kv_empty, before shared memory is used again.
    Signals: q_full, kv_full by the bytes that arrive (elements beyond a tensor arrive as 0).
    Order: Q0, K, Q1, V of the last key tile; then K, V of each one before it.
    """
    each_tile(c, visit, State(Slot(Int32(0), Int32(1)), Int32(0)), Q, K, V)  # the phase before the first: slots begin empty
    cute.arch.sync_warp()


@cute.jit
def visit(c: Context, work: Work, state: State, Q: Source, K: Source, V: Source) -> State:
    """The query tiles and key tiles of one step of the launch."""
    slot, tile = state.slot, work.first_row // TMEM_LANES
    at_Q, at = (work.head, work.batch), (work.head // c.tiles.group, work.batch)
    if work.count > 0:
        for stage in cutlass.range_constexpr(c.config.q_tiles):
            c.barriers.q_empty.wait(stage, state.used & 1 ^ 1)
            Q.start(tile + stage, at_Q, Int32(stage), c.barriers.q_full.at(stage))
            if const_expr(stage == 0):
                fill(c, K, work.tiles.end - 1, at, slot)
                slot = following(slot, c.config.stages, after_K=True)
        fill(c, V, work.tiles.end - 1, at, slot)
        slot = following(slot, c.config.stages)
    key_tile = work.tiles.end
    for _ in cutlass.range(work.count - 1, unroll=1):
        key_tile = key_tile - 1
        fill(c, K, key_tile - 1, at, slot)
        slot = following(slot, c.config.stages, after_K=True)
        fill(c, V, key_tile - 1, at, slot)
        slot = following(slot, c.config.stages)
    return State(slot, state.used + Int32(work.count > 0))


@cute.jit
def fill(c: Context, X: Source, tile: Int32, at: tuple[Int32, Int32], slot: Slot) -> None:
    """Start a tile into a slot as soon as it is empty."""
    c.barriers.kv_empty.wait(slot.index, slot.phase)
    X.start(tile, at, slot.index, c.barriers.kv_full.at(slot.index))
