"""The reduce warpgroup: dQ to global memory."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fa4.config import TMEM_LANES, WARP, backward_chunk, padded_head_dim
from fa4.kernels.blackwell.backward.context import Context, Work
from fa4.kernels.common.dq_layout import VECTOR, dq_offset
from fa4.kernels.common.tensor_memory import load_columns


@cute.jit
def run(c: Context, work: Work, mdQ: cute.Tensor, mSemaphore: cute.Tensor | None, thread: Int32) -> None:
    """Add dQ of each query tile to the float32 accumulator.

    Warps: four; a thread has a row, a warp a block of rows of its own, so that no warp waits for another. In a pair each CTA has half of
    the rows, and two warps share a block, each with half of the columns.
    Owns: sdQ; dQ in tensor memory, from dq_full to dq_empty.
    Waits: dq_full; its own bulk copies, before it writes shared memory again. Deterministic: the block's semaphore.
    Signals: dq_empty; of a pair with serial tiles sdq_empty. Deterministic: the block's semaphore, when what it added is there.
    Order: for each part of dQ: to registers; dq_empty; by chunks to shared memory, and from there by bulk reduce-add.
    """
    warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
    phase = Int32(0)
    for member in cutlass.range(work.group, unroll=1):
        for tile in cutlass.range(work.tiles.begin, work.tiles.end, unroll=1):
            head = work.head * work.group + member
            block, column = tile * (TMEM_LANES // WARP) + warp, Int32(0)
            if const_expr(c.config.cta_pair):
                block = tile * (TMEM_LANES // WARP) + c.rank * 2 + warp % 2
                column = warp // 2 * columns_of(c)
            rows = mdQ[work.batch, head, None, None].iterator + Int64(block * WARP) * mdQ.shape[3]
            rows = rows + dq_offset(0, column, mdQ.shape[3])
            c.barriers.dq_full.wait(0, phase)
            if const_expr(mSemaphore is None):
                add(c, (rows, warp, lane), phase, None)
            else:
                semaphore = mSemaphore[work.batch, head, None].iterator + block  # type: ignore[index]  # mypy does not know const_expr
                add(c, (rows, warp, lane), phase, Turn(semaphore, turn(c, work, tile) * c.config.cluster))
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(0, read=False)
                    cute.arch.red(semaphore, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
            if const_expr(c.serial_pair):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                c.barriers.sdq_empty.arrive(0)
            phase = phase ^ 1
    cute.arch.cp_async_bulk_wait_group(0, read=True)


def columns_of(c: Context) -> int:
    """Columns of dQ that a thread has."""
    return padded_head_dim(c.head_dims[0]) // c.config.cluster


def most_columns(c: Context) -> int:
    """Columns that a thread has in registers at a time."""
    return 128 if c.config.registers[1] >= 152 else 96


class Turn(NamedTuple):
    """The semaphore of a block of rows, and what it says when it is this CTA's turn."""

    semaphore: cute.Pointer
    number: Int32


@cute.jit
def turn(c: Context, work: Work, tile: Int32) -> Int32:
    """How many key tiles add to a query tile before this one: those with smaller numbers in the order of the launch, which have begun."""
    keys = c.band.key_tiles(tile * TMEM_LANES, TMEM_LANES, c.tile_n)
    if const_expr(c.falling):
        return keys.end - 1 - work.key_tile
    return work.key_tile - keys.begin


@cute.jit
def wait_turn(turn: Turn) -> None:
    """Until all others whose turn comes before have added, and what they added is there."""
    done = cute.arch.load(turn.semaphore, Int32, sem="acquire", scope="gpu")
    while done < turn.number:
        done = cute.arch.load(turn.semaphore, Int32, sem="acquire", scope="gpu")


@cute.jit
def add(c: Context, where: tuple[cute.Pointer, Int32, Int32], phase: Int32, turn: Turn | None) -> None:
    """One query tile, part by part: ``where`` are the floats from which on a warp's 32 rows lie, the warp, and the lane."""
    rows, warp, lane = where
    d, chunk = columns_of(c), backward_chunk(c.config, *c.head_dims)
    parts, number, end = c.columns.parts, 0, 0
    for part in cutlass.range_constexpr(len(parts)):
        begin, end = end, end + parts[part]
        at_once = max(n for n in range(chunk, most_columns(c) + 1, chunk) if parts[part] % n == 0)
        if const_expr(part > 0):
            c.barriers.dq_full.wait(part, phase)
        for first in cutlass.range_constexpr(begin, end, at_once):
            dQ = cute.make_rmem_tensor(at_once, Float32)
            load_columns(c.columns.dQ + first, dQ, warp * WARP + lane)
            if const_expr(first + at_once == end):
                c.barriers.dq_empty.arrive(part)
            if const_expr(first == 0 and turn is not None):
                wait_turn(turn)
            for at in cutlass.range_constexpr(0, at_once, chunk):
                stage = 0 if const_expr(c.serial_pair) else (phase + number) % 2 if const_expr(d // chunk % 2 == 1) else number % 2
                send(c, dQ, at, (rows + dq_offset(0, first + at, d), warp, lane), stage)
                number = number + 1


@cute.jit
def send(c: Context, dQ: cute.Tensor, begin: cutlass.Constexpr[int], where: tuple[cute.Pointer, Int32, Int32], stage: Int32 | int) -> None:
    """A chunk of columns through shared memory."""
    to, warp, lane = where
    chunk = backward_chunk(c.config, *c.head_dims)
    cute.arch.cp_async_bulk_wait_group(0 if c.serial_pair else 1, read=True)  # of the lane that has any
    cute.arch.sync_warp()
    staging = c.shared.sdQ[None, None, None, warp, stage]
    for group in cutlass.range_constexpr(chunk // VECTOR):
        source = cute.make_tensor(dQ.iterator + begin + group * VECTOR, cute.make_layout(VECTOR))
        cute.autovec_copy(source, staging[None, lane, group])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        reduce_add(to, staging.iterator, chunk * WARP * 4)
    cute.arch.cp_async_bulk_commit_group()  # by all lanes, though one has something in it: two instructions of one lane are a branch


@cute.jit
def reduce_add(to: cute.Pointer, source: cute.Pointer, size: cutlass.Constexpr[int]) -> None:
    """Add ``size`` bytes of float32 in shared memory to those in global memory; for one elected thread."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[to.toint(), source.toint(), Int32(size)],
    )
