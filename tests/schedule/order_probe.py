"""A kernel that writes where each tile number leads: ``out[i] = (block, head, batch)`` of number ``first + i``."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, const_expr

from fa4.schedule.device import TileOrder, section_size, tile_at, tile_order

THREADS = 64


@cute.kernel
def locate_kernel(out: cute.Tensor, first: Int64, order: TileOrder, falling: Constexpr, wide: Constexpr):
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    index = first + i if const_expr(wide) else Int32(first) + i
    if i < out.shape[0] and index < order.tiles:
        block, head, batch = tile_at(index, order, falling)
        out[i, 0], out[i, 1], out[i, 2] = Int64(block), Int64(head), Int64(batch)


class Locate:
    """What is compiled in: an order, see ``tile_order`` and ``tile_at``, and the bytes that operands may fill."""

    def __init__(self, order: str, falling: bool, wide: bool, l2_budget: int) -> None:
        self.order, self.falling, self.wide, self.l2_budget = order, falling, wide, l2_budget

    @cute.jit
    def __call__(
        self, out: cute.Tensor, first: Int64, blocks: Int64, heads: Int64, batch: Int64, operand_bytes: Int64, group: Int64
    ) -> None:
        section = section_size(operand_bytes, heads // group * batch, group, self.l2_budget)
        made = tile_order(blocks, heads, batch, section, self.order, self.wide)
        grid = [cute.ceil_div(out.shape[0], THREADS), 1, 1]
        locate_kernel(out, first, made, self.falling, self.wide).launch(grid=grid, block=[THREADS, 1, 1])


@cute.kernel
def persistent_kernel(out: cute.Tensor, order: TileOrder, falling: Constexpr):
    """One block per SM; out[number] = (block, head, batch, visits)."""
    index = cute.arch.block_idx()[0]
    step = cute.arch.grid_dim()[0]
    while index < order.tiles:
        block, head, batch = tile_at(index, order, falling)
        if cute.arch.thread_idx()[0] == 0:
            out[index, 0], out[index, 1], out[index, 2] = Int64(block), Int64(head), Int64(batch)
            out[index, 3] = out[index, 3] + 1
        index += step


@cute.jit
def persist(out: cute.Tensor, blocks: Int64, heads: Int64, batch: Int64, section: Int64, sms: Int32, falling: Constexpr):
    made = tile_order(blocks, heads, batch, section, "persistent", False)
    persistent_kernel(out, made, falling).launch(grid=[cutlass.min(sms, made.tiles), 1, 1], block=[32, 1, 1])
