"""The clusters of a grid, dealt to several processes: an answer like that of one process, or an error.

Processes are made by fork, so that they begin with everything that the launch needs. Each writes to its own copy of global memory; what it
wrote is put together when all are done. That is right only for clusters that do not communicate. Kernels that do so by their text are
refused before they start; ``fa4.vgpu.sharing`` finds the others. Where anything goes wrong the launch is done again in one process, which
watches all clusters: its error is the one that is raised, whatever the number of processes was. Device memory is then as before the launch.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe, wait
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from fa4.vgpu.emit import EmitError
from fa4.vgpu.errors import LaunchError, Place, SharedGlobalError, VgpuError, WorkerError
from fa4.vgpu.grid import clusters_of, run_clusters
from fa4.vgpu.program import Kernel, Op
from fa4.vgpu.sharing import REMEDY, Sharing, conflict
from fa4.vgpu.step import generate

if TYPE_CHECKING:
    from fa4.vgpu.machine import Launch

Array = npt.NDArray[Any]

_STRONG = frozenset(("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"))

_LOOK_SECONDS = 1.0
"""How often processes that still run are looked at: one may wait, by plain loads, for what another wrote to its own copy."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Answer(NamedTuple):
    """What a process did: steps, executions of blocks and bytes moved as in ``Launch``, and of each buffer the bytes that it wrote."""

    steps: int
    counts: dict[tuple[int, bool], Array]
    moved: dict[str, int]
    written: list[bytes]


def check_processes(processes: int) -> None:
    """Whether there can be so many.

    Raises:
        LaunchError: it is no positive number, or the system is not Linux and it is more than 1.
    """
    if type(processes) is not int or processes < 1:
        raise LaunchError(f"processes={processes!r}: must be a whole number, at least 1")
    if processes > 1 and sys.platform != "linux":
        raise LaunchError(f"processes={processes}: several processes are made as Linux does, this is {sys.platform}; use processes=1")


def communicating(kernel: Kernel) -> Op | None:
    """The first instruction by which CTAs communicate through global memory: atomics, reductions, and loads and stores that are not weak.

    Generic addresses say nothing here.
    """
    for block in kernel.blocks:
        for op in block.ops if block.end is None else (*block.ops, block.end):
            if "global" in op.mods:
                strong = op.name in ("ld", "st") and not _STRONG.isdisjoint(op.mods)
                if strong or op.name in ("atom", "red") or op.mods[:2] == ("reduce", "async"):
                    return op
    return None


def dealt(clusters: int, processes: int) -> list[list[int]]:
    """The clusters of each process: forth and back, so that neither a trend nor an alternation of sizes gives one of them more."""
    shares: list[list[int]] = [[] for _ in range(min(clusters, processes))]
    for cluster in range(clusters):
        turn, place = divmod(cluster, len(shares))
        shares[-1 - place if turn % 2 else place].append(cluster)
    return shares


def run_in_processes(launch: Launch, processes: int) -> None:
    """Run all clusters of a launch.

    Raises:
        SharedGlobalError: clusters communicate through global memory.
        WorkerError: a process was killed.
        VgpuError: what is wrong with the kernel; its ``place`` says where.
    """
    op = communicating(launch.kernel)
    if op is not None:
        place = Place(launch.kernel.name, ptx_line=op.line, ptx_text=op.text, source=op.source)
        raise SharedGlobalError(f"{op.opcode} communicates through global memory; {REMEDY}", place)
    _generate_all(launch)
    clusters = clusters_of(launch)
    shares = dealt(clusters, processes)
    done, problem = _run(launch, shares)
    if problem is not None:
        done, problem = _run(launch, [list(range(clusters))])
    if problem is not None:
        raise problem
    for worker, answer in done:
        launch.ticks += answer.steps
        for key, counts in answer.counts.items():
            launch.counts[key] = launch.counts[key] + counts if key in launch.counts else counts
            if key not in launch.code.blocks:
                generate(launch.code, *key)
        for space, size in answer.moved.items():
            launch.bytes[space] = launch.bytes.get(space, 0) + size
        for buffer, data in zip(worker.buffers, answer.written, strict=True):
            buffer.data[worker.written(buffer)] = np.frombuffer(data, np.uint8)


