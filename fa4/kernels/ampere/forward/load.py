"""Global to shared memory: cp.async of 16 bytes, out-of-range chunks zero-filled.

A chunk outside the sequence or the head dim is copied with source size 0 (PTX ISA, cp.async): it reads nothing and writes zeros. So
whatever lies in memory beyond a sequence never enters a product, where 0 * NaN would spread it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from fa4.kernels.ampere.forward.layouts import CHUNK, copy_threads, load_op, tiled_copy


@dataclass(frozen=True)
class TileLoad:
    """Loads tiles of one operand of one (batch, head).

    ``tXgX`` (chunk, rows, column blocks, tile) and ``tXsX`` (chunk, rows, column blocks, stage) are this thread's parts.
    """

    tXgX: cute.Tensor
    tXsX: cute.Tensor
    atom: cute.CopyAtom
    tidx: Int32
    rows: int
    head_dim: int
    threads: int

    @staticmethod
    def of(mX: cute.Tensor, sX: cute.Tensor, threads: int, tidx: Int32) -> TileLoad:
        """Partition ``mX`` (sequence, head dim) into tiles shaped like ``sX`` (rows, padded head dim, stage)."""
        rows, columns, head_dim = cute.size(sX, mode=[0]), cute.size(sX, mode=[1]), mX.shape[1]
        copy = tiled_copy(load_op(), mX.element_type, rows, head_dim, threads)
        thread = copy.get_slice(tidx)
        gX = cute.local_tile(mX, (rows, columns), (None, 0))
        atom = cute.make_copy_atom(load_op(), mX.element_type, num_bits_per_copy=CHUNK * mX.element_type.width)
        return TileLoad(thread.partition_S(gX), thread.partition_D(sX), atom, tidx, rows, head_dim, threads)

    @cute.jit
    def start(self, tile: Int32, stage: Int32, seqlen: Int32, bounded: cutlass.Constexpr[bool]) -> None:
        """Issue the copies of a tile. Only the last tile of a sequence can have rows beyond it: others are not ``bounded``."""
        down, along = copy_threads(self.rows, self.head_dim, self.threads)
        if const_expr(down * along < self.threads):
            if self.tidx < down * along:
                self._start(tile, stage, seqlen, bounded)
        else:
            self._start(tile, stage, seqlen, bounded)

    @cute.jit
    def _start(self, tile: Int32, stage: Int32, seqlen: Int32, bounded: cutlass.Constexpr[bool]) -> None:
        down, along = copy_threads(self.rows, self.head_dim, self.threads)
        rows_left = seqlen - tile * self.rows - self.tidx // along
        columns_left = self.head_dim - self.tidx % along * CHUNK
        for r in cutlass.range_constexpr(cute.size(self.tXsX, mode=[1])):
            for c in cutlass.range_constexpr(cute.size(self.tXsX, mode=[2])):
                source, target = self.tXgX[None, r, c, tile], self.tXsX[None, r, c, stage]
                cut = const_expr((c + 1) * along * CHUNK > self.head_dim)
                if const_expr(bounded or cut):
                    inside = Boolean(True)
                    if const_expr(bounded):
                        inside = r * down < rows_left
                    if const_expr(cut):
                        inside = inside & (c * along * CHUNK < columns_left)
                    pred = cute.make_rmem_tensor(1, Boolean)
                    pred[0] = inside
                    cute.copy(self.atom, source, target, pred=pred)
                else:
                    cute.copy(self.atom, source, target)


@cute.jit
def negate(load: TileLoad, flip: Int32) -> None:
    """Flip the signs of what this thread loaded into stage 0 (its copies must have landed): ``flip`` is 0x80008000.

    A negative scale becomes a positive one with -Q, so that the largest score is always the one with the largest product.
    """
    words = cute.recast_tensor(load.tXsX[None, None, None, 0], Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = words[i] ^ flip


def wait_for(pending: int) -> Any:
    """Wait until at most ``pending`` groups of this thread's copies are in flight, then for the same of all threads."""
    cute.arch.cp_async_wait_group(pending)
    cute.arch.sync_threads()
