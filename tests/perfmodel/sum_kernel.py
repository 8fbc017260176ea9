"""A small CuTe-DSL function, written as its users write them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

THREADS = 64


@cute.kernel
def exponentials_kernel(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    total = Float32(0.0)
    for i in cutlass.range(8, unroll=1):
        total = total + cute.math.exp2(x[block * THREADS + thread] * Float32(i), fastmath=True)
    cute.arch.sync_threads()
    y[block * THREADS + thread] = total


@cute.jit
def exponentials(x: cute.Tensor, y: cute.Tensor):
    exponentials_kernel(x, y).launch(grid=[cute.ceil_div(cute.size(x), THREADS), 1, 1], block=[THREADS, 1, 1])
