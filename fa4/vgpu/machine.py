"""The virtual GPU: launches of compiled kernels on registered host memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fa4.vgpu.capture import BufferImage, Capture
from fa4.vgpu.defined import Watch, watch
from fa4.vgpu.emit import Compiled
from fa4.vgpu.errors import LaunchError, Place, VgpuError
from fa4.vgpu.generate import How
from fa4.vgpu.global_hazards import GlobalOrder
from fa4.vgpu.grid import clusters_of, run_clusters
from fa4.vgpu.hazards import Sites
from fa4.vgpu.launch_control import cancels
from fa4.vgpu.memory import UNWRITTEN, WINDOW_SHIFT, WINDOWS, WRITTEN, Block, Buffer, GlobalMemory
from fa4.vgpu.observe import Observer
from fa4.vgpu.processes import check_processes, run_in_processes
from fa4.vgpu.program import Kernel, Program
from fa4.vgpu.report import Report, launch_report, total_report
from fa4.vgpu.scheduler import Schedule, Scheduler
from fa4.vgpu.state import Cta, Dim3, Warp
from fa4.vgpu.sums import Sums
from fa4.vgpu.tensor_map import TensorMap

Array = npt.NDArray[Any]
Data = bytes  # the name is a field below

Checks = Literal["basic", "hazards", "isa"]
CHECKS: tuple[str, ...] = get_args(Checks)
Execution = Literal["grouped", "plain"]
EXECUTIONS: tuple[str, ...] = get_args(Execution)

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
    how: How
    blocks: dict[tuple[int, bool], Compiled] = field(default_factory=dict)


@dataclass
class Launch:
    """One launch as the CTAs see it.

    ``progress`` counts whatever may let a waiting warp go on; ``expired`` are the places where warps waited since there was progress.
    ``waiting`` are the clusters that have not started, in order. ``on_park``, which an observer may set, is called when the end of a
    block (its number) leaves a warp waiting.
    """

    code: Code
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared_bytes: int
    dynamic_bytes: int
    constants: dict[str, Block]
    memory: GlobalMemory
    approx_seed: int
    early: bool
    observer: Observer | None
    scheduler: Scheduler
    resident: int
    explicit_cluster: bool = False
    ticks: int = 0
    progress: int = 0
    maps: dict[bytes, TensorMap] = field(default_factory=dict)
    expired: set[tuple[Any, ...]] = field(default_factory=set)
    bytes: dict[str, int] = field(default_factory=dict)
    counts: dict[tuple[int, bool], Array] = field(default_factory=dict)
    blank: int = UNWRITTEN
    checks: str = "basic"
    order: GlobalOrder = field(default_factory=GlobalOrder)
    sums: Sums | None = None
    waiting: deque[int] = field(default_factory=deque)
    on_park: Callable[[Cta, Warp, int], None] | None = None

    @property
    def kernel(self) -> Kernel:
        """The kernel that runs."""
        return self.code.kernel

    @property
    def watch(self) -> Watch:
        """Its registers that may be read before they are written."""
        return self.code.watch

    @property
    def clustered(self) -> bool:
        """Whether shared addresses say which CTA of a cluster they lie in."""
        return self.code.how.clustered

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.block[0] * self.block[1] * self.block[2]

    def read(self, address: int, size: int) -> Data:
        """Bytes at a generic address in global, constant or parameter memory.

        Raises:
            FaultError: it lies elsewhere, or they leave their buffer.
        """
        for space in ("param", "const"):
            if address >> WINDOW_SHIFT == WINDOWS[space] >> WINDOW_SHIFT:
                block = self.constants[space]
                return block.data[block.stretch(address - WINDOWS[space], size)].tobytes()
        buffer = self.memory.find(address, size)
        if buffer is None:
            raise self.memory.outside(np.array([address], np.uint64), size, None)
        if self.memory.sharing is not None:
            self.memory.sharing.box(buffer, address, (size,), (1,), write=False)
        return buffer.data[address - buffer.address : address - buffer.address + size].tobytes()

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
            "%cluster_nctarank": self.cluster[0] * self.cluster[1] * self.cluster[2],
            "%is_explicit_cluster": self.explicit_cluster,
        }
        for i, axis in enumerate("xyz"):
            values[f"%ntid.{axis}"] = self.block[i]
            values[f"%ctaid.{axis}"] = values[f"%clusterid.{axis}"] = values[f"%cluster_ctaid.{axis}"] = 0
            values[f"%nctaid.{axis}"] = self.grid[i]
            values[f"%nclusterid.{axis}"] = self.grid[i] // self.cluster[i]
            values[f"%cluster_nctaid.{axis}"] = self.cluster[i]
        return {name: np.atleast_1d(np.asarray(value, np.int64)).astype(np.uint32) for name, value in values.items()}


class Gpu:
    """A virtual GPU.

    Args:
        arch: "sm_80" and so on; decides how much shared memory there is and where it begins.
        seed: of every random choice: the schedule, and the deviations of approximate functions.
        schedule: see ``Scheduler``.
        resident: how many CTAs are on the machine at a time, each with all its warps; later ones start as others end, in order. CTAs of a
            cluster start and end together, and one cluster is always resident.
        delay: when asynchronous operations happen: "late", when nothing else can happen or when they are drawn by the schedule, or
            "early", when they are issued (a cp.async then reads its source; its destination may still not be touched before the wait).
        approximate: "exact" rounds approximate functions correctly; "random" moves them within the error that the ISA states.
        unwritten: what a read of shared memory or of a register is that nothing was written to: an "error", or "nan", bytes of 0xFF, for
            kernels that compute on rows of a tile beyond the tensor and drop the result. Predicates are always an error.
        checks: "basic"; "hazards", also whether accesses of shared and tensor memory are ordered, see ``fa4.vgpu.hazards``; or "isa", also
            rules of the ISA on which GPUs are not known to insist.
        processes: how many processes share the clusters of a grid, see ``fa4.vgpu.processes``: results and reports are those of one. With
            an observer, recorded sums or a scheduler of its own there is only one, and where clusters cancel the launch of others.
        execution: "plain", instruction by instruction; or "grouped", faster: instructions of a basic block that do the same to different
            registers are executed as one. Results, reports and errors are the same, bit by bit.

    Attributes:
        observer: told of launches, block entries and synchronisation, see ``fa4.vgpu.observe``; None, as at first, costs nothing.
        scheduler: what decides instead of ``schedule`` and ``seed``; see ``fa4.vgpu.choices``.
        captures: where this is a list, every launch is added to it, see ``fa4.vgpu.capture``.
        sums: where this is a list, the order of every launch's additions is added to it, see ``fa4.vgpu.sums``.
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
        checks: Checks = "basic",
        processes: int = 1,
        execution: Execution = "grouped",
    ) -> None:
        if arch not in ARCHES:
            raise LaunchError(f"arch={arch!r}: must be one of {', '.join(ARCHES)}")
        if approximate not in ("exact", "random"):
            raise LaunchError(f"approximate={approximate!r}: must be exact or random")
        if delay not in ("late", "early"):
            raise LaunchError(f"delay={delay!r}: must be late or early")
        if unwritten not in ("error", "nan"):
            raise LaunchError(f"unwritten={unwritten!r}: must be error or nan")
        if checks not in CHECKS:
            raise LaunchError(f"checks={checks!r}: must be one of {', '.join(CHECKS)}")
        if resident < 1:
            raise LaunchError(f"resident={resident}: at least one CTA must be resident")
        if execution not in EXECUTIONS:
            raise LaunchError(f"execution={execution!r}: must be one of {', '.join(EXECUTIONS)}")
        check_processes(processes)
        Scheduler(schedule, seed)  # refuses a schedule that it does not know
        self.arch, self.seed, self.schedule, self.resident, self.processes = arch, seed, schedule, resident, processes
        self.approx_seed = 0 if approximate == "exact" else seed + 1
        self.early = delay == "early"
        self.blank = UNWRITTEN if unwritten == "error" else WRITTEN
        self.checks, self.execution = checks, execution
        self.observer: Observer | None = None
        self.scheduler: Scheduler | None = None
        self.memory = GlobalMemory()
        self.reports: list[Report] = []
        self.captures: list[Capture] | None = None
        self.sums: list[Sums] | None = None

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

        ``grid`` and ``block`` in CTAs and threads, ``cluster`` in CTAs (None: no clusters).

        ``params`` is the whole parameter block, or the bytes of each parameter, which are laid out as PTX does: in order, each aligned.

        Raises:
            LaunchError: geometry, shared memory or parameters do not fit.
            SharedGlobalError: clusters communicate through global memory, and there are several processes.
            WorkerError: one of several processes was killed.
            VgpuError: what is wrong with the kernel; its ``place`` says where.
        """
        entry = program.kernel(kernel)
        size = _dim3("cluster", cluster or (1, 1, 1))
        clustered = size != (1, 1, 1)
        seen = self.observer is not None and not getattr(self.observer, "blocks_only", False)
        base, grouped = ARCHES[self.arch][0], self.execution == "grouped"
        key = kernel, base, clustered, self.checks != "basic", seen, grouped
        if key not in program.code:
            sites = Sites(entry) if self.checks != "basic" else None
            program.code[key] = Code(entry, watch(entry), How(base, clustered, sites, seen, grouped))
        launch = self._launch(program.code[key], (_dim3("grid", grid), _dim3("block", block), size), dynamic_shared_bytes, params)
        launch.explicit_cluster = cluster is not None
        if self.captures is not None:
            self.captures.append(self._capture(program, kernel, launch, params))
        if self.sums is not None:
            launch.sums = Sums(kernel)
            self.sums.append(launch.sums)
        if self.observer is not None:
            self.observer.launch(launch, program)
        start = time.perf_counter()
        loaded = [v for v in entry.variables if v.space == "global"]
        for variable in loaded:
            self.memory.register(Buffer(variable.offset, np.frombuffer(bytearray(variable.data), np.uint8), variable.name, True))
        try:
            with np.errstate(all="ignore"):
                watched = self.observer is not None or self.scheduler is not None or self.sums is not None
                alone = self.processes == 1 or clusters_of(launch) == 1 or watched or cancels(entry)
                if alone:
                    run_clusters(launch, range(clusters_of(launch)))
                else:
                    run_in_processes(launch, self.processes)
        except VgpuError as error:
            error.place = replace(error.place or Place(kernel), run=self._how())
            raise
        finally:
            for variable in loaded:
                self.memory.remove(variable.offset)
        if launch.sums is not None:
            launch.sums.finish(self.memory)
        report = launch_report(launch, time.perf_counter() - start)
        report = replace(report, kernel=kernel, grid=launch.grid, block=launch.block)
        self.reports.append(report)
        return report

    def _how(self) -> str:
        """What repeats a run that is not in the default schedule."""
        if self.schedule == "round_robin" or self.scheduler is not None:
            return ""
        options: dict[str, Any] = {"schedule": self.schedule, "seed": self.seed}
        defaults = {"resident": (self.resident, 4), "delay": ("early" if self.early else "late", "late"), "checks": (self.checks, "basic")}
        options |= {name: value for name, (value, default) in defaults.items() if value != default}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())

    def report(self) -> Report:
        """All launches so far together."""
        return replace(total_report(self.reports), launches=tuple(self.reports))

    def _capture(self, program: Program, kernel: str, launch: Launch, params: bytes | Sequence[bytes]) -> Capture:
        buffers = tuple(BufferImage(b.address, b.data.tobytes(), b.name, b.writable) for b in self.memory.buffers)
        unwritten = "nan" if self.blank == WRITTEN else "error"
        cluster = launch.cluster if launch.explicit_cluster else None
        values = params if isinstance(params, bytes) else tuple(params)
        geometry = launch.grid, launch.block, cluster, launch.dynamic_bytes
        return Capture(program.text, kernel, self.arch, *geometry, values, buffers, unwritten)

    def _launch(self, code: Code, geometry: tuple[Dim3, Dim3, Dim3], dynamic: int, params: bytes | Sequence[bytes]) -> Launch:
        kernel = code.kernel
        grid, block, cluster = geometry
        _check_cluster(self.arch, kernel, grid, cluster)
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
        scheduler = self.scheduler or Scheduler(self.schedule, self.seed)
        options = self.memory, self.approx_seed, self.early, self.observer, scheduler, self.resident
        return Launch(code, grid, block, cluster, shared, dynamic, constants, *options, blank=self.blank, checks=self.checks)


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


def _check_cluster(arch: str, kernel: Kernel, grid: Dim3, cluster: Dim3) -> None:
    """A cluster must fit the machine, the grid and what the kernel requires."""
    ctas = cluster[0] * cluster[1] * cluster[2]
    if ctas > 1 and ARCHES[arch][0] == 0:
        raise LaunchError(f"cluster={cluster}: {arch} has no clusters")
    if ctas > 16:
        raise LaunchError(f"cluster={cluster}: {ctas} CTAs, at most 16 are allowed")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise LaunchError(f"cluster={cluster}: the grid {grid} is not a multiple of it")
    if kernel.cluster is not None and cluster != kernel.cluster:
        raise LaunchError(f"cluster={cluster}: the kernel requires {kernel.cluster}")
