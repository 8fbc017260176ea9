"""Minimal GEMM kernels of one tile, D = A B^T, for Hopper and Blackwell: what CuTe-DSL makes of wgmma and tcgen05.

Operands come from global memory by plain loads and stores. A is (M, K) and B is (N, K), both with K or M and N contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import cutlass.pipeline as pl
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05, warpgroup
from cutlass.cute.runtime import make_ptr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers, hopper_helpers

THREADS = 128
DTYPES = {"bfloat16": BFloat16, "float16": cutlass.Float16, "float32": Float32, "float8_e4m3fn": cutlass.Float8E4M3FN}


@dataclass(frozen=True)
class Tile:
    """One GEMM: ``a_transposed`` and ``b_transposed`` mean that M or N is contiguous; ``a_source`` is "shared", "registers" or "tensor"."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    a_source: str = "shared"
    a_transposed: bool = False
    b_transposed: bool = False
    ctas: int = 1
    load: str = "32x32b"


LOADS = {
    "32x32b": (tcgen05.Ld32x32bOp, 32),
    "16x64b": (tcgen05.Ld16x64bOp, 32),
    "16x128b": (tcgen05.Ld16x128bOp, 8),
    "16x256b": (tcgen05.Ld16x256bOp, 4),
}


@cute.jit
def fill(shared: cute.Tensor, source: cute.Tensor):
    """Elements of one tensor to another of the same shape, thread after thread."""
    thread, _, _ = cute.arch.thread_idx()
    for i in cutlass.range(thread, cute.size(shared), THREADS, unroll=1):
        shared[i] = source[i]


def matrix(pointer, rows, columns, transposed):
    """Global memory as a matrix (rows, columns)."""
    return cute.make_tensor(pointer, cute.make_layout((rows, columns), stride=(1, rows) if transposed else (columns, 1)))


def leading(transposed):
    """The contiguous dimension, as the helpers for shared memory call it."""
    return LayoutEnum.COL_MAJOR if transposed else LayoutEnum.ROW_MAJOR


def major(transposed):
    """The contiguous dimension, as an MMA operation calls it."""
    return OperandMajorMode.MN if transposed else OperandMajorMode.K


