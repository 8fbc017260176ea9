"""Small CuTe-DSL functions, written as their users write them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
from cutlass import Constexpr, Float32, Int32

THREADS = 64


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor, a: Float32, factor: Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < cute.size(x):
        y[i] = x[i] * a * Float32(factor)


@cute.jit
def scale(x: cute.Tensor, y: cute.Tensor, a: Float32, factor: Constexpr = 1):
    scale_kernel(x, y, a, factor).launch(grid=[cute.ceil_div(cute.size(x), THREADS), 1, 1], block=[THREADS, 1, 1])


@cute.jit
def scale_anything(x, y, a: Float32):
    """Without annotations the DSL takes tensors of torch and arrays of numpy as they are."""
    scale(x, y, a)


@cute.jit
def scale_pointers(x: cute.Pointer, y: cute.Pointer, n: Int32, a: Float32):
    layout = cute.make_layout(n)
    scale_kernel(cute.make_tensor(x, layout), cute.make_tensor(y, layout), a, 1).launch(
        grid=[cute.ceil_div(n, THREADS), 1, 1], block=[THREADS, 1, 1]
    )


@cute.jit
def scale_pair(pair: tuple[cute.Tensor, cute.Tensor], a: Float32):
    x, y = pair
    scale_kernel(x, y, a, 1).launch(grid=[cute.ceil_div(cute.size(x), THREADS), 1, 1], block=[THREADS, 1, 1])


@cute.jit
def scale_twice(x: cute.Tensor, y: cute.Tensor, a: Float32, cluster: Constexpr = 1):
    """Two launches; the second reads what the first wrote."""
    grid = [cute.ceil_div(cute.size(x), THREADS), 1, 1]
    scale_kernel(x, y, a, 1).launch(grid=grid, block=[THREADS, 1, 1])
    if cutlass.const_expr(cluster > 1):
        scale_kernel(y, y, a, 1).launch(grid=grid, block=[THREADS, 1, 1], cluster=[cluster, 1, 1])
    else:
        scale_kernel(y, y, a, 1).launch(grid=grid, block=[THREADS, 1, 1])


class Scale:
    """A factor that is compiled in, as an attribute: the name of the kernel does not show it."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor):
        self.kernel(x, y).launch(grid=[1, 1, 1], block=[cute.size(x), 1, 1])

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        y[thread] = x[thread] * Float32(self.factor)


@cute.kernel
def overwrite_kernel(y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    y[thread] = Float32(block)


@cute.jit
def overwrite(y: cute.Tensor):
    """Both CTAs write the same elements."""
    overwrite_kernel(y).launch(grid=[2, 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def shift_kernel(x: cute.Tensor, y: cute.Tensor, by: Int32):
    thread, _, _ = cute.arch.thread_idx()
    y[thread] = x[thread + by]  # the line that an error names


@cute.jit
def shift(x: cute.Tensor, y: cute.Tensor, by: Int32):
    """Reads ``by`` elements beyond the end of x."""
    shift_kernel(x, y, by).launch(grid=[1, 1, 1], block=[cute.size(y), 1, 1])


@cute.kernel
def reverse_kernel(x: cute.Tensor, y: cute.Tensor, synchronise: Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    shared = memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(2 * THREADS), 128)
    shared[thread] = x[thread]
    if cutlass.const_expr(synchronise):
        cute.arch.sync_threads()
    y[thread] = shared[2 * THREADS - 1 - thread]


@cute.jit
def reverse(x: cute.Tensor, y: cute.Tensor, synchronise: Constexpr = True):
    """Of 128 elements, by way of shared memory; without the barrier a warp reads what another has yet to write."""
    reverse_kernel(x, y, synchronise).launch(grid=[1, 1, 1], block=[2 * THREADS, 1, 1])


@cute.jit
def multiprocessors(y: cute.Tensor):
    """Writes the number of SMs, as kernels with persistent blocks find it out."""
    fill_kernel(y, Float32(cutlass.utils.HardwareInfo().get_device_multiprocessor_count())).launch(grid=[1, 1, 1], block=[1, 1, 1])


@cute.kernel
def fill_kernel(y: cute.Tensor, value: Float32):
    y[0] = value
