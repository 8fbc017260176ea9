"""The loop over key tiles, from the last visible one to the first: all warps do the same.

The ring has ``stages`` slots of K and V. A group of cp.async is committed per load step, empty where nothing is left to load, so that
"at most n groups in flight" always names the same load.

One stage, order of the steady state for tile j:

1. wait for K of j; barrier (also: every warp is done with V of j + 1)
2. start V of j
3. S = Q K^T
4. wait for V of j; barrier (also: every warp is done with K of j)
5. start K of j - 1
6. softmax of S, rescale O
7. O += P V

Two stages or more:

1. wait for K and V of j; barrier (also: every warp is done with tile j + 1, whose slot is free now)
2. start K and V of j - (stages - 1) into that slot
3. S = Q K^T, softmax, rescale O, O += P V
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from fa4.kernels.ampere.forward.load import TileLoad, negate, wait_for
from fa4.kernels.ampere.forward.mma import Products
from fa4.kernels.common import online_softmax
from fa4.kernels.common.mask import Band, KeyTiles
from fa4.kernels.common.score import ScoreScalars, cap


@dataclass(frozen=True)
class Mainloop:
    """What a query tile needs to visit its key tiles. ``tile`` is (tile_m, tile_n)."""

    load_Q: TileLoad
    load_K: TileLoad
    load_V: TileLoad
    products: Products
    acc_O: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    band: Band
    scalars: ScoreScalars
    tile: tuple[int, int]
    stages: int

    @cute.jit
    def run(self, query_tile: Int32, tiles: KeyTiles) -> None:
        """Visit the tiles ``[tiles.begin, tiles.end)``, at least one: masked, unmasked, masked."""
        first_row = query_tile * self.tile[0]
        self.load_Q.start(query_tile, Int32(0), self.band.seqlen_q, True)
        self._start(self.load_K, tiles.end - 1, Int32(0), True)
        if const_expr(self.stages > 1):
            self._start(self.load_V, tiles.end - 1, Int32(0), True)
        cute.arch.cp_async_commit_group()
        for ahead in cutlass.range_constexpr(1, self.stages - 1):
            if tiles.end - 1 - ahead >= tiles.begin:
                self._start(self.load_K, tiles.end - 1 - ahead, Int32(ahead), False)
                self._start(self.load_V, tiles.end - 1 - ahead, Int32(ahead), False)
            cute.arch.cp_async_commit_group()
        if const_expr(self.scalars.flip_q is not None):
            if self.scalars.flip_q != 0:
                cute.arch.cp_async_wait_group(0)
                negate(self.load_Q, self.scalars.flip_q)

        slot = Int32(0)
        for i in cutlass.range(tiles.end - tiles.full_end, unroll=1):
            self._visit(tiles.end - 1 - i, tiles.begin, slot, first_row, True)
            slot = self._next(slot)
        for i in cutlass.range(tiles.full_end - tiles.full_begin, unroll=1):
            self._visit(tiles.full_end - 1 - i, tiles.begin, slot, first_row, False)
            slot = self._next(slot)
        if const_expr(self.band.left_limit is not None):
            for i in cutlass.range(tiles.full_begin - tiles.begin, unroll=1):
                self._visit(tiles.full_begin - 1 - i, tiles.begin, slot, first_row, True)
                slot = self._next(slot)

    @cute.jit
    def _visit(self, key_tile: Int32, begin: Int32, slot: Int32, first_row: Int32, masked: cutlass.Constexpr[bool]) -> None:
        """One tile, in the order that the module describes."""
        acc_S = cute.make_rmem_tensor(self.products.tiled_mma.get_slice(0).partition_shape_C(self.tile), Float32)
        acc_S.fill(0.0)
        if const_expr(self.stages == 1):
            wait_for(0)
            self._start(self.load_V, key_tile, slot, masked)
            cute.arch.cp_async_commit_group()
            self.products.scores(acc_S, slot)
            wait_for(0)
            if key_tile > begin:
                self._start(self.load_K, key_tile - 1, slot, False)
            cute.arch.cp_async_commit_group()
        else:
            wait_for(self.stages - 2)
            ahead = key_tile - (self.stages - 1)
            if ahead >= begin:
                free = self._previous(slot)
                self._start(self.load_K, ahead, free, False)
                self._start(self.load_V, ahead, free, False)
            cute.arch.cp_async_commit_group()
            self.products.scores(acc_S, slot)
        if const_expr(self.scalars.cap_log2 is not None):
            cap(acc_S, self.scalars)
        if const_expr(masked):
            self.band.hide(acc_S, self.tile, self.products.tiled_mma, first_row, key_tile * self.tile[1])
        online_softmax.update(acc_S, self.acc_O, self.row_max, self.row_sum, self.scalars.scale_log2, masked)
        self.products.values(self.acc_O, acc_S, slot)

    @cute.jit
    def _start(self, load: TileLoad, key_tile: Int32, slot: Int32, bounded: cutlass.Constexpr[bool]) -> None:
        load.start(key_tile, slot, self.band.seqlen_k, bounded)

    @cute.jit
    def _next(self, slot: Int32) -> Int32:
        result = slot
        if const_expr(self.stages > 1):
            result = slot + 1 if slot + 1 < self.stages else Int32(0)
        return result

    @cute.jit
    def _previous(self, slot: Int32) -> Int32:
        return slot - 1 if slot > 0 else Int32(self.stages - 1)
