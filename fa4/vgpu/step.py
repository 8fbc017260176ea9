"""One step of the machine: some warps execute a block, or an engine an operation; and what happens when nothing can run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu import barrier, tensor_multiply
from fa4.vgpu.bulk import check_end
from fa4.vgpu.emit import Compiled, EmitError
from fa4.vgpu.engine import EXITED, WAITING, Engine, Issuer, wake
from fa4.vgpu.errors import DeadlockError, Place, UnsupportedInstructionError, VgpuError
from fa4.vgpu.generate import compile_block
from fa4.vgpu.memory import FaultError
from fa4.vgpu.program import JUMPS, Kernel, Op
from fa4.vgpu.scheduler import Pick
from fa4.vgpu.state import Cta, Gang, Warp

if TYPE_CHECKING:
    from fa4.vgpu.machine import Code, Launch

Array = npt.NDArray[Any]


def generate(code: Code, index: int, full: bool) -> Compiled:
    """Generate the function of a block, and keep it.

    Raises:
        EmitError: an instruction that is not modelled.
    """
    compiled = compile_block(code.kernel, code.watch, (index, full), code.how)
    code.blocks[index, full] = compiled
    return compiled


def run_warps(launch: Launch, pick: Pick) -> None:
    """Execute one block by some warps, and move them on."""
    cta, first, last, index = pick
    warp = cta.warps[first]
    full = warp.full
    gang = cta.gang(first, last)
    code = launch.code
    compiled = code.blocks.get((index, full))
    if compiled is None:
        try:
            compiled = generate(code, index, full)
        except EmitError as error:
            place = _place(launch, gang, _op(code.kernel, index, error.position), None)
            raise UnsupportedInstructionError(error.message, place) from error
    mask = None if full else warp.at[index]
    counts = launch.counts.get((index, full))
    if counts is None:
        counts = launch.counts[index, full] = np.zeros(cta.warp_count, np.int64)
    counts[first:last] += 1
    if launch.observer is not None:
        for w in range(first, last):
            launch.observer.block(cta.index, w, index, 32 if mask is None else int(mask.sum()))
    block = code.kernel.blocks[index]
    try:
        result = compiled.run(gang, mask)
        if launch.on_park is not None:
            for warp in cta.warps[first:last]:
                if warp.state == WAITING:
                    launch.on_park(cta, warp, index)
        if block.end is None or block.end.name not in JUMPS:
            for w in range(first, last):
                _advance(launch, cta, cta.warps[w], index, index + 1)
        else:
            _jump(launch, gang, index, block.end, result)
    except FaultError as fault:
        if fault.issuer is not None:
            raise fault.error(fault.message, _operation_place(launch, fault.issuer)) from fault
        position = _position(fault, compiled, len(block.ops))
        raise fault.error(fault.message, _place(launch, gang, _op(code.kernel, index, position), fault.lanes, mask)) from fault


def run_engine(launch: Launch, engine: Engine) -> None:
    """Let an engine do one operation, see ``Engine.step``."""
    try:
        engine.step(partial(launch.scheduler.place, engine.cta.cluster.schedule))
    except FaultError as fault:
        if fault.issuer is None:
            raise
        raise fault.error(fault.message, _operation_place(launch, fault.issuer)) from fault


def _jump(launch: Launch, gang: Gang, index: int, end: Op, result: Any) -> None:
    """Move the warps of a gang after a branch or an exit."""
    cta, block = gang.cta, launch.kernel.blocks[index]
    warps = cta.warps[gang.first : gang.last]
    if end.name == "brx":
        numbers, mask = result
        targets = block.targets[: len(block.targets) - (end.guard is not None)]
        numbers = np.broadcast_to(numbers, gang.n)
        for i, warp in enumerate(warps):
            lanes = warp.at[index]
            here = slice(32 * i, 32 * i + 32)
            taken = lanes if mask is None else mask[here]
            if (numbers[here][taken] >= len(targets)).any():
                raise FaultError(VgpuError, f"brx.idx beyond its {len(targets)} targets")
            moves: dict[int, Array] = {}
            for number in np.unique(numbers[here][taken]):
                target = targets[number]
                chosen = taken & (numbers[here] == number)
                moves[target] = moves[target] | chosen if target in moves else chosen
            if (lanes & ~taken).any():
                moves[index + 1] = moves.get(index + 1, np.zeros(32, bool)) | (lanes & ~taken)
            _move(launch, cta, warp, index, moves)
        return
    target = block.targets[0]
    if result is not None:
        jumping = int(np.count_nonzero(result))
        if jumping == 0:
            target = index + 1
        elif jumping < gang.n:
            for i, warp in enumerate(warps):
                lanes = warp.at[index]
                taken = result[32 * i : 32 * i + 32] & lanes
                stay = lanes & ~taken
                if not stay.any():
                    moves = {target: lanes}
                elif not taken.any():
                    moves = {index + 1: lanes}
                else:
                    moves = {target: taken, index + 1: stay} if target != index + 1 else {target: lanes}
                _move(launch, cta, warp, index, moves)
            return
    for warp in warps:
        _advance(launch, cta, warp, index, target)


def _advance(launch: Launch, cta: Cta, warp: Warp, index: int, target: int) -> None:
    """All lanes of a warp that are at block ``index`` go to another."""
    at = warp.at
    if len(at) == 1 and target < len(launch.code.kernel.blocks):
        at[target] = at.pop(index)
        warp.block = target
    else:
        _move(launch, cta, warp, index, {target: at[index]})


def _move(launch: Launch, cta: Cta, warp: Warp, index: int, moves: dict[int, Array]) -> None:
    """Lanes of a warp go from block ``index`` to others; one past the last block is the exit."""
    at = warp.at
    del at[index]
    leave = len(launch.kernel.blocks)
    for target, lanes in moves.items():
        if target >= leave:
            warp.exited = warp.exited | lanes
        else:
            at[target] = at[target] | lanes if target in at else lanes
    if not at:
        warp.state = EXITED
        cta.live -= 1
        launch.progress += 1
        if cta.hazards is not None:
            cta.hazards.leave(cta, warp.index)
        for number in list(cta.barriers):
            barrier.release(cta, number)
        cta.cluster.barrier.check()
        if not cta.live:
            check_end(cta)
            tensor_multiply.check_end(cta)
            if cta.hazards is not None:
                cta.hazards.check_end(cta)
        return
    warp.block = min(at)
    warp.full = len(at) == 1 and ((len(moves) == 1 and warp.full) or bool(next(iter(at.values())).all()))


# Errors


def _op(kernel: Kernel, index: int, position: int) -> Op | None:
    block = kernel.blocks[index]
    ops = block.ops if block.end is None else (*block.ops, block.end)
    return ops[position] if 0 <= position < len(ops) else None


def _position(fault: FaultError, compiled: Compiled, end: int) -> int:
    """The instruction at fault: the line of generated code that was being executed."""
    trace = fault.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is compiled.run.__code__:
            return compiled.positions[trace.tb_lineno - 1]
        trace = trace.tb_next
    return end


def _place(launch: Launch, gang: Gang, op: Op | None, lanes: Array | None, mask: Array | None = None) -> Place:
    chosen = lanes if lanes is not None else mask
    lane = int(chosen.argmax()) if chosen is not None and chosen.any() else 0
    return Place(
        kernel=launch.kernel.name,
        cta=gang.cta.id,
        warp=gang.first + lane // 32,
        lane=lane % 32,
        ptx_line=None if op is None else op.line,
        ptx_text="" if op is None else op.text,
        source="" if op is None else op.source,
    )


def _operation_place(launch: Launch, issuer: Issuer) -> Place:
    op = issuer.op
    where = (None, "", "") if op is None else (op.line, op.text, op.source)
    return Place(launch.kernel.name, issuer.cta.id, issuer.warp, issuer.lane, *where)


def expire(launch: Launch, ctas: Sequence[Cta]) -> bool:
    """Nothing can run: let those waits end in vain that may, such as try_wait's; False where that was tried and nothing happened since."""
    parked = [(cta, warp) for cta in ctas for warp in cta.warps if warp.wait is not None and warp.wait.expire is not None]
    here = launch.progress, *((cta.index, warp.index, warp.block) for cta, warp in parked)
    if not parked or here in launch.expired:
        return False
    if not any(other[0] == launch.progress for other in launch.expired):
        launch.expired.clear()
    launch.expired.add(here)
    for _, warp in parked:
        assert warp.wait is not None
        wake(warp, warp.wait.expire)
    return True


def deadlock(launch: Launch, ctas: Sequence[Cta]) -> DeadlockError:
    """The table of who waits where for what."""
    rows = []
    for cta in ctas:
        for warp in cta.warps:
            if warp.state == EXITED:
                rows.append(f"CTA {cta.id} warp {warp.index}: exited")
                continue
            # A waiting warp has already been moved behind the instruction.
            op = _op(launch.kernel, warp.block - 1, len(launch.kernel.blocks[warp.block - 1].ops))
            where = "" if op is None else f" at PTX line {op.line}: {op.text}" + (f" ({op.source})" if op.source else "")
            what = "" if warp.wait is None else warp.wait.describe()
            rows.append(f"CTA {cta.id} warp {warp.index}: waits for {what}{where}")
    return DeadlockError("no warp can run:\n  " + "\n  ".join(rows), Place(launch.kernel.name))
