"""The virtual GPU: launches of compiled kernels on registered host memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fa4.vgpu import barrier
from fa4.vgpu.defined import Watch, watch
from fa4.vgpu.emit import Compiled, EmitError, compile_block
from fa4.vgpu.errors import DeadlockError, LaunchError, Place, UnsupportedInstructionError, VgpuError
from fa4.vgpu.memory import UNWRITTEN, WRITTEN, Block, Buffer, FaultError, GlobalMemory
from fa4.vgpu.program import Kernel, Op, Program
from fa4.vgpu.report import Observer, Report
from fa4.vgpu.scheduler import Pick, Schedule, Scheduler
from fa4.vgpu.state import EXITED, Cta, Dim3, Gang, Warp

Array = npt.NDArray[Any]

ARCHES = {
    # shared memory that the system keeps at offset 0, and what a CTA may use, in bytes
    "sm_80": (0, 166912),
    "sm_86": (0, 101376),
    "sm_89": (0, 101376),
    "sm_90a": (1024, 232448),
    "sm_100a": (1024, 232448),
    "sm_103a": (1024, 232448),
    "sm_120a": (1024, 101376),
}


@dataclass
class Code:
    """Generated functions of a kernel, by (block, full)."""

    kernel: Kernel
    watch: Watch
    shared_base: int
    blocks: dict[tuple[int, bool], Compiled] = field(default_factory=dict)


@dataclass
class Launch:
    """One launch as the CTAs see it."""

    code: Code
    grid: Dim3
    block: Dim3
    shared_bytes: int
    dynamic_bytes: int
    constants: dict[str, Block]
    memory: GlobalMemory
    approx_seed: int
    early_copies: bool
    observer: Observer | None
    ticks: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    counts: dict[tuple[int, bool], Array] = field(default_factory=dict)
    blank: int = UNWRITTEN

    @property
    def kernel(self) -> Kernel:
        """The kernel that runs."""
        return self.code.kernel

    @property
    def watch(self) -> Watch:
        """Its registers that may be read before they are written."""
        return self.code.watch

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.block[0] * self.block[1] * self.block[2]

    def specials(self) -> dict[str, Array]:
        """Special registers: one value a lane, or one for all; those of the CTA's place are set as it starts (PTX ISA 10)."""
        lanes = np.arange(-(-self.threads // 32) * 32)
        lane = lanes % 32
        values: dict[str, Any] = {
            "%tid.x": lanes % self.block[0],
            "%tid.y": lanes // self.block[0] % self.block[1],
            "%tid.z": lanes // (self.block[0] * self.block[1]),
            "%laneid": lane,
            "%warpid": lanes // 32,
            "%nwarpid": len(lanes) // 32,
            "%smid": 0,
            "%nsmid": 1,
            "%gridid": 0,
            "%dynamic_smem_size": self.dynamic_bytes,
            "%total_smem_size": self.shared_bytes,
            "%aggr_smem_size": self.shared_bytes,
            "%lanemask_eq": 1 << lane,
            "%lanemask_lt": (1 << lane) - 1,
            "%lanemask_le": (2 << lane) - 1,
            "%lanemask_gt": (1 << 32) - (2 << lane),
            "%lanemask_ge": (1 << 32) - (1 << lane),
            "%cluster_ctarank": 0,
            "%cluster_nctarank": 1,
            "%is_explicit_cluster": 0,
        }
        for i, axis in enumerate("xyz"):
            values[f"%ntid.{axis}"] = self.block[i]
            values[f"%ctaid.{axis}"] = values[f"%clusterid.{axis}"] = 0
            values[f"%nctaid.{axis}"] = values[f"%nclusterid.{axis}"] = self.grid[i]
            values[f"%cluster_ctaid.{axis}"] = 0
            values[f"%cluster_nctaid.{axis}"] = 1
        return {name: np.atleast_1d(np.asarray(value, np.int64)).astype(np.uint32) for name, value in values.items()}


class Gpu:
    """A virtual GPU.

    Args:
        arch: "sm_80" and so on; decides how much shared memory there is and where it begins.
        seed: of every random choice: the schedule, and the deviations of approximate functions.
        schedule: see ``Scheduler``.
        resident: how many CTAs are on the machine at a time, each with all its warps; later ones start as others end, in order.
        delay: when an asynchronous copy reads its source: "late", when it is waited for, or "early", when it is issued. Either way its
            destination may not be touched until then.
        approximate: "exact" rounds approximate functions correctly; "random" moves them within the error that the ISA states.
        unwritten: what a read of shared memory is that nothing was written to: an "error", or "nan", bytes of 0xFF, for kernels
            that compute on rows of a tile beyond the tensor and drop the result.
        observer: told of block entries and synchronisation; None costs nothing.
    """

    def __init__(
        self,
        arch: str = "sm_80",
        *,
        seed: int = 0,
        schedule: Schedule = "round_robin",
        resident: int = 4,
        delay: Literal["late", "early"] = "late",
        approximate: Literal["exact", "random"] = "exact",
        unwritten: Literal["error", "nan"] = "error",
        observer: Observer | None = None,
    ) -> None:
        if arch not in ARCHES:
            raise LaunchError(f"arch={arch!r}: must be one of {', '.join(ARCHES)}")
        if approximate not in ("exact", "random"):
            raise LaunchError(f"approximate={approximate!r}: must be exact or random")
        if delay not in ("late", "early"):
            raise LaunchError(f"delay={delay!r}: must be late or early")
        if unwritten not in ("error", "nan"):
            raise LaunchError(f"unwritten={unwritten!r}: must be error or nan")
        if resident < 1:
            raise LaunchError(f"resident={resident}: at least one CTA must be resident")
        Scheduler(schedule, seed)  # refuses a schedule that it does not know
        self.arch, self.seed, self.schedule, self.resident = arch, seed, schedule, resident
        self.approx_seed = 0 if approximate == "exact" else seed + 1
        self.early = delay == "early"
        self.blank = UNWRITTEN if unwritten == "error" else WRITTEN
        self.observer = observer
        self.memory = GlobalMemory()
        self.reports: list[Report] = []

    def register_buffer(self, address: int, data: int | Array, name: str, writable: bool = True) -> Array:
        """Make ``data`` global memory at ``address``; its bytes as a flat array that shares them.

        ``data`` is an array, contiguous, whose memory the kernel reads and writes, or a size: then new bytes of 0xFF (NaN in every
        floating-point type).

        Raises:
            LaunchError: it is not contiguous, overlaps another buffer, or lies in a generic window.
        """
        if isinstance(data, int):
            data = np.full(data, 0xFF, np.uint8)
        if not data.flags.c_contiguous:
            raise LaunchError(f"buffer {name!r} is not contiguous")
        flat = data.reshape(-1).view(np.uint8)
        self.memory.register(Buffer(address, flat, name, writable and bool(flat.flags.writeable)))
        return flat

    def remove_buffer(self, address: int) -> None:
        """Forget the buffer that begins at ``address``."""
        self.memory.remove(address)

    def launch(
        self,
        program: Program,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        dynamic_shared_bytes: int = 0,
        params: bytes | Sequence[bytes] = b"",
        cluster: Sequence[int] | None = None,
    ) -> Report:
        """Run a kernel to its end.

        ``params`` is the whole parameter block, or the bytes of each parameter, which are laid out as PTX does: in order, each aligned.

        Raises:
            LaunchError: geometry, shared memory or parameters do not fit.
            VgpuError: what is wrong with the kernel; its ``place`` says where.
        """
        if cluster is not None and tuple(cluster) != (1, 1, 1):
            raise LaunchError(f"cluster={tuple(cluster)}: clusters are not modelled yet")
        entry = program.kernel(kernel)
        key = kernel, ARCHES[self.arch][0]
        if key not in program.code:
            program.code[key] = Code(entry, watch(entry), ARCHES[self.arch][0])
        launch = self._launch(program.code[key], _dim3("grid", grid), _dim3("block", block), dynamic_shared_bytes, params)
        start = time.perf_counter()
        loaded = [v for v in entry.variables if v.space == "global"]
        for variable in loaded:
            self.memory.register(Buffer(variable.offset, np.frombuffer(bytearray(variable.data), np.uint8), variable.name, True))
        try:
            with np.errstate(all="ignore"):
                steps = self._run(launch)
        finally:
            for variable in loaded:
                self.memory.remove(variable.offset)
        report = replace(_report(launch, steps, time.perf_counter() - start), kernel=kernel, grid=launch.grid, block=launch.block)
        self.reports.append(report)
        return report

    def report(self) -> Report:
        """All launches so far together."""
        return replace(_total(self.reports), launches=tuple(self.reports))

    def _launch(self, code: Code, grid: Dim3, block: Dim3, dynamic: int, params: bytes | Sequence[bytes]) -> Launch:
        kernel = code.kernel
        base, limit = ARCHES[self.arch]
        threads = block[0] * block[1] * block[2]
        if threads > 1024 or (kernel.max_threads is not None and threads > kernel.max_threads):
            raise LaunchError(f"block={block}: {threads} threads, at most {min(1024, kernel.max_threads or 1024)} are allowed")
        if kernel.block is not None and block != kernel.block:
            raise LaunchError(f"block={block}: the kernel requires {kernel.block}")
        start = -(-(base + kernel.static_shared) // kernel.dynamic_align) * kernel.dynamic_align
        shared = (start if dynamic else base + kernel.static_shared) + dynamic
        if dynamic < 0 or shared - base > limit:
            raise LaunchError(f"dynamic_shared_bytes={dynamic}: {shared - base} bytes of shared memory, {self.arch} has {limit}")
        constant = max((v.offset + len(v.data) for v in kernel.variables if v.space == "const"), default=0)
        bank = np.zeros(constant, np.uint8)
        for v in kernel.variables:
            if v.space == "const":
                bank[v.offset : v.offset + len(v.data)] = np.frombuffer(v.data, np.uint8)
        constants = {
            "param": Block("parameter", np.frombuffer(parameter_block(kernel, params), np.uint8), tracked=False, writable=False),
            "const": Block("constant", bank, tracked=False, writable=False),
        }
        return Launch(
            code, grid, block, shared, dynamic, constants, self.memory, self.approx_seed, self.early, self.observer, blank=self.blank
        )

    def _run(self, launch: Launch) -> int:
        scheduler = Scheduler(self.schedule, self.seed)
        total = launch.grid[0] * launch.grid[1] * launch.grid[2]
        resident: list[Cta] = []
        ended: list[Cta] = []
        started = 0
        while resident or started < total:
            while started < total and len(resident) < self.resident:
                if ended:
                    ended[-1].restart(started)
                resident.append(ended.pop() if ended else Cta(launch, started))
                started += 1
            pick = scheduler.pick(resident)
            if pick is None:
                raise _deadlock(launch, resident)
            launch.ticks += 1
            _step(launch, pick)
            if not pick.cta.live:
                resident.remove(pick.cta)
                ended.append(pick.cta)
        return launch.ticks


def parameter_block(kernel: Kernel, params: bytes | Sequence[bytes]) -> bytes:
    """The bytes that the parameter space holds.

    Raises:
        LaunchError: their number or a size differs from what the kernel declares.
    """
    if isinstance(params, bytes):
        if len(params) < kernel.parameter_bytes:
            raise LaunchError(f"{len(params)} bytes of parameters, {kernel.name} has {kernel.parameter_bytes}")
        return params
    if len(params) != len(kernel.parameters):
        raise LaunchError(f"{len(params)} parameters, {kernel.name} has {len(kernel.parameters)}")
    block = bytearray(kernel.parameter_bytes)
    for parameter, data in zip(kernel.parameters, params, strict=True):
        if len(data) != parameter.size:
            raise LaunchError(f"{len(data)} bytes for parameter {parameter.name}, which has {parameter.size}")
        block[parameter.offset : parameter.offset + parameter.size] = data
    return bytes(block)


def _dim3(name: str, values: Sequence[int]) -> Dim3:
    x, y, z = (*values, 1, 1, 1)[:3]
    if not 1 <= len(values) <= 3 or min(x, y, z) < 1:
        raise LaunchError(f"{name}={tuple(values)}: must be one to three positive numbers")
    return int(x), int(y), int(z)


# Steps


def _step(launch: Launch, pick: Pick) -> None:
    """Execute one block by some warps, and move them on."""
    cta, first, last, index = pick
    warp = cta.warps[first]
    full = warp.full
    gang = cta.gang(first, last)
    code = launch.code
    compiled = code.blocks.get((index, full))
    if compiled is None:
        try:
            compiled = compile_block(code.kernel, code.watch, index, full, code.shared_base)
        except EmitError as error:
            place = _place(launch, gang, _op(code.kernel, index, error.position), None)
            raise UnsupportedInstructionError(error.message, place) from error
        code.blocks[index, full] = compiled
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
        if block.end is None or block.end.name in ("bar", "barrier"):
            for w in range(first, last):
                _move(launch, cta, cta.warps[w], index, {index + 1: cta.warps[w].at[index]})
            if block.end is not None:
                barrier.execute(gang, block.end, result)
        else:
            _jump(launch, gang, index, block.end, result)
    except FaultError as fault:
        position = _position(fault, compiled, len(block.ops))
        raise fault.error(fault.message, _place(launch, gang, _op(code.kernel, index, position), fault.lanes, mask)) from fault


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
        _move(launch, cta, warp, index, {target: warp.at[index]})


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
        for number in list(cta.barriers):
            barrier.release(cta, number)
        return
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


def _deadlock(launch: Launch, resident: Sequence[Cta]) -> DeadlockError:
    rows = []
    for cta in resident:
        for warp in cta.warps:
            if warp.state == EXITED:
                rows.append(f"CTA {cta.id} warp {warp.index}: exited")
                continue
            # A waiting warp has already been moved behind the barrier.
            op = _op(launch.kernel, warp.block - 1, len(launch.kernel.blocks[warp.block - 1].ops))
            where = "" if op is None else f" at PTX line {op.line}: {op.text}" + (f" ({op.source})" if op.source else "")
            rows.append(f"CTA {cta.id} warp {warp.index}: waits for {barrier.describe(cta, warp.waits_for)}{where}")
    return DeadlockError("no warp can run:\n  " + "\n  ".join(rows), Place(launch.kernel.name))


# Reports


def _report(launch: Launch, steps: int, seconds: float) -> Report:
    by_opcode: dict[str, int] = {}
    by_source: dict[str, int] = {}
    warps = np.zeros(-(-launch.threads // 32), np.int64)
    totals = dict(launch.bytes)
    for (index, full), counts in launch.counts.items():
        block = launch.kernel.blocks[index]
        ops = block.ops if block.end is None else (*block.ops, block.end)
        times = int(counts.sum())
        warps += counts * len(ops)
        for op in ops:
            by_opcode[op.opcode] = by_opcode.get(op.opcode, 0) + times
            by_source[op.source] = by_source.get(op.source, 0) + times
        for space, size in launch.code.blocks[index, full].bytes_per_warp.items():
            totals[space] = totals.get(space, 0) + size * times
    ctas = launch.grid[0] * launch.grid[1] * launch.grid[2]
    return _summary(by_opcode, by_source, warps.tolist(), totals, (ctas, steps, seconds))


def _summary(
    by_opcode: dict[str, int], by_source: dict[str, int], warps: list[int], totals: dict[str, int], rest: tuple[int, int, float]
) -> Report:
    by_class: dict[str, int] = {}
    for opcode, count in by_opcode.items():
        name = opcode.split(".")[0]
        by_class[name] = by_class.get(name, 0) + count
    return Report(sum(by_opcode.values()), by_opcode, by_class, tuple(warps), by_source, totals, *rest)


def _total(reports: Sequence[Report]) -> Report:
    by_opcode: dict[str, int] = {}
    by_source: dict[str, int] = {}
    totals: dict[str, int] = {}
    warps = [0] * max((len(r.by_warp) for r in reports), default=0)
    for r in reports:
        for mine, theirs in ((by_opcode, r.by_opcode), (by_source, r.by_source), (totals, r.bytes)):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count
        for i, count in enumerate(r.by_warp):
            warps[i] += count
    rest = sum(r.ctas for r in reports), sum(r.steps for r in reports), sum(r.seconds for r in reports)
    return _summary(by_opcode, by_source, warps, totals, rest)
