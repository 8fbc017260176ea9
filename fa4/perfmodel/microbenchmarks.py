"""Kernels whose time tells one number of the machine each: what ``fa4 model --measure`` runs on a GPU.

A kernel does ``count`` times the same, so that the difference of two counts holds neither launch nor set-up. Thread 0 writes how many
clocks the SM counted, each thread a result that is known, so that the kernels can be checked where clocks say nothing: on the virtual GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import numpy.typing as npt
from cutlass import Float32, Int32, Int64, const_expr, memory
from cutlass.cute.nvgpu import cpasync, tcgen05

from fa4.config import TMEM_COLUMNS, TMEM_LANES, WARP
from fa4.kernels.common.barrier import Barrier
from fa4.kernels.common.tcgen05 import K_STEP, descriptor, fence_after_sync, instruction, k_offset, multiply_ss
from fa4.kernels.common.tensor_memory import load_columns, store_columns

Array = npt.NDArray[np.float32]

INPUTS = 8192
"""Numbers of the input, 32 KB: 1, 2, ... 128, 1, ..."""
PERIOD = 128
OPS = 16
"""Instructions in a trip of most loops."""
CHAINS = 8
VECTOR = 4
COPIES = 4
N = 256
COLUMNS = 64
"""Of an operand of the products: K of a tile."""


@cute.jit
def special_latency(x: cute.Tensor, count: Int32, thread: Int32) -> Float32:
    """Each exponential needs the one before."""
    value = x[thread]
    for _ in cutlass.range(count, unroll=1):
        for _ in cutlass.range_constexpr(OPS):
            value = cute.math.exp2(-value, fastmath=True)
    return value


@cute.jit
def special_rate(x: cute.Tensor, count: Int32, thread: Int32) -> Float32:
    """``CHAINS`` chains of exponentials at once."""
    values = cute.make_rmem_tensor(CHAINS, Float32)
    for i in cutlass.range_constexpr(CHAINS):
        values[i] = x[thread] + Float32(i)
    for _ in cutlass.range(count, unroll=1):
        for _ in cutlass.range_constexpr(OPS // CHAINS):
            for i in cutlass.range_constexpr(CHAINS):
                values[i] = cute.math.exp2(-values[i], fastmath=True)
    total = Float32(0)
    for i in cutlass.range_constexpr(CHAINS):
        total = total + values[i]
    return total


@cute.jit
def fma_latency(x: cute.Tensor, count: Int32, thread: Int32) -> Float32:
    """Each multiply-add needs the one before."""
    value = x[thread]
    for _ in cutlass.range(count, unroll=1):
        for _ in cutlass.range_constexpr(OPS):
            value = value * Float32(0.5) + Float32(1)
    return value


@cute.jit
def fill(x: cute.Tensor, thread: Int32, values: cute.Tensor) -> None:
    """Copy the input to shared memory, by one warpgroup."""
    for i in cutlass.range(cute.size(values) // TMEM_LANES, unroll=1):
        values[i * TMEM_LANES + thread] = x[i * TMEM_LANES + thread].to(values.element_type)
    cute.arch.sync_threads()


@cute.jit
def shared_rate(x: cute.Tensor, count: Int32, thread: Int32) -> Float32:
    """Loads of 16 bytes by every thread, without conflicts."""
    values = memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(2 * TMEM_LANES * VECTOR), 16)
    fill(x, thread, values)
    total = Float32(0)
    for i in cutlass.range(count, unroll=1):
        for k in cutlass.range_constexpr(OPS):
            part = cute.make_rmem_tensor(VECTOR, Float32)
            cute.autovec_copy(cute.local_tile(values, (VECTOR,), ((thread + i + k * 8) % (2 * TMEM_LANES),)), part)
            total = total + (part[0] + part[1]) + (part[2] + part[3])
    return total


@cute.jit
def shared_latency(x: cute.Tensor, count: Int32, thread: Int32) -> Float32:
    """Each load has its address from the one before."""
    places = memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(TMEM_LANES), 16)
    fill(x, thread, places)
    place = thread
    for _ in cutlass.range(count, unroll=1):
        for _ in cutlass.range_constexpr(OPS):
            place = places[place % TMEM_LANES]
    return Float32(place)


@cute.jit
def global_latency(x: cute.Tensor, count: Int32, thread: Int32) -> Float32:
    """Loads of L2, as a warp looks at a semaphore, each with its address from the one before."""
    bits = cute.recast_ptr(x.iterator, dtype=Int32)
    place = thread
    for _ in cutlass.range(count, unroll=1):
        found = cute.arch.load(bits + place, Int32, sem="acquire", scope="gpu")
        place = (place + (found & 1) + WARP) % PERIOD  # the last bit of these numbers is 0
    return Float32(place)


@cute.jit
def barrier(x: cute.Tensor, count: Int32, thread: Int32) -> Float32:
    """Barriers of four warps."""
    for _ in cutlass.range(count, unroll=1):
        for _ in cutlass.range_constexpr(OPS):
            cute.arch.sync_threads()
    return Float32(count)


@cute.jit
def barriers(count: cutlass.Constexpr[int], thread: Int32) -> Barrier:
    """So many mbarriers, each for one arrival."""
    start = memory.SmemAllocator().allocate_array(Int64, count)
    if thread == 0:
        for i in cutlass.range_constexpr(count):
            cute.arch.mbarrier_init(start + i, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return Barrier(start)


@cute.jit
def hand_over(x: cute.Tensor, count: Int32, thread: Int32) -> Float32:
    """Two warps in turns, by two mbarriers: two hand-overs each time."""
    b = barriers(2, thread)
    done = Float32(0)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    for i in cutlass.range(count, unroll=1):
        if warp == 1:
            b.wait(0, i & 1)
        with cute.arch.elect_one():
            b.arrive(warp)
        if warp == 0:
            b.wait(1, i & 1)
        done = done + 1
    return done


@cute.jit
def copied(x: cute.Tensor, count: Int32, thread: Int32, size: cutlass.Constexpr[int]) -> Float32:
    """``COPIES`` bulk copies of ``size`` numbers each, waited for each time."""
    b = barriers(1, thread)
    to = memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((size, COPIES)), 128)
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    for i in cutlass.range(count, unroll=1):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(b.at(0), COPIES * size * 4)
            for k in cutlass.range_constexpr(COPIES):
                source = cute.make_tensor(x.iterator + k * size, cute.make_layout(size))
                cute.copy(atom, source, to[None, k], mbar_ptr=b.at(0))
        b.wait(0, i & 1)
    return to[thread, COPIES - 1]


@cute.jit
def copy_small(x: cute.Tensor, count: Int32, thread: Int32) -> Float32:
    """2 KB."""
    return copied(x, count, thread, INPUTS // COPIES // 16)


@cute.jit
def copy_large(x: cute.Tensor, count: Int32, thread: Int32) -> Float32:
    """32 KB."""
    return copied(x, count, thread, INPUTS // COPIES)


@cute.jit
def tensor_memory(warp: Int32) -> cute.Pointer:
    """All of tensor memory."""
    address = memory.SmemAllocator().allocate_array(Int32, 1)
    if warp == 0:
        cute.arch.alloc_tmem(TMEM_COLUMNS, address)
    cute.arch.sync_threads()
    return cute.arch.retrieve_tmem_ptr(Float32, 16, address)


@cute.jit
def release(start: cute.Pointer, warp: Int32) -> None:
    """Give tensor memory back."""
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(start, TMEM_COLUMNS)


@cute.jit
def summed(values: cute.Tensor) -> Float32:
    """Of all of them, a multiple of 8."""
    total = Float32(0)
    for first in cutlass.range_constexpr(0, cute.size(values), 8):
        for i in cutlass.range_constexpr(8):
            total = total + values[first + i]
    return total


@cute.jit
def tensor_copies(x: cute.Tensor, count: Int32, thread: Int32, columns: cutlass.Constexpr[int], loads: cutlass.Constexpr[bool]) -> Float32:
    """Stores or ``loads`` of ``columns``, each complete before the next."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    start = tensor_memory(warp)
    address = Int32(start.toint())
    values = cute.make_rmem_tensor(columns, Float32)
    values.fill(x[thread])
    for part in cutlass.range_constexpr(2):
        store_columns(address + part * columns, values, thread)
    cute.arch.fence_view_async_tmem_store()
    total = Float32(0)
    for i in cutlass.range(count, unroll=1):
        if const_expr(loads):
            found = cute.make_rmem_tensor(columns, Float32)
            load_columns(address + (i & 1) * columns, found, thread)
            total = total + summed(found) - columns * x[thread]
        else:
            store_columns(address + (i & 1) * columns, values, thread)
            cute.arch.fence_view_async_tmem_store()
    last = cute.make_rmem_tensor(columns, Float32)
    load_columns(address, last, thread)
    total = total + summed(last)
    release(start, warp)
    return total


