"""CuTe-DSL kernels that move tiles by TMA through pipelines: by one CTA, and by clusters that share what they load."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pl
from cutlass import Float32, Int32, Int64, memory
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

ROWS, STAGES, CONSUMERS = 32, 3, 4


class Twice:
    """Y = 2 X (or Y += 2 X) by tiles of 32 rows of 128 bytes: a warp loads, four compute, one of those stores.

    With ``cluster`` CTAs along x, each of which has rows of its own, X has the rows of one CTA, and each tile is loaded once for all.
    """

    def __init__(self, dtype, reduce: bool = False, cluster: int = 1) -> None:
        self.dtype, self.reduce, self.cluster = dtype, reduce, cluster
        self.columns = 1024 // dtype.width

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        layout = cute.tile_to_shape(atom, (ROWS, self.columns, STAGES), order=(0, 1, 2))
        one, tile = cute.select(layout, mode=[0, 1]), (ROWS, self.columns)
        load_op = cpasync.CopyBulkTensorTileG2SOp()
        if cutlass.const_expr(self.cluster > 1):
            load_op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        load, tensor_x = cpasync.make_tiled_tma_atom(load_op, x, one, tile, num_multicast=self.cluster)
        store_op = cpasync.CopyBulkTensorTileS2GOp()
        if cutlass.const_expr(self.reduce):
            store_op = cpasync.CopyReduceBulkTensorTileS2GOp(cpasync.ReductionKind.ADD)
        store, tensor_y = cpasync.make_tiled_tma_atom(store_op, y, one, tile)
        grid = [cute.ceil_div(y.shape[0], ROWS), 1, 1]
        self.kernel(load, tensor_x, store, tensor_y, layout, cute.ceil_div(x.shape[1], self.columns)).launch(
            grid=grid, block=[32 * CONSUMERS + 32, 1, 1], cluster=[self.cluster, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        tensor_x: cute.Tensor,
        store: cute.CopyAtom,
        tensor_y: cute.Tensor,
        layout: cute.ComposedLayout,
        tiles: Int32,
    ):
        @cute.struct
        class Storage:
            bars: cute.struct.MemRange[Int64, 2 * STAGES]

        smem = memory.SmemAllocator()
        storage = smem.allocate(Storage)
        sx = smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        sy = smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        ctas = cute.make_layout((1, self.cluster, 1, 1))
        pipe = pl.PipelineTmaAsync.create(
            num_stages=STAGES,
            producer_group=pl.CooperativeGroup(pl.Agent.Thread, 1),
            consumer_group=pl.CooperativeGroup(pl.Agent.Thread, CONSUMERS * self.cluster),
            barrier_storage=storage.bars.data_ptr(),
            tx_count=ROWS * self.columns * self.dtype.width // 8,
            cta_layout_vmnk=ctas,
        )
        tile = (ROWS, self.columns)
        gx = cute.local_tile(tensor_x, tile, (block // self.cluster, None))
        gy = cute.local_tile(tensor_y, tile, (block, None))
        to_x, from_x = cpasync.tma_partition(
            load, rank, cute.make_layout(self.cluster), cute.group_modes(sx, 0, 2), cute.group_modes(gx, 0, 2)
        )
        from_y, to_y = cpasync.tma_partition(store, 0, cute.make_layout(1), cute.group_modes(sy, 0, 2), cute.group_modes(gy, 0, 2))
        if warp == CONSUMERS:
            self.produce(pipe, load, from_x, to_x, tiles)
        else:
            state = pl.make_pipeline_state(pl.PipelineUserType.Consumer, STAGES)
            out = pl.PipelineTmaStore.create(num_stages=STAGES, producer_group=pl.CooperativeGroup(pl.Agent.Thread, 32 * CONSUMERS))
            for i in cutlass.range(tiles, unroll=1):
                pipe.consumer_wait(state)
                if warp == 0:
                    out.producer_acquire()
                cute.arch.barrier(barrier_id=1, number_of_threads=32 * CONSUMERS)
                for j in cutlass.range(ROWS * self.columns // (32 * CONSUMERS), unroll=1):
                    e = j * 32 * CONSUMERS + thread
                    place = e // self.columns, e % self.columns, state.index
                    sy[place] = (sx[place].to(Float32) * Float32(2.0)).to(self.dtype)
                cute.arch.fence_proxy("async.shared", space="cta")
                pipe.consumer_release(state)
                cute.arch.barrier(barrier_id=1, number_of_threads=32 * CONSUMERS)
                if warp == 0:
                    cute.copy(store, from_y[None, state.index], to_y[None, i])
                    out.producer_commit()
                state.advance()
            if warp == 0:
                out.producer_tail()

    @cute.jit
    def produce(self, pipe: pl.PipelineTmaAsync, load: cute.CopyAtom, from_x: cute.Tensor, to_x: cute.Tensor, tiles: Int32):
        """Load all tiles."""
        state = pl.make_pipeline_state(pl.PipelineUserType.Producer, STAGES)
        for i in cutlass.range(tiles, unroll=1):
            pipe.producer_acquire(state)
            if cutlass.const_expr(self.cluster > 1):
                everyone = cutlass.Int16((1 << self.cluster) - 1)
                cute.copy(load, from_x[None, i], to_x[None, state.index], tma_bar_ptr=pipe.producer_get_barrier(state), mcast_mask=everyone)
            else:
                cute.copy(load, from_x[None, i], to_x[None, state.index], tma_bar_ptr=pipe.producer_get_barrier(state))
            pipe.producer_commit(state)
            state.advance()
        pipe.producer_tail(state)


def arguments(dtype):
    """X, Y and the stream."""

    def tensor():
        strides = (cute.sym_int64(divisibility=128 // dtype.width), 1)
        return make_fake_tensor(dtype, (cute.sym_int(), cute.sym_int()), strides, assumed_align=16)

    return tensor(), tensor(), make_fake_stream()
