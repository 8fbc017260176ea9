"""What lies where in shared memory; tensor memory is ``fa4.config.backward_columns``.

Tensor memory (512 columns of 128 lanes x 32 bits), a lane for each of the CTA's keys; dQ alone has a lane for each query. D 128::

    0        128       256                             384                             512
    | dV      | dK      | S: P . P .                    | dP: dS . dS .    dQ over it  |

S and dP are computed transposed, keys by queries, so that P^T and dS^T are operands where they lie: dV += P^T dO, dK += dS^T Q. Each of the
two compute warpgroups has 64 queries, 64 columns, of which P, in 16 bits, takes 32 and leaves the others unused: no warpgroup writes where
another one still reads. A CTA of a pair has half of dQ, folded: rows in lanes 0 to 63, the second half of their columns in the others::

    | dV      | dK      | S: P dQ  dQ P                 | dP: dS . . dS                |

Where there is no room for S, dP and dQ, (192, 128), the second half of dP lies in the columns of S, between the parts of P::

    0        128             320                            512
    | dV      | dK            | P  dP: dS .  P  | dP: dS .   |      dQ over all of it
    | dV      | dK            | P  dP: . .   P  | dP: dS dS  |      of a pair, dQ from S on
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, memory

from fa4.config import (
    ELEMENT_BYTES,
    ROW_SLOTS,
    TMEM_LANES,
    WARP,
    BlackwellBackwardConfig,
    backward_chunk,
    backward_columns,
    padded_head_dim,
    serial_pair,
)
from fa4.kernels.blackwell.backward.pipelines import WARPS, Barriers
from fa4.kernels.common.dq_layout import VECTOR
from fa4.kernels.common.tma import tiles


class Shapes(NamedTuple):
    """Rows and columns of a CTA's tiles of the operands; the last three of a pair alone."""

    K: tuple[int, int]
    V: tuple[int, int]
    Q: tuple[int, int]
    dO: tuple[int, int]
    Qt: tuple[int, int]
    dOt: tuple[int, int]
    Kt: tuple[int, int]


def tile_shapes(config: BlackwellBackwardConfig, head_dims: tuple[int, int]) -> Shapes:
    """Of a pair each CTA has half of the operands that both multiply by: rows of Q and dO for S and dP, columns for the gradients."""
    (d, dv), n, half = map(padded_head_dim, head_dims), TMEM_LANES, TMEM_LANES // config.cluster
    return Shapes((n, d), (n, dv), (half, d), (half, dv), (n, d // 2), (n, dv // 2), (2 * n, d // 2))


@dataclass(frozen=True)
class Shared:
    """Tiles of ``tile_shapes`` in shared memory, the last mode of each the slot.

    Without a pair ``sQt``, ``sdOt`` and ``sKt`` are ``sQ``, ``sdO`` and ``sK``. ``sdS`` holds parts of (TMEM_LANES keys, 64 queries): the
    queries of each compute warpgroup; in a pair the keys of each CTA, with this CTA's half of the queries, and a third part, to be sent to
    the other CTA. ``sStatistics``, float32 (2 * queries, slot), holds ``sLSE`` and behind it ``sDelta``, each (queries, slot); ``sdQ`` is
    float32 (columns, row, group of columns, warp, place), in the order of ``fa4.kernels.common.dq_layout``. dV leaves from where V was,
    dK, from ``sdK``, from where Q was, since dQ of the last tile may still be reading K; of a pair, which has K twice, from where K was.

    Where tiles of a pair are serial, ``sQt`` lies where ``sQ`` does, ``sdOt`` where ``sdO`` does, the third part of ``sdS`` where ``sdQ``
    does.
    """

    barriers: Barriers
    tmem_address: cute.Pointer
    sStatistics: cute.Tensor
    sLSE: cute.Tensor
    sDelta: cute.Tensor
    sdQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sQ: cute.Tensor
    sdO: cute.Tensor
    sdS: cute.Tensor
    sdK: cute.Tensor
    sQt: cute.Tensor
    sdOt: cute.Tensor
    sKt: cute.Tensor


def allocate(config: BlackwellBackwardConfig, head_dims: tuple[int, int], dtype: Any) -> Shared:
    """Lay the tiles out; sizes are those of ``fa4.config.backward_shared_memory``."""
    allocator = memory.SmemAllocator()
    barriers = Barriers.allocate(allocator, config, backward_columns(*head_dims, config.cta_pair))
    address = allocator.allocate_array(Int32, 1)
    statistics = allocator.allocate_tensor(Float32, cute.make_layout((2 * TMEM_LANES, ROW_SLOTS)), 16)
    rows = cute.make_layout((TMEM_LANES, ROW_SLOTS), stride=(1, 2 * TMEM_LANES))
    lse, delta = (cute.make_tensor(statistics.iterator + first, rows) for first in (0, TMEM_LANES))

    def place(shape: tuple[int, int], slots: int = 1) -> cute.Pointer:
        return allocator.allocate_array(dtype, shape[0] * shape[1] * slots, byte_alignment=1024)

    def tile(at: cute.Pointer, shape: tuple[int, int], slots: int = 1) -> cute.Tensor:
        return tiles(at, shape, (slots, shape[0] * shape[1]))

    shapes, pair, lent = tile_shapes(config, head_dims), config.cta_pair, serial_pair(config, *head_dims)
    k, v, q, do = place(shapes.K), place(shapes.V), place(shapes.Q, config.stages), place(shapes.dO)
    sK, sV, sQ, sdO = tile(k, shapes.K), tile(v, shapes.V), tile(q, shapes.Q, config.stages), tile(do, shapes.dO)
    staging = cute.make_layout((VECTOR, WARP, backward_chunk(config, *head_dims) // VECTOR, WARPS, 1 if lent else 2))
    parts, columns = (3 if pair else 2) * TMEM_LANES, TMEM_LANES // 2
    added = 4 * cute.size(staging) // (ELEMENT_BYTES * columns)  # rows of dS that have the size of sdQ
    ds = place((max(parts, 2 * TMEM_LANES + added) if lent else parts, columns))
    others = sQ, sdO, sK
    if pair:
        qt, dot = (q, do) if lent else (place(shapes.Qt), place(shapes.dOt))
        others = tile(qt, shapes.Qt), tile(dot, shapes.dOt), tile(place(shapes.Kt), shapes.Kt)
    if lent:
        sdQ = cute.make_tensor(cute.recast_ptr(ds + 2 * TMEM_LANES * columns, dtype=Float32), staging)
    else:
        sdQ = allocator.allocate_tensor(Float32, staging, 128)
    sdS = tile(ds, (parts, columns))
    return Shared(barriers, address, statistics, lse, delta, sdQ, sK, sV, sQ, sdO, sdS, sK if pair else tile(q, shapes.K), *others)