class HopperGemm:
    """One warpgroup, wgmma."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile

    @cute.jit
    def __call__(self, a: cute.Pointer, b: cute.Pointer, d: cute.Pointer):
        self.kernel(a, b, d).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])

    @cute.kernel
    def kernel(self, a: cute.Pointer, b: cute.Pointer, d: cute.Pointer):
        t = self.tile
        dtype = DTYPES[t.dtype]
        thread, _, _ = cute.arch.thread_idx()
        in_registers = cutlass.const_expr(t.a_source == "registers")
        mma = hopper_helpers.make_trivial_tiled_mma(
            dtype,
            dtype,
            major(t.a_transposed),
            major(t.b_transposed),
            Float32,
            (t.m // 64, 1, 1),
            (64, t.n),
            warpgroup.OperandSource.RMEM if in_registers else warpgroup.OperandSource.SMEM,
        )
        shape = (t.m, t.n, t.k)
        layout_a = hopper_helpers.make_smem_layout_a(leading(t.a_transposed), shape, dtype, 1)
        layout_b = hopper_helpers.make_smem_layout_b(leading(t.b_transposed), shape, dtype, 1)
        allocator = memory.SmemAllocator()
        sA = allocator.allocate_tensor(dtype, layout_a.outer, 1024, swizzle=layout_a.inner)
        sB = allocator.allocate_tensor(dtype, layout_b.outer, 1024, swizzle=layout_b.inner)
        fill(sA[None, None, 0], matrix(a, t.m, t.k, t.a_transposed))
        fill(sB[None, None, 0], matrix(b, t.n, t.k, t.b_transposed))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()

        slice_ = mma.get_slice(thread)
        gD = matrix(d, t.m, t.n, False)
        acc = mma.make_fragment_C(mma.partition_shape_C((t.m, t.n)))
        fragments_b = mma.make_fragment_B(slice_.partition_B(sB))
        if cutlass.const_expr(in_registers):
            tCsA = slice_.partition_A(sA[None, None, 0])
            rA = mma.make_fragment_A(tCsA.shape)
            cute.autovec_copy(tCsA, rA)
        else:
            rA = mma.make_fragment_A(slice_.partition_A(sA))[None, None, None, 0]
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for k in cutlass.range_constexpr(cute.size(rA, mode=[2])):
            cute.gemm(mma, acc, rA[None, None, k], fragments_b[None, None, k, 0], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.autovec_copy(acc, slice_.partition_C(gD))


class BlackwellGemm:
    """One CTA, or a pair that shares the tile; one warp issues tcgen05.mma, and all read D from tensor memory."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile

    @cute.jit
    def __call__(self, a: cute.Pointer, b: cute.Pointer, d: cute.Pointer):
        n = self.tile.ctas
        self.kernel(a, b, d).launch(grid=[n, 1, 1], block=[THREADS, 1, 1], cluster=[n, 1, 1])

    @cute.kernel
    def kernel(self, a: cute.Pointer, b: cute.Pointer, d: cute.Pointer):
        t = self.tile
        dtype = DTYPES[t.dtype]
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank, _, _ = cute.arch.block_idx()
        from_tensor = cutlass.const_expr(t.a_source == "tensor")
        mma = blackwell_helpers.make_trivial_tiled_mma(
            dtype,
            dtype,
            major(t.a_transposed),
            major(t.b_transposed),
            Float32,
            tcgen05.CtaGroup.TWO if t.ctas == 2 else tcgen05.CtaGroup.ONE,
            (t.m, t.n),
            tcgen05.OperandSource.TMEM if from_tensor else tcgen05.OperandSource.SMEM,
        )
        shape = (t.m, t.n, t.k)
        layout_a = blackwell_helpers.make_smem_layout_a(mma, shape, dtype, 1)
        layout_b = blackwell_helpers.make_smem_layout_b(mma, shape, dtype, 1)
        allocator = memory.SmemAllocator()
        barrier = allocator.allocate_array(Int64, 2)
        address = allocator.allocate_array(Int32, 1)
        sA = allocator.allocate_tensor(dtype, layout_a.outer, 1024, swizzle=layout_a.inner)
        sB = allocator.allocate_tensor(dtype, layout_b.outer, 1024, swizzle=layout_b.inner)
        slice_ = mma.get_slice(rank)
        fill(sA[None, None, None, 0], slice_.partition_A(matrix(a, t.m, t.k, t.a_transposed)))
        fill(sB[None, None, None, 0], slice_.partition_B(matrix(b, t.n, t.k, t.b_transposed)))
        cute.arch.fence_proxy("async.shared", space="cta")
        tensor = memory.TmemAllocator(
            address,
            barrier_for_retrieve=pl.NamedBarrier(barrier_id=1, num_threads=THREADS),
            allocator_warp_id=0,
            is_two_cta=t.ctas == 2,
            two_cta_tmem_dealloc_mbar_ptr=barrier + 1,
        )
        tensor.allocate(256)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        tensor.wait_for_alloc()
        start = tensor.retrieve_ptr(Float32)
        tC = cute.make_tensor(start, mma.make_fragment_C(mma.partition_shape_C((t.m, t.n))).layout)
        if cutlass.const_expr(from_tensor):
            row = matrix(a, t.m, t.k, False)[thread + THREADS * rank, None]
            shape_a = mma.partition_shape_A((t.m, t.k))
            rA = self.to_tensor_memory(mma.make_fragment_A(shape_a).layout, row, cute.recast_ptr(start + 128, dtype=dtype), thread)
        else:
            rA = mma.make_fragment_A(sA)[None, None, None, 0]
        rB = mma.make_fragment_B(sB)
        cute.arch.sync_threads()
        if cutlass.const_expr(t.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        if warp == 0 and rank == 0:
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for k in cutlass.range_constexpr(cute.size(rB, mode=[2])):
                cute.gemm(mma, tC, rA[None, None, k], rB[None, None, k, 0], tC)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                if cutlass.const_expr(t.ctas == 2):
                    tcgen05.commit(barrier, 3, tcgen05.CtaGroup.TWO)
                else:
                    tcgen05.commit(barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        self.store(tC, slice_.partition_C(matrix(d, t.m, t.n, False)), thread)
        cute.arch.sync_threads()
        tensor.relinquish_alloc_permit()
        tensor.free(start)

    @cute.jit
    def to_tensor_memory(self, layout: cute.Layout, source: cute.Tensor, start: cute.Pointer, thread: Int32):
        """A to tensor memory, each lane its row, two elements a column; the operand of the MMA there."""
        words = cute.make_tensor(cute.recast_ptr(start, dtype=Float32), cute.make_layout((THREADS, self.tile.k // 2), stride=(65536, 1)))
        atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(self.tile.k // 2)), Float32)
        copy = tcgen05.make_tmem_copy(atom, words).get_slice(thread)
        row = cute.make_rmem_tensor((self.tile.k,), BFloat16)
        cute.autovec_copy(source, row)
        shape = copy.partition_S(cute.make_identity_tensor(words.shape)).shape
        cute.copy(atom, cute.make_tensor(cute.recast_ptr(row.iterator, dtype=Float32), shape), copy.partition_D(words))
        cute.arch.fence_view_async_tmem_store()
        return cute.make_tensor(start, layout)

    @cute.jit
    def store(self, accumulator: cute.Tensor, target: cute.Tensor, thread: Int32):
        """D from tensor memory to global memory."""
        operation, times = LOADS[self.tile.load]
        atom = cute.make_copy_atom(operation(tcgen05.Repetition(times)), Float32)
        flat = accumulator[(None, None), 0, 0]
        copy = tcgen05.make_tmem_copy(atom, flat).get_slice(thread)
        source = copy.partition_S(flat)
        to = copy.partition_D(target[(None, None), 0, 0])
        registers = cute.make_rmem_tensor(to.shape, Float32)
        cute.copy(atom, source, registers)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(registers, to)


def pointers(tile: Tile) -> tuple[Any, Any, Any]:
    """Stand-ins for compiling."""
    dtype = DTYPES[tile.dtype]
    return tuple(make_ptr(kind, 16, cute.AddressSpace.gmem, assumed_align=16) for kind in (dtype, dtype, Float32))


def ptx(kernel: Any, arch: str, folder: Any) -> str:
    """The PTX of a kernel class."""
    compiled = cute.compile(kernel, *pointers(kernel.tile), options=f"--gpu-arch {arch} --keep-ptx --dump-dir {folder}")
    return compiled.__ptx__.rstrip("\0")