@cute.jit
def tensor_load_small(x: cute.Tensor, count: Int32, thread: Int32) -> Float32:
    """Loads of 8 columns."""
    return tensor_copies(x, count, thread, 8, True)


@cute.jit
def tensor_load_large(x: cute.Tensor, count: Int32, thread: Int32) -> Float32:
    """Loads of 64 columns."""
    return tensor_copies(x, count, thread, 64, True)


@cute.jit
def tensor_store_small(x: cute.Tensor, count: Int32, thread: Int32) -> Float32:
    """Stores of 8 columns."""
    return tensor_copies(x, count, thread, 8, False)


@cute.jit
def tensor_store_large(x: cute.Tensor, count: Int32, thread: Int32) -> Float32:
    """Stores of 64 columns."""
    return tensor_copies(x, count, thread, 64, False)


@cute.jit
def products(x: cute.Tensor, count: Int32, thread: Int32, each: cutlass.Constexpr[int]) -> Float32:
    """Products of 128 x 256 x 16, of ones, ``each`` before a commit that is waited for."""
    dtype = cutlass.BFloat16
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    b = barriers(1, thread)
    allocator = memory.SmemAllocator()
    ones = allocator.allocate_tensor(dtype, cute.make_layout((TMEM_LANES + N) * COLUMNS), 1024)
    for i in cutlass.range(cute.size(ones) // TMEM_LANES, unroll=1):
        ones[i * TMEM_LANES + thread] = dtype(1)
    cute.arch.fence_proxy("async.shared", space="cta")
    start = tensor_memory(warp)
    address, place = Int32(start.toint()), ones.iterator.toint()
    a, b_ = descriptor(place, TMEM_LANES, COLUMNS), descriptor(place + TMEM_LANES * COLUMNS * 2, N, COLUMNS)
    how = Int32(instruction(dtype, TMEM_LANES, N))
    if warp == 0:
        for i in cutlass.range(count, unroll=1):
            with cute.arch.elect_one():
                for k in cutlass.range_constexpr(each):
                    at = k % (COLUMNS // K_STEP)
                    keep = Int32(1) if const_expr(k > 0) else Int32(i > 0)
                    multiply_ss(address, a + k_offset(TMEM_LANES, COLUMNS, False, at), b_ + k_offset(N, COLUMNS, False, at), how, keep)
                tcgen05.commit(b.at(0))
            b.wait(0, i & 1)
    cute.arch.sync_threads()
    fence_after_sync()
    values = cute.make_rmem_tensor(8, Float32)
    load_columns(address + N - 8, values, thread)
    release(start, warp)
    return values[7]


@cute.jit
def product_few(x: cute.Tensor, count: Int32, thread: Int32) -> Float32:
    """One product."""
    return products(x, count, thread, 1)


@cute.jit
def product_many(x: cute.Tensor, count: Int32, thread: Int32) -> Float32:
    """``OPS`` products."""
    return products(x, count, thread, OPS)


@cute.kernel
def kernel(x: cute.Tensor, y: cute.Tensor, clocks: cute.Tensor, count: Int32, work: cutlass.Constexpr[Any]) -> None:
    """``work`` between two looks at the clock."""
    thread, _, _ = cute.arch.thread_idx()
    begin = cute.arch.clock64()
    result = work(x, count, thread)
    cute.arch.sync_threads()
    end = cute.arch.clock64()
    y[thread] = result
    if thread == 0:
        clocks[0] = Int64(end) - Int64(begin)


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, clocks: cute.Tensor, count: Int32, work: cutlass.Constexpr[Any]) -> None:
    """One CTA, with a thread for each result."""
    kernel(x, y, clocks, count, work).launch(grid=[1, 1, 1], block=[cute.size(y), 1, 1])


def inputs() -> Array:
    """The input of every kernel."""
    return np.asarray(1 + np.arange(INPUTS) % PERIOD, np.float32)


def _exponentials(count: int, threads: int, chains: int) -> Array:
    values = inputs()[:threads, None] + np.arange(chains, dtype=np.float32)
    for _ in range(count * (OPS // chains if chains > 1 else OPS)):
        values = np.exp2(-values)
    return values.sum(1)


def _multiplied(count: int, threads: int) -> Array:
    values = inputs()[:threads]
    for _ in range(count * OPS):
        values = values * np.float32(0.5) + np.float32(1)
    return values


def _summed(count: int, threads: int) -> Array:
    groups = inputs()[: 2 * TMEM_LANES * VECTOR].reshape(-1, VECTOR).sum(1)
    at = np.arange(threads)[:, None] + (np.arange(count)[:, None] + 8 * np.arange(OPS)).ravel()
    return np.asarray(groups[at % (2 * TMEM_LANES)].sum(1), np.float32)


def _chased(count: int, threads: int) -> Array:
    return np.asarray((np.arange(threads) + count * OPS - 1) % TMEM_LANES + 1, np.float32)


@dataclass(frozen=True)
class Microbenchmark:
    """A kernel, its threads, on which families of ``fa4.arch`` it runs, and what it must compute from count and threads."""

    work: Callable[..., Any]
    threads: int
    result: Callable[[int, int], Any]
    families: tuple[str, ...] = ("ampere", "hopper", "blackwell")

    @property
    def name(self) -> str:
        """As in ``fa4.perfmodel.measure.numbers``."""
        return self.work.__name__


_ASYNC, _TENSOR = ("hopper", "blackwell"), ("blackwell",)


def _constant(per_count: float) -> Callable[[int, int], Any]:
    return lambda count, threads: np.full(threads, per_count * count, np.float32)


def _copied(per_copy: int) -> Callable[[int, int], Any]:
    return lambda count, threads: inputs()[(COPIES - 1) * per_copy :][:threads]


def _stored(added: int) -> Callable[[int, int], Any]:
    return lambda count, threads: added * inputs()[:threads]


MICROBENCHMARKS = (
    Microbenchmark(special_latency, WARP, lambda count, threads: _exponentials(count, threads, 1)),
    Microbenchmark(special_rate, 4 * WARP, lambda count, threads: _exponentials(count, threads, CHAINS)),
    Microbenchmark(fma_latency, WARP, _multiplied),
    Microbenchmark(shared_rate, TMEM_LANES, _summed),
    Microbenchmark(shared_latency, TMEM_LANES, _chased),
    Microbenchmark(global_latency, WARP, lambda count, threads: (np.arange(threads) + count * WARP) % PERIOD),
    Microbenchmark(barrier, 4 * WARP, _constant(1)),
    Microbenchmark(hand_over, 2 * WARP, _constant(1), _ASYNC),
    Microbenchmark(copy_small, WARP, _copied(INPUTS // COPIES // 16), _ASYNC),
    Microbenchmark(copy_large, WARP, _copied(INPUTS // COPIES), _ASYNC),
    *(Microbenchmark(work, TMEM_LANES, _stored(8), _TENSOR) for work in (tensor_load_small, tensor_store_small)),
    *(Microbenchmark(work, TMEM_LANES, _stored(64), _TENSOR) for work in (tensor_load_large, tensor_store_large)),
    Microbenchmark(product_few, TMEM_LANES, _constant(K_STEP), _TENSOR),
    Microbenchmark(product_many, TMEM_LANES, _constant(OPS * K_STEP), _TENSOR),
)
