"""What lies where in shared memory; tensor memory is ``fa4.config.backward_columns``.

Tensor memory (512 columns of 128 lanes x 32 bits), a lane for each of the CTA's keys; dQ alone has a lane for each query. D 128::

    0        128       256                             384                             512
    | dV      | dK      | S: P . P .                    | dP: dS . dS .    dQ over it  |

S and dP are computed transposed, keys by queries, so that P^T and dS^T are operands where they lie: dV += P^T dO, dK += dS^T Q. Each of the two
compute warpgroups has 64 queries, 64 columns, of which P, in 16 bits, takes the first 32 and leaves the others unused: no warpgroup writes
where another one still reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, memory

from fa4.config import TMEM_LANES, WARP, BlackwellBackwardConfig, backward_chunk, padded_head_dim
from fa4.kernels.blackwell.backward.pipelines import WARPS, Barriers
from fa4.kernels.blackwell.forward.storage import tiles


@dataclass(frozen=True)
class Shared:
    """Tiles in shared memory: ``sK`` (keys, D, 1), ``sV`` (keys, Dv, 1), ``sQ`` (queries, D, slot), ``sdO`` (queries, Dv, 1).

    ``sdS`` (keys, queries); ``sLSE`` and ``sDelta`` float32 (queries, slot); ``sdQ`` float32 (floats of a warp's chunk, warp, 2), in the order of
    ``fa4.kernels.common.dq_layout``. dK and dV leave from where K and V were.
    """

    barriers: Barriers
    tmem_address: cute.Pointer
    sLSE: cute.Tensor
    sDelta: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sQ: cute.Tensor
    sdO: cute.Tensor
    sdS: cute.Tensor
    sdQ: cute.Tensor


def allocate(config: BlackwellBackwardConfig, head_dims: tuple[int, int], dtype: Any) -> Shared:
    """Lay the tiles out; sizes are those of ``fa4.config.backward_shared_memory``."""
    allocator = memory.SmemAllocator()
    barriers = Barriers.allocate(allocator, config)
    address = allocator.allocate_array(Int32, 1)
    rows = TMEM_LANES
    lse, delta = (allocator.allocate_tensor(Float32, cute.make_layout((rows, config.stages)), 16) for _ in range(2))

    def tile(columns: int, slots: int) -> cute.Tensor:
        size = rows * padded_head_dim(columns)
        base = allocator.allocate_array(dtype, slots * size, byte_alignment=1024)
        return tiles(base, rows, columns, (slots, size))

    d, dv = head_dims
    sK, sV, sQ, sdO, sdS = tile(d, 1), tile(dv, 1), tile(d, config.stages), tile(dv, 1), tile(rows, 1)
    sdQ = allocator.allocate_tensor(Float32, cute.make_layout((WARP * backward_chunk(d), WARPS, 2)), 128)
    return Shared(barriers, address, lse, delta, sK, sV, sQ, sdO, sdS, sdQ)
