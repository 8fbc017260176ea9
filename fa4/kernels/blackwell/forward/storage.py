"""What lies where: shared memory, and tensor memory as columns.

Tensor memory (512 columns of 128 lanes x 32 bits), two query tiles per CTA::

    0        128       256          256 + Dv     256 + 2 Dv
    | S0 / P0 | S1 / P1 | O0         | O1         |

P takes the place of S: a row's scores are all in registers before its first P is written, and S of the next key tile is issued after the
product that reads P, to a pipe that works in order. 16-bit P packs two keys in a column, so it needs the first 64 of the 128 columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, memory

from fa4.config import TMEM_LANES, BlackwellForwardConfig, padded_head_dim
from fa4.kernels.blackwell.forward.pipelines import ANSWER, Barriers, entries
from fa4.kernels.common.launch_control import ANSWER_BYTES
from fa4.kernels.common.tma import Rows, tiles


@dataclass(frozen=True)
class Shared:
    """Tiles in shared memory: ``sQ`` and ``sO`` (tile_m, D, query tile), ``sK`` and ``sV`` (tile_n, D, slot) share the ring.

    In a pair the tiles of K have half of the rows, those of V half of the columns.
    ``factor`` and ``total`` hold a float32 for each row of each query tile, ``answers`` what was asked about further tiles.
    """

    barriers: Barriers
    tmem_address: cute.Pointer
    answers: cute.Pointer
    factor: cute.Tensor
    total: cute.Tensor
    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sO: cute.Tensor


class Shapes(NamedTuple):
    """Rows and columns of the tiles of a CTA."""

    Q: tuple[Rows, int]
    K: tuple[int, int]
    V: tuple[int, int]
    O: tuple[Rows, int]


def tile_shapes(config: BlackwellForwardConfig, head_dims: tuple[int, int]) -> Shapes:
    """Of a pair each CTA has half of the operands that both multiply with: the keys of K, the columns of V."""
    d, dv = map(padded_head_dim, head_dims)
    rows = (config.pack_heads, config.positions) if config.pack_heads > 1 else TMEM_LANES
    return Shapes((rows, d), (config.tile_n // config.cluster, d), (config.tile_n, dv // config.cluster), (rows, dv))


def slot_elements(config: BlackwellForwardConfig, head_dims: tuple[int, int]) -> int:
    """Elements from a slot of the ring to the next."""
    return config.tile_n // config.cluster * max(map(padded_head_dim, head_dims))


def query_tile_elements(config: BlackwellForwardConfig, head_dims: tuple[int, int]) -> tuple[int, int]:
    """Elements from a tile of Q, and from one of O, to the next; where O leaves through sQ, that of a query tile through its own Q."""
    d, dv = map(padded_head_dim, head_dims)
    if config.o_over_q:
        d = dv = max(d, dv)
    return TMEM_LANES * d, TMEM_LANES * dv


def allocate(config: BlackwellForwardConfig, head_dims: tuple[int, int], dtype: Any) -> Shared:
    """Lay the tiles out; sizes are those of ``fa4.config.blackwell_forward_shared_memory``."""
    shapes = tile_shapes(config, head_dims)
    size_Q, size_O = query_tile_elements(config, head_dims)
    allocator = memory.SmemAllocator()
    barriers = Barriers.allocate(allocator, config)
    address = allocator.allocate_array(Int32, 1)
    answers = address
    if entries(config, ANSWER):
        answers = allocator.allocate_array(Int32, entries(config, ANSWER) * ANSWER_BYTES // 4, byte_alignment=ANSWER_BYTES)
    factor = allocator.allocate_tensor(Float32, cute.make_layout((TMEM_LANES, config.q_tiles)), 16)
    total = allocator.allocate_tensor(Float32, cute.make_layout((TMEM_LANES, config.q_tiles)), 16)
    slot = slot_elements(config, head_dims)
    base_Q = allocator.allocate_array(dtype, config.q_tiles * size_Q, byte_alignment=1024)
    unused = slot - shapes.V[0] * shapes.V[1] if config.v_apart else 0  # the last slot, which only V comes to, ends with it
    base_K = allocator.allocate_array(dtype, config.stages * slot - unused, byte_alignment=1024)
    base_O = base_Q if config.o_over_q else allocator.allocate_array(dtype, config.q_tiles * size_O, byte_alignment=1024)
    return Shared(
        barriers,
        address,
        answers,
        factor,
        total,
        tiles(base_Q, shapes.Q, (config.q_tiles, size_Q)),
        tiles(base_K, shapes.K, (config.stages, slot)),
        tiles(base_K, shapes.V, (config.stages, slot)),
        tiles(base_O, shapes.O, (config.q_tiles, size_O)),
    )