def _generate_all(launch: Launch) -> None:
    """Generate code once, and not in every process; what full warps cannot execute may never be reached."""
    for block in launch.kernel.blocks:
        if (block.index, True) not in launch.code.blocks:
            with suppress(EmitError):
                generate(launch.code, block.index, True)


class _Worker:
    """A process that runs some clusters."""

    def __init__(self, launch: Launch, share: Sequence[int]) -> None:
        self.share = share
        self.sharing = Sharing(launch.memory.buffers, clusters_of(launch))
        self.pid = 0  # while there is none
        self.answers, self.pipe = Pipe(duplex=False)

    def start(self, launch: Launch) -> None:
        """Make the process.

        Raises:
            WorkerError: the system has no room for it.
        """
        prctl, parent = ctypes.CDLL(None).prctl, os.getpid()
        # A handler of the parent that raised in the child would carry it back to where the parent was.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                # From Python 3.12 on a fork warns where there are threads. They do not exist in the child, which needs none of their locks.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.pid = os.fork()
            if not self.pid:
                _be_worker(launch, self, lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0 and os.getppid() == parent)
        except OSError as error:
            raise WorkerError(f"no process could be made: {error}; use processes=1") from error
        finally:
            self.pipe.close()  # so that the answers end when the child does
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def answer(self) -> Answer | VgpuError:
        """What it sends.

        Raises:
            WorkerError: it ended before.
        """
        try:
            found: Answer | VgpuError = self.answers.recv()
        except (EOFError, OSError):
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.pid = 0
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            first = ", ".join(map(str, self.share[:4])) + (", ..." if len(self.share) > 4 else "")
            remedy = "nothing was written; if memory is short, use processes=1"
            raise WorkerError(f"the process that ran clusters {first} {how}; {remedy}") from None
        return found

    def end(self) -> None:
        """Let it be gone."""
        self.answers.close()
        self.pipe.close()
        if self.pid:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)


def _run(launch: Launch, shares: Sequence[Sequence[int]]) -> tuple[list[tuple[Sharing, Answer]], VgpuError | None]:
    """A process for each share: what they did, or a problem that one had.

    Raises:
        WorkerError: one was killed.
    """
    workers: list[_Worker] = []
    try:
        for share in shares:
            workers.append(_Worker(launch, share))  # known before it is started, so that nothing can leave it behind
            workers[-1].start(launch)
        running: dict[Any, _Worker] = {worker.answers: worker for worker in workers}
        done: list[tuple[Sharing, Answer]] = []
        while running:
            ready = wait(list(running), _LOOK_SECONDS)
            for connection in ready:
                worker = running.pop(connection)
                answer = worker.answer()
                if isinstance(answer, VgpuError):
                    return [], answer
                done.append((worker.sharing, answer))
            if not ready or not running:
                problem = conflict([worker.sharing for worker in workers])
                if problem is not None:
                    return [], problem
        return done, None
    finally:
        for worker in workers:
            worker.end()


def _be_worker(launch: Launch, worker: _Worker, safe: Callable[[], bool]) -> NoReturn:
    """The life of a process: it never returns to what its parent was doing."""
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # the parent tells of an interrupt
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if safe():
            gc.freeze()  # what the parent left is not this process's to collect
            worker.pipe.send(_work(launch, worker))
            status = 0
    finally:
        os._exit(status)


def _work(launch: Launch, worker: _Worker) -> Answer | VgpuError:
    launch.memory.sharing = sharing = worker.sharing
    try:
        run_clusters(launch, worker.share)
    except VgpuError as error:
        return error
    except Exception:
        return WorkerError(f"a process failed:\n{traceback.format_exc()}")
    written = [buffer.data[sharing.written(buffer)].tobytes() for buffer in sharing.buffers]
    return Answer(launch.ticks, launch.counts, launch.bytes, written)
