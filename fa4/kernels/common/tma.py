"""Tiles in shared memory as TMA writes them, and its copies (PTX ISA, cp.async.bulk.tensor)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass._mlir.dialects import cute as cute_ir
from cutlass._mlir.dialects import cute_nvgpu as cute_nvgpu_ir
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cutlass_dsl import dsl_user_op

from fa4.config import ELEMENT_BYTES, swizzle_columns
from fa4.kernels.common.barrier import LEADER

MAP_ALIGN = 64
"""Bytes that a tensor map is aligned to (CUDA driver API, ``CUtensorMap``)."""

Rows = int | tuple[int, int]
"""Rows of a tile, or where heads are packed (heads, positions)."""


def tile_layout(rows: Rows, columns: int, dtype: Any) -> cute.ComposedLayout:
    """Layout (rows, columns) as TMA writes it: blocks of 64, 32 or 16 columns one after the other, their rows swizzled."""
    if isinstance(rows, tuple):
        heads, positions = rows
        flat, width = tile_layout(heads * positions, columns, dtype), swizzle_columns(columns)
        shape, stride = (rows, (width, columns // width)), ((width, heads * width), (1, heads * positions * width))
        return cute.make_composed_layout(flat.inner, 0, cute.make_layout(shape, stride=stride))
    kinds = {64: tcgen05.SmemLayoutAtomKind.K_SW128, 32: tcgen05.SmemLayoutAtomKind.K_SW64, 16: tcgen05.SmemLayoutAtomKind.K_SW32}
    atom = tcgen05.make_smem_layout_atom(kinds[swizzle_columns(columns)], dtype)
    return cute.tile_to_shape(atom, (rows, columns), (0, 1))


def tiles(base: cute.Pointer, shape: tuple[Rows, int], slots: tuple[int, int]) -> cute.Tensor:
    """Tensor (rows, columns, slots) of tiles of ``shape``: ``slots`` says how many, and how many elements apart."""
    layout = tile_layout(*shape, base.dtype)
    count, distance = slots
    outer = cute.make_layout((*layout.outer.shape, count), stride=(*layout.outer.stride, distance))
    return cute.make_tensor(cute.recast_ptr(base, layout.inner, base.dtype), outer)


class Tma(NamedTuple):
    """A copy between tiles in shared memory and a tensor in global memory, see ``by_head`` and ``by_group``."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


@cute.jit
def by_head(x: cute.Tensor, width: cutlass.Constexpr[int]) -> cute.Tensor:
    """(sequence, head dim, head, batch) of (batch, sequence, head, head dim).

    Where blocks of ``width`` columns, as a tile has them, divide the head dim, it is (width, blocks): a copy's box then has all blocks of
    a tile, and takes one instruction instead of one for each block.
    """
    batch, sequence, heads, columns = x.shape
    per_batch, per_row, per_head, _ = x.stride
    shape, stride = (columns, 1) if const_expr(columns % width or columns == width) else ((width, columns // width), (1, width))
    layout = cute.make_layout((sequence, shape, heads, batch), stride=(per_row, stride, per_head, per_batch))
    return cute.make_tensor(x.iterator, layout)


@cute.jit
def by_group(x: cute.Tensor, group: Int32) -> cute.Tensor:
    """((head of the group, sequence), head dim, key head, batch) of (batch, sequence, head, head dim)."""
    batch, sequence, heads, columns = x.shape
    per_batch, per_row, per_head, _ = x.stride
    stride = ((per_head, per_row), 1, cute.assume(per_head * group, divby=8), per_batch)
    return cute.make_tensor(x.iterator, cute.make_layout(((group, sequence), columns, heads // group, batch), stride=stride))


@dsl_user_op
def kept_map(atom: cute.CopyAtom, *, loc: Any = None, ip: Any = None) -> cute.Pointer:
    """Generic address of a load's tensor map, worked out here and kept; for a whole warp.

    The compiler adds it up again at every copy, in three instructions: it cannot with what comes out of a shuffle.
    """
    generic = cute_ir.PtrType.get(cute_nvgpu_ir.TmaDescriptorTiledType.get(), cute.AddressSpace.generic, MAP_ALIGN)
    load = cute_nvgpu_ir.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip)
    address = cute_nvgpu_ir.get_tma_desc_addr(generic, load, loc=loc, ip=ip)
    word = Int64(address.toint(loc=loc, ip=ip))
    low, high = (cute.arch.make_warp_uniform(Int32(half)) for half in (word, word >> 32))
    kept = Int64(high) << 32 | Int64(low) & 0xFFFFFFFF
    aligned = cute_ir.assume(cute_ir.ConstrainedIntType.get(MAP_ALIGN, 64), kept.ir_value(loc=loc, ip=ip), loc=loc, ip=ip)
    return cute_ir.inttoptr(generic, aligned, loc=loc, ip=ip)


@dataclass(frozen=True)
class Source:
    """A tensor in global memory, (sequence, head dim, head, batch), and the tiles of ``shape`` in shared memory that it fills.

    ``map`` is the address of its tensor map where the copies of a loop share one, see ``kept_map``.
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor
    tiles: cute.Tensor
    shape: tuple[Rows, int]
    map: cute.Pointer | None = None

    @cute.jit
    def start(self, c: Any, tile: tuple[Any, Int32], at: tuple[Int32, Int32], slot: Int32, full: cute.Pointer) -> None:
        """Copy a tile (by rows, by columns) of ``at`` = (head, batch) to a slot.

        ``full`` is told what to expect, and its phase completes when it has come. That of a pair is the leader's, which expects what both
        CTAs copy; the address that the copy of the other CTA is given means the leader's, too (PTX ISA, ``cp.async.bulk.tensor``).
        """
        gX = cute.local_tile(self.tensor[None, None, at[0], at[1]], self.shape, (None, None))
        to, source = cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(self.tiles, 0, 2), cute.group_modes(gX, 0, 2)
        )
        if c.rank == LEADER:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, c.config.cluster * cute.size(self.shape) * ELEMENT_BYTES)
        cute.copy(self.atom, source[None, tile[0], tile[1]], to[None, slot], tma_bar_ptr=full, tma_desc_ptr=self.map)
