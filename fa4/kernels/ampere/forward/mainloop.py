"""The loop over key tiles, from the last visible one to the first: all warps do the same.

The ring has ``stages`` slots of K and of V. A group of cp.async is committed per load step, empty where nothing is left to load, so that
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
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fa4.config import ELEMENT_BYTES, AmpereForwardConfig, padded_head_dim
from fa4.kernels.ampere.forward.load import TileLoad, wait_for
from fa4.kernels.ampere.forward.mma import Operand, scores, values
from fa4.kernels.common import online_softmax
from fa4.kernels.common.mask import Band, KeyTiles
from fa4.kernels.common.modifier import Modifiers
from fa4.kernels.common.opaque import opaque, opaque64
from fa4.kernels.common.score import ScoreScalars, cap


class Cursor(NamedTuple):
    """What changes from tile to tile: its slot, and where the next K and V to load lie in global memory."""

    slot: Int32
    next_K: Int64
    next_V: Int64


@dataclass(frozen=True)
class Mainloop:
    """What a query tile needs to visit its key tiles; ``at`` is (batch, head)."""

    load_K: TileLoad
    load_V: TileLoad
    Q: Operand
    K: Operand
    V: Operand
    tiled_mma: cute.TiledMma
    acc_O: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    band: Band
    scalars: ScoreScalars
    config: AmpereForwardConfig
    modifiers: Modifiers
    at: tuple[Int32, Int32]

    @cute.jit
    def run(self, load_Q: TileLoad, query_tile: Int32, tiles: KeyTiles) -> None:
        """Visit the tiles ``[tiles.begin, tiles.end)``, at least one: masked, unmasked, masked."""
        first_row = query_tile * self.config.tile_m
        last = tiles.end - 1
        rows_left = self.band.seqlen_k - last * self.config.tile_n
        load_Q.start(load_Q.at(query_tile), load_Q.target, self.band.seqlen_q - first_row, True)
        self.load_K.start(self.load_K.at(last), self.load_K.target, rows_left, True)
        ahead_of_V = 0
        if const_expr(self.config.stages > 1):
            self.load_V.start(self.load_V.at(last), self.load_V.target, rows_left, True)
            ahead_of_V = self.config.stages - 1
        cute.arch.cp_async_commit_group()
        for ahead in cutlass.range_constexpr(1, self.config.stages - 1):
            if last - ahead >= tiles.begin:
                self.load_K.start(self.load_K.at(last - ahead), self._slot(self.load_K, self.load_K.target, Int32(ahead)), Int32(0), False)
                self.load_V.start(self.load_V.at(last - ahead), self._slot(self.load_V, self.load_V.target, Int32(ahead)), Int32(0), False)
            cute.arch.cp_async_commit_group()
        if const_expr(self.scalars.flip_q is not None):
            if self.scalars.flip_q != 0:
                cute.arch.cp_async_wait_group(0)
                load_Q.flip_signs(self.scalars.flip_q)

        ahead_of_K = max(self.config.stages - 1, 1)
        cursor = Cursor(Int32(0), self.load_K.at(last - ahead_of_K), self.load_V.at(last - ahead_of_V))
        for key_tile in cutlass.range(last, tiles.full_end - 1, -1, unroll=1):
            cursor = self._visit(key_tile, cursor, tiles.begin, first_row, True)
        for key_tile in cutlass.range(tiles.full_end - 1, tiles.full_begin - 1, -1, unroll=1):
            cursor = self._visit(key_tile, cursor, tiles.begin, first_row, False)
        if const_expr(self.band.left_limit is not None):
            for key_tile in cutlass.range(tiles.full_begin - 1, tiles.begin - 1, -1, unroll=1):
                cursor = self._visit(key_tile, cursor, tiles.begin, first_row, True)

    @cute.jit
    def _visit(self, key_tile: Int32, cursor: Cursor, begin: Int32, first_row: Int32, masked: cutlass.Constexpr[bool]) -> Cursor:
        """One tile, in the order that the module describes; returns the cursor of the next one."""
        slot = cursor.slot
        rows_left = self.band.seqlen_k - key_tile * self.config.tile_n
        acc_S = cute.make_rmem_tensor(self.tiled_mma.get_slice(0).partition_shape_C((self.config.tile_m, self.config.tile_n)), Float32)
        acc_S.fill(0.0)
        at_Q, at_K, at_V = opaque(self.Q.at), opaque(self.K.at), opaque(self.V.at)
        to_K, to_V = opaque(self.load_K.target), opaque(self.load_V.target)
        if const_expr(self.config.stages == 1):
            wait_for(0)
            self.load_V.start(cursor.next_V, to_V, rows_left, masked)
            cute.arch.cp_async_commit_group()
            scores(acc_S, self.tiled_mma, self.Q, at_Q, self.K, at_K, self.config)
            wait_for(0)
            if key_tile > begin:
                self.load_K.start(cursor.next_K, to_K, Int32(0), False)
            cute.arch.cp_async_commit_group()
        else:
            wait_for(self.config.stages - 2)
            if key_tile - (self.config.stages - 1) >= begin:
                free = slot - 1 if slot > 0 else Int32(self.config.stages - 1)
                self.load_K.start(cursor.next_K, self._slot(self.load_K, to_K, free), Int32(0), False)
                self.load_V.start(cursor.next_V, self._slot(self.load_V, to_V, free), Int32(0), False)
            cute.arch.cp_async_commit_group()
            at_K, at_V = self._slot(self.load_K, at_K, slot), self._slot(self.load_V, at_V, slot)
            scores(acc_S, self.tiled_mma, self.Q, at_Q, self.K, at_K, self.config)
            slot = slot + 1 if slot + 1 < self.config.stages else Int32(0)
        if const_expr(self.scalars.gain is not None):
            cap(acc_S, self.scalars.gain)
        tile, first_key = (self.config.tile_m, self.config.tile_n), key_tile * self.config.tile_n
        if const_expr(self.modifiers.present):
            self.modifiers.apply_tile(acc_S, self.tiled_mma, tile, self.at, (first_row, first_key), masked)
        if const_expr(masked):
            self.band.hide(acc_S, tile, self.tiled_mma, first_row, first_key)
        may_hide = masked or self.modifiers.present
        online_softmax.update(acc_S, self.acc_O, self.row_max, self.row_sum, self.scalars.scale_log2, may_hide)
        values(self.acc_O, self.tiled_mma, acc_S, self.V, at_V)
        return Cursor(slot, opaque64(cursor.next_K - self.load_K.tile), opaque64(cursor.next_V - self.load_V.tile))

    def _slot(self, load: TileLoad, at: Int32, slot: Int32) -> Int32:
        """The address ``at`` of the first slot, moved to another slot."""
        return at + slot * (ELEMENT_BYTES * load.rows * padded_head_dim(load.head_dim))
