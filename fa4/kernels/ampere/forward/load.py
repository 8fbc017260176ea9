"""Global to shared memory: cp.async of 16 bytes, out-of-range chunks zero-filled.

A chunk outside the sequence or the head dim is copied with source size 0 (PTX ISA, cp.async): it reads nothing and writes zeros. So
whatever lies in memory beyond a sequence never enters a product, where 0 * NaN would spread it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from fa4.config import ELEMENT_BYTES, padded_head_dim
from fa4.kernels.ampere.forward.layouts import CHUNK, address, block_bytes, copy_threads
from fa4.kernels.common.opaque import opaque64, thread_index


def place(tidx: Int32, along: int) -> tuple[Int32, Int32]:
    """(row, column) of a thread's first chunk, ``along`` threads side by side."""
    return tidx // along, tidx % along * CHUNK


@dataclass(frozen=True)
class TileLoad:
    """Copies tiles of one operand of one (batch, head): this thread's chunks.

    ``source`` is the address of the thread's first chunk of tile 0, ``target`` the one in shared memory; ``row_group`` the bytes between
    two rows of a thread, and ``tile`` those between two tiles. Addresses in global memory are 64-bit throughout, so that neither a
    long sequence nor a large stride overflows.
    """

    source: Int64
    target: Int32
    row_group: Int64
    tile: Int64
    dtype: Any
    rows: int
    head_dim: int
    threads: int

    @staticmethod
    def of(mX: cute.Tensor, sX: cute.Tensor, threads: int, tidx: Int32) -> TileLoad:
        """Loads of ``mX`` (sequence, head dim) in tiles shaped like ``sX`` (rows, padded head dim)."""
        rows, head_dim = cute.size(sX, mode=[0]), mX.shape[1]
        down, along = copy_threads(rows, head_dim, threads)
        row, column = place(tidx, along)
        stride = Int64(mX.stride[0]) * ELEMENT_BYTES
        source = mX.iterator.toint() + Int64(row) * stride + Int64(column * ELEMENT_BYTES)
        return TileLoad(source, address(sX, row, column), stride * down, stride * rows, mX.element_type, rows, head_dim, threads)

    def at(self, tile: Int32) -> Int64:
        """Where this thread's part of a tile starts."""
        return self.source + Int64(tile) * self.tile

    @cute.jit
    def start(self, source: Int64, target: Int32, rows_left: Int32, bounded: cutlass.Constexpr[bool]) -> None:
        """Issue the copies of the tile at ``source``; with ``bounded`` only its first ``rows_left`` rows exist."""
        down, along = copy_threads(self.rows, self.head_dim, self.threads)
        if const_expr(down * along < self.threads):
            if thread_index() < down * along:
                self._start(source, target, rows_left, bounded)
        else:
            self._start(source, target, rows_left, bounded)

    @cute.jit
    def _start(self, source: Int64, target: Int32, rows_left: Int32, bounded: cutlass.Constexpr[bool]) -> None:
        down, along = copy_threads(self.rows, self.head_dim, self.threads)
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), self.dtype, num_bits_per_copy=128)
        chunk = cute.make_layout(((CHUNK, 1),))
        thread_row, thread_column = place(thread_index(), along)
        width = along * CHUNK
        row_bytes = width * ELEMENT_BYTES
        for r in cutlass.range_constexpr(self.rows // down):
            for block in cutlass.range_constexpr(padded_head_dim(self.head_dim) // width):
                gX = cute.make_ptr(self.dtype, source + block * row_bytes, cute.AddressSpace.gmem, assumed_align=16)
                at = target + (block * block_bytes(self.rows, self.head_dim) + r * down * row_bytes)
                sX = cute.make_ptr(self.dtype, at, cute.AddressSpace.smem, assumed_align=16)
                cut = (block + 1) * width > self.head_dim
                if const_expr(bounded or cut):
                    inside = Boolean(True)
                    if const_expr(bounded):
                        inside = thread_row + r * down < rows_left
                    if const_expr(cut):
                        inside = inside & (thread_column + block * width < self.head_dim)
                    pred = cute.make_rmem_tensor(1, Boolean)
                    pred[0] = inside
                    cute.copy(atom, cute.make_tensor(gX, chunk), cute.make_tensor(sX, chunk), pred=pred)
                else:
                    cute.copy(atom, cute.make_tensor(gX, chunk), cute.make_tensor(sX, chunk))
            source = opaque64(source + self.row_group)

    @cute.jit
    def flip_signs(self, flip: Int32) -> None:
        """Exclusive-or what this thread copied to the first slot (it must have landed) with ``flip``, two elements at a time.

        A negative scale becomes a positive one with -Q, so that the largest score is always the one with the largest product. Of Q every
        thread has chunks: a tile has at least half as many rows as the block has threads.
        """
        down, along = copy_threads(self.rows, self.head_dim, self.threads)
        row_bytes = along * CHUNK * ELEMENT_BYTES
        for r in cutlass.range_constexpr(self.rows // down):
            for block in cutlass.range_constexpr(padded_head_dim(self.head_dim) // (along * CHUNK)):
                at = self.target + (block * block_bytes(self.rows, self.head_dim) + r * down * row_bytes)
                words = cute.make_tensor(cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=16), cute.make_layout(CHUNK // 2))
                values = cute.make_rmem_tensor(CHUNK // 2, Int32)
                cute.autovec_copy(words, values)
                for i in cutlass.range_constexpr(CHUNK // 2):
                    values[i] = values[i] ^ flip
                cute.autovec_copy(values, words)


@cute.jit
def wait_for(pending: cutlass.Constexpr[int]) -> None:
    """Wait until at most ``pending`` groups of this thread's copies are in flight, then until the same holds for every thread."""
    cute.arch.cp_async_wait_group(pending)
    cute.arch.sync_threads()
