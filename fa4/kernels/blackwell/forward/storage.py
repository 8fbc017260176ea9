"""What lies where: shared memory, and tensor memory as columns.

Tensor memory (512 columns of 128 lanes x 32 bits), two query tiles per CTA::

    0        128       256          256 + Dv     256 + 2 Dv
    | S0 / P0 | S1 / P1 | O0         | O1         |

P takes the place of S: a row's scores are all in registers before its first P is written, and S of the next key tile is issued after the
product that reads P, to a pipe that works in order. 16-bit P packs two keys in a column, so it needs the first 64 of the 128 columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, memory
from cutlass.cute.nvgpu import tcgen05

from fa4.config import TMEM_LANES, BlackwellForwardConfig, padded_head_dim, swizzle_columns
from fa4.kernels.blackwell.forward.pipelines import Barriers

LANE = 1 << 16
"""Distance between lanes in a tensor-memory address; columns have distance 1."""


@dataclass(frozen=True)
class Shared:
    """Tiles in shared memory: ``sQ`` and ``sO`` (tile_m, D, query tile), ``sK`` and ``sV`` (tile_n, D, slot) share the ring.

    ``factor`` and ``total`` hold a float32 for each row of each query tile.
    """

    barriers: Barriers
    tmem_address: cute.Pointer
    factor: cute.Tensor
    total: cute.Tensor
    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sO: cute.Tensor


def tile_layout(rows: int, head_dim: int, dtype: Any) -> cute.ComposedLayout:
    """Layout (rows, padded head dim) as TMA writes it: blocks of 64, 32 or 16 columns one after the other, their rows swizzled."""
    columns = padded_head_dim(head_dim)
    kinds = {64: tcgen05.SmemLayoutAtomKind.K_SW128, 32: tcgen05.SmemLayoutAtomKind.K_SW64, 16: tcgen05.SmemLayoutAtomKind.K_SW32}
    atom = tcgen05.make_smem_layout_atom(kinds[swizzle_columns(columns)], dtype)
    return cute.tile_to_shape(atom, (rows, columns), (0, 1))


def tiles(base: cute.Pointer, rows: int, head_dim: int, slots: tuple[int, int]) -> cute.Tensor:
    """Tensor (rows, padded head dim, slots): ``slots`` says how many, and how many elements apart."""
    layout = tile_layout(rows, head_dim, base.dtype)
    count, distance = slots
    outer = cute.make_layout((*layout.outer.shape, count), stride=(*layout.outer.stride, distance))
    return cute.make_tensor(cute.recast_ptr(base, layout.inner, base.dtype), outer)


def allocate(config: BlackwellForwardConfig, head_dims: tuple[int, int], dtype: Any) -> Shared:
    """Lay the tiles out; sizes are those of ``fa4.config.blackwell_forward_shared_memory``."""
    head_dim, head_dim_v = head_dims
    d, dv = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    allocator = memory.SmemAllocator()
    barriers = Barriers.allocate(allocator, config)
    address = allocator.allocate_array(Int32, 1)
    rows = config.q_tiles * TMEM_LANES
    factor = allocator.allocate_tensor(Float32, cute.make_layout((TMEM_LANES, config.q_tiles)), 16)
    total = allocator.allocate_tensor(Float32, cute.make_layout((TMEM_LANES, config.q_tiles)), 16)
    slot = config.tile_n * max(d, dv)
    base_Q = allocator.allocate_array(dtype, rows * (max(d, dv) if config.o_over_q else d), byte_alignment=1024)
    base_K = allocator.allocate_array(dtype, config.stages * slot, byte_alignment=1024)
    base_O = base_Q if config.o_over_q else allocator.allocate_array(dtype, rows * dv, byte_alignment=1024)
    return Shared(
        barriers,
        address,
        factor,
        total,
        tiles(base_Q, TMEM_LANES, head_dim, (config.q_tiles, TMEM_LANES * d)),
        tiles(base_K, config.tile_n, head_dim, (config.stages, slot)),
        tiles(base_K, config.tile_n, head_dim_v, (config.stages, slot)),
        tiles(base_O, TMEM_LANES, head_dim_v, (config.q_tiles, TMEM_LANES * dv)),
    )
