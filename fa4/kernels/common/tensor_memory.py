"""Tensor memory of a CTA or of a pair: allocation, and columns to and from registers (PTX ISA, tcgen05.alloc, tcgen05.ld, tcgen05.st)."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from fa4.config import TMEM_COLUMNS, TMEM_LANES
from fa4.kernels.common.barrier import sync_cluster

LANE = 1 << 16
"""Distance between lanes in a tensor-memory address; columns have distance 1."""


@cute.jit
def allocate_columns(shared: Any, config: cutlass.Constexpr[Any]) -> None:
    """All columns, from address 0 on, by the MMA warp, before its first product.

    Other warps use them after a product that it told them of. Of a pair both CTAs must have them before the leader's first product.
    """
    cute.arch.alloc_tmem(TMEM_COLUMNS, shared.tmem_address, is_two_cta=config.cta_pair)


@cute.jit
def first_column(shared: Any) -> Int32:
    """Its address, 0, as it was allocated: for products, whose addresses the compiler takes from registers.

    A sum with what it cannot know is worked out once; a number it knows is moved to its register again before each product.
    """
    return Int32(cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tmem_address).toint())


@cute.jit
def tear_down(config: cutlass.Constexpr[Any], by: Boolean) -> None:
    """What ``allocate_columns`` did is undone, by warp ``by``. No CTA of a pair leaves while the other may signal it."""
    sync_cluster(config.cluster)
    if by:
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=config.cta_pair)
        start = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
        cute.arch.dealloc_tmem(start, TMEM_COLUMNS, is_two_cta=config.cta_pair)


def columns(address: Int32, count: int) -> cute.Tensor:
    """Tensor memory from ``address`` on as (lanes, columns)."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.tmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout((TMEM_LANES, count), stride=(LANE, 1)))


def at_once(count: int) -> int:
    """Columns of one tcgen05.ld or st of ``count``: the most that divides them; more than 64 leave no registers."""
    return min(count & -count, 64)


@cute.jit
def load_columns(address: Int32, values: cute.Tensor, thread: Int32) -> None:
    """This thread's lane of ``values``' size columns to registers; complete on return."""
    count = cute.size(values)
    source = columns(address, count)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(at_once(count))), Float32)
    copy = tcgen05.make_tmem_copy(atom, source).get_slice(thread)
    shape = copy.partition_D(cute.make_identity_tensor(source.shape)).shape
    cute.copy(atom, copy.partition_S(source), cute.make_tensor(values.iterator, shape))
    cute.arch.fence_view_async_tmem_load()


@cute.jit
def store_columns(address: Int32, values: cute.Tensor, thread: Int32) -> None:
    """The registers ``values`` to this thread's lane; ``fence_view_async_tmem_store`` completes it."""
    count = cute.size(values)
    to = columns(address, count)
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(at_once(count))), Float32)
    copy = tcgen05.make_tmem_copy(atom, to).get_slice(thread)
    shape = copy.partition_S(cute.make_identity_tensor(to.shape)).shape
    cute.copy(atom, cute.make_tensor(values.iterator, shape), copy.partition_D(to))
