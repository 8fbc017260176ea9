# ruff: noqa: E501 -- kernels in one line
"""Grids in several processes: the answers of one, or an error that says why there is none."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forward_call import Options, attention
from ptx_text import A, B, C, kernel, run

from fa4.testing import AttentionShape, make_inputs
from fa4.vgpu import Gpu, LaunchError, OutOfBoundsError, Program, SharedGlobalError, VgpuError, WorkerError, processes
from fa4.vgpu.processes import dealt

MINE = "mov.u32 %r9, %ctaid.x;\nmad.wide.u32 %d12, %r9, 128, %d12;\nmad.wide.u32 %d11, %r9, 128, %d11;\n"
"""The thread's own element of the first two buffers, where a CTA has 32 threads."""

SQUARE = MINE + "ld.global.u32 %r1, [%d11];\nmad.lo.u32 %r1, %r1, %r1, %r9;\nst.global.u32 [%d12], %r1;"


def children() -> set[int]:
    """Processes that this one made and that are still there."""
    return set(map(int, Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()))


def alive(pid: int) -> bool:
    """Whether a process is there and is more than its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture(autouse=True)
def no_orphans():
    before = children()
    yield
    assert children() == before


def counts(report):
    return replace(report, seconds=0.0)


def both(body, **options):
    """Run a body in one process and in two: the error, or buffers and report, each time."""
    answers = []
    for number in (1, 2):
        gpu = Gpu(
            options.get("arch", "sm_80"),
            processes=number,
            checks=options.get("checks", "basic"),
            schedule=options.get("schedule", "round_robin"),
        )
        arrays = [np.arange(4096, dtype=np.uint32) for _ in range(3)]
        run(body, gpu=gpu, arrays=arrays, grid=options.get("grid", 8), shared=options.get("shared", 0), cluster=options.get("cluster"))
        answers.append((arrays, counts(gpu.reports[0])))
    return answers


@pytest.mark.parametrize("schedule", ["round_robin", "random", "priority"])
def test_results_and_reports_are_those_of_one_process(schedule):
    (one, first), (two, second) = both(SQUARE, grid=9, schedule=schedule)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert np.array_equal(one[1][: 9 * 32], np.arange(9 * 32) ** 2 + np.repeat(np.arange(9), 32))
    assert first == second
    assert first.ctas == 9


def test_more_processes_than_clusters_and_a_grid_of_one():
    for grid in (1, 2):
        gpu = Gpu(processes=5)
        arrays = run(SQUARE, gpu=gpu, grid=grid)
        assert np.array_equal(arrays[1][: grid * 32], np.repeat(np.arange(grid), 32))


def test_bytes_of_one_word_may_belong_to_several_clusters():
    """Neighbouring bytes are no conflict; and with 300 clusters their numbers take two bytes."""
    body = "setp.eq.u32 %p1, %r0, 0;\nmov.u32 %r9, %ctaid.x;\ncvt.u64.u32 %d3, %r9;\nadd.u64 %d3, %d1, %d3;\n@%p1 st.global.u8 [%d3], %r9;"
    (one, first), (two, second) = both(body, grid=300)
    assert np.array_equal(one[1], two[1])
    assert np.array_equal(two[1].view(np.uint8)[:300], np.arange(300).astype(np.uint8))
    assert first == second


def test_each_process_gets_clusters_of_both_kinds():
    assert dealt(9, 2) == [[0, 3, 4, 7, 8], [1, 2, 5, 6]]
    assert dealt(8, 3) == [[0, 5, 6], [1, 4, 7], [2, 3]]
    assert dealt(2, 4) == [[0], [1]]
    for size in ([1, 3] * 8, list(range(16))):
        first, second = (sum(size[i] for i in share) for share in dealt(16, 2))
        assert first == second


# Schedules


def wandering(clusters_alone):
    """What an observer sees of each CTA: its blocks in order."""

    class Recorder:
        def __init__(self):
            self.seen = {}

        def launch(self, *_):
            pass

        def block(self, cta, warp, block, lanes):
            self.seen.setdefault(cta, []).append((warp, block, lanes))

        def event(self, cta, warp, op, lanes, values):
            self.seen.setdefault(cta, []).append((warp, op, lanes))

    recorder = Recorder()
    gpu = Gpu(schedule=clusters_alone[0], seed=3, resident=clusters_alone[1])
    gpu.observer = recorder
    body = "bar.sync 0;\nsetp.lt.u32 %p1, %r0, 64;\n@%p1 bra L;\nadd.u32 %r1, %r0, 1;\nbar.arrive 1, 128;\nbra M;\nL:\nbar.sync 1, 128;\nM:\nst.global.u32 [%d12], %r0;"
    run(body, threads=128, grid=6, gpu=gpu)
    return recorder.seen


@pytest.mark.parametrize("schedule", ["round_robin", "random", "priority"])
def test_the_order_inside_a_cluster_is_its_own(schedule):
    """The same whatever else is resident: this makes results independent of the number of processes."""
    alone, together = wandering((schedule, 1)), wandering((schedule, 4))
    assert alone == together
    different = {str(steps) for steps in together.values()}
    assert (len(different) > 1) == (schedule != "round_robin"), "every cluster draws for itself"


@pytest.mark.compile
@pytest.mark.vgpu
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_forward(arch):
    inputs = make_inputs(AttentionShape(1, 140, 70, 2, 1, 64))
    for schedule, checks in (("round_robin", "hazards"), ("priority", "basic")):
        one, two = (Gpu(arch, schedule=schedule, checks=checks, seed=4, processes=number) for number in (1, 2))
        first, second = (attention(gpu, inputs.q, inputs.k, inputs.v, Options(causal=True)) for gpu in (one, two))
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, second, strict=True))
        assert [counts(report) for report in one.reports] == [counts(report) for report in two.reports]
        assert one.reports[0].ctas > 1


# Refusals by the text, each with a twin that does the same without telling others

ALONE = MINE + "mov.u32 %r1, 7;\n"
TEXT = [
    ("atom.global.add.u32 %r2, [%d12], %r1;", "ld.global.u32 %r2, [%d12];\nadd.u32 %r2, %r2, %r1;\nst.global.u32 [%d12], %r2;"),
    ("red.global.add.u32 [%d12], %r1;", "ld.global.u32 %r2, [%d12];\nadd.u32 %r2, %r2, %r1;\nst.global.u32 [%d12], %r2;"),
    ("ld.acquire.gpu.global.u32 %r2, [%d12];", "ld.global.u32 %r2, [%d12];"),
    ("ld.volatile.global.u32 %r2, [%d12];", "ld.global.u32 %r2, [%d12];"),
    ("ld.relaxed.gpu.global.u32 %r2, [%d12];", "ld.global.nc.u32 %r2, [%d11];"),
    ("st.release.gpu.global.u32 [%d12], %r1;", "st.global.u32 [%d12], %r1;"),
    ("st.volatile.global.u32 [%d12], %r1;", "st.volatile.shared.u32 [%r10], %r1;"),
    ("atom.global.add.u32 %r2, [%d12], %r1;", "atom.shared.add.u32 %r2, [%r10], %r1;"),
]


@pytest.mark.parametrize(("loud", "quiet"), TEXT)
def test_communication_that_the_text_shows_is_refused(loud, quiet):
    prepare = ALONE + "shl.b32 %r10, %r0, 2;\nst.shared.u32 [%r10], %r1;\n"
    arrays = [np.arange(4096, dtype=np.uint32) for _ in range(3)]
    with pytest.raises(SharedGlobalError, match=r"communicates through global memory; .* use processes=1") as caught:
        run(prepare + loud, gpu=Gpu(processes=2), grid=4, shared=128, arrays=arrays)
    assert caught.value.place.ptx_text == loud
    assert all(np.array_equal(array, np.arange(4096)) for array in arrays), "before any work"
    (one, first), (two, second) = both(prepare + quiet, grid=4, shared=128)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert first == second


BULK = """
.shared .align 128 .b8 tile[128];
shl.b32 %r10, %r0, 2;
mov.u32 %r11, tile;
add.u32 %r10, %r10, %r11;
st.shared.u32 [%r10], %r0;
fence.proxy.async;
bar.sync 0;
setp.eq.u32 %p1, %r0, 0;
@%p1 STORE;
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group 0;
"""
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%d12], [%r11], 128"
REDUCE = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d12], [%r11], 128"


def test_bulk_reductions_are_refused_and_bulk_stores_are_not():
    with pytest.raises(SharedGlobalError, match=r"cp\.reduce\.async\.bulk") as caught:
        both(MINE + BULK.replace("STORE", REDUCE), arch="sm_90a")
    assert REDUCE in caught.value.place.ptx_text
    (one, first), (two, second) = both(MINE + BULK.replace("STORE", STORE), arch="sm_90a")
    assert np.array_equal(one[1], two[1])
    assert np.array_equal(two[1][:256], np.tile(np.arange(32), 8))
    assert first == second


def test_the_source_line_is_named():
    text = kernel(".loc 1 10 0\natom.global.add.u32 %r2, [%d12], %r0;").replace(".visible", '.file 1 "some.py"\n.visible')
    gpu = Gpu(processes=2)
    with pytest.raises(SharedGlobalError, match=r"some.py:10"):
        gpu.launch(Program.parse(text), "k", (2,), (32,), 0, [bytes(8)] * 3)


# Refusals at run time

NEIGHBOUR = (
    "mov.u32 %r9, %ctaid.x;\nmul.lo.u32 %r8, %r9, STRIDE;\ncvt.u64.u32 %d3, %r8;\nadd.u64 %d12, %d12, %d3;\nadd.u64 %d11, %d11, %d3;\n"
)
RUNTIME = {
    "two write": ("st.global.u32 [%d12], %r9;", "is written by cluster 2, and cluster 1 wrote it"),
    "one writes, another reads": ("ld.global.u32 %r1, [%d12+FAR];\nst.global.u32 [%d12], %r1;", "it; clusters that communicate"),
    "a generic atomic": ("cvta.global.u64 %d4, %d1;\natom.add.u32 %r2, [%d4], %r9;", "offset 0x0 of buffer 'b' is"),
    "cp.async": (
        "shl.b32 %r10, %r0, 4;\nmad.wide.u32 %d5, %r0, 12, %d11;\ncp.async.cg.shared.global [%r10], [%d5+FAR], 16;\ncp.async.wait_all;\nld.shared.u32 %r1, [%r10];\nst.global.u32 [%d11], %r1;",
        "of buffer 'a' is",
    ),
    "cp.async of a part": (
        "shl.b32 %r10, %r0, 4;\nmad.wide.u32 %d5, %r0, 12, %d11;\ncp.async.cg.shared.global [%r10], [%d5+FAR], 16, 8;\ncp.async.wait_all;\nld.shared.u32 %r1, [%r10];\nst.global.u32 [%d11], %r1;",
        "of buffer 'a' is",
    ),
}


@pytest.mark.parametrize("name", RUNTIME)
def test_communication_that_shows_at_run_time_is_refused(name):
    """Whichever clusters share a process: the error, and where it is, are the same. The twin is a grid whose parts lie apart."""
    body, message = RUNTIME[name]
    errors = []
    for count in (2, 3):
        gpu = Gpu(processes=count)
        arrays = [np.arange(4096, dtype=np.uint32) for _ in range(3)]
        with pytest.raises(SharedGlobalError, match=message) as caught:
            run(NEIGHBOUR.replace("STRIDE", "64") + body.replace("FAR", "64"), gpu=gpu, grid=6, shared=512, arrays=arrays)
        assert caught.value.place.cta is not None
        assert caught.value.place.ptx_text in body.replace("FAR", "64").splitlines()
        assert all(np.array_equal(array, np.arange(4096)) for array in arrays), "memory is as before"
        assert not gpu.reports
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("name", [name for name in RUNTIME if name != "a generic atomic"])
def test_clusters_that_keep_apart_are_not_refused(name):
    body = NEIGHBOUR.replace("STRIDE", "2048") + RUNTIME[name][0].replace("FAR", "64")
    (one, first), (two, second) = both(body, grid=6, shared=512)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert first == second


def test_ctas_of_one_cluster_may_share_bytes():
    body = "mov.u32 %r9, %ctaid.x;\nshr.u32 %r9, %r9, 1;\nmad.wide.u32 %d12, %r9, 128, %d12;\nst.global.u32 [%d12], %r9;"
    (one, first), (two, second) = both(body, grid=8, cluster=(2,), arch="sm_90a")
    assert np.array_equal(one[1], two[1])
    assert first == second
    with pytest.raises(SharedGlobalError):
        both(body, grid=8, arch="sm_90a")


def test_bulk_stores_to_the_same_bytes_are_refused():
    together = BULK.replace("STORE", STORE)
    with pytest.raises(SharedGlobalError, match="cluster 2, and cluster 1 wrote it") as caught:
        both(together, arch="sm_90a")
    assert STORE in caught.value.place.ptx_text


def test_a_wait_for_what_another_process_writes_ends(monkeypatch):
    """By plain loads, so that the text does not show it: the writer's bytes never reach the copy that the other one reads."""
    monkeypatch.setattr(processes, "_LOOK_SECONDS", 0.05)
    body = """
    mov.u32 %r9, %ctaid.x;
    setp.eq.u32 %p1, %r9, 0;
    @%p1 bra WRITE;
    SPIN:
    ld.global.u32 %r1, [%d1];
    setp.ne.u32 %p2, %r1, 4321;
    @%p2 bra SPIN;
    bra DONE;
    WRITE:
    mov.u32 %r1, 4321;
    st.global.u32 [%d1], %r1;
    DONE:
    """
    with pytest.raises(SharedGlobalError, match="offset 0x0 of buffer 'b'") as caught:
        run(body, gpu=Gpu(processes=2), grid=2)
    assert "global.u32" in caught.value.place.ptx_text
    assert (run(body, grid=2)[1] == 4321).sum() == 1


def test_buffers_that_nobody_may_write_are_read_by_all():
    body = MINE + "ld.global.u32 %r1, [%d0];\nst.global.u32 [%d12], %r1;"
    answers = []
    for number in (1, 2):
        gpu = Gpu(processes=number)
        out = gpu.register_buffer(B, 4096, "b")
        gpu.register_buffer(A, np.arange(64), "a", writable=False)
        gpu.launch(Program.parse(kernel(body)), "k", (6,), (32,), 0, [struct.pack("<Q", a) for a in (A, B, C)])
        answers.append(out)
    assert np.array_equal(*answers)


# Errors


FAULTS = [
    ("setp.gt.u32 %p1, %r9, 4;\n@%p1 st.global.u32 [%d12+65536], %r0;", OutOfBoundsError),
    ("setp.gt.u32 %p1, %r9, 1;\n@%p1 trap;", VgpuError),
    ("setp.eq.u32 %p1, %r9, 3;\n@%p1 bar.sync 1, 64;", VgpuError),
    ("add.cc.u32 %r1, %r1, %r1;", VgpuError),
]


@pytest.mark.parametrize("number", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(("body", "kind"), FAULTS)
def test_errors_are_those_of_one_process(body, kind, number):
    found = []
    for count in (1, number):
        with pytest.raises(kind) as caught:
            run(MINE + body, gpu=Gpu(processes=count), grid=8)
        found.append((type(caught.value), str(caught.value), caught.value.place))
    assert found[0] == found[1]


def test_hazards_inside_a_cluster_are_found_in_every_process():
    body = "shl.b32 %r10, %r0, 2;\nst.shared.u32 [%r10], %r0;\nxor.b32 %r11, %r10, 128;\nSYNC\nld.shared.u32 %r1, [%r11];\nmov.u32 %r9, %ctaid.x;\nmad.wide.u32 %d12, %r9, 256, %d12;\nst.global.u32 [%d12], %r1;"
    found = []
    for number in (1, 2):
        with pytest.raises(VgpuError) as caught:
            run(body.replace("SYNC", ""), threads=64, shared=256, grid=4, gpu=Gpu(checks="hazards", processes=number))
        found.append(str(caught.value))
        clean = run(body.replace("SYNC", "bar.sync 0;"), threads=64, shared=256, grid=4, gpu=Gpu(checks="hazards", processes=number))
        assert clean[1][:64].tolist() == [*range(32, 64), *range(32)]
    assert found[0] == found[1]
    assert "DataRaceError" in repr(caught.value)


def test_a_process_that_is_killed(monkeypatch):
    original = processes._work

    def work(launch, worker):
        if 1 in worker.share:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(launch, worker)

    monkeypatch.setattr(processes, "_work", work)
    arrays = [np.arange(4096, dtype=np.uint32) for _ in range(3)]
    with pytest.raises(WorkerError, match=r"the process that ran clusters 1, 2, 5, 6 was killed by SIGKILL; nothing was written"):
        run(SQUARE, gpu=Gpu(processes=2), grid=8, arrays=arrays)
    assert all(np.array_equal(array, np.arange(4096)) for array in arrays)


def test_a_process_that_fails(monkeypatch):
    def work(launch, worker):
        raise SystemExit(3)

    monkeypatch.setattr(processes, "_work", work)
    with pytest.raises(WorkerError, match="ended with status 1"):
        run(SQUARE, gpu=Gpu(processes=2), grid=8)
    monkeypatch.undo()
    monkeypatch.setattr(processes, "run_clusters", lambda *_: 1 // 0)
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        run(SQUARE, gpu=Gpu(processes=2), grid=8)


def test_a_process_that_cannot_be_made(monkeypatch):
    real, made = os.fork, []

    def fork():
        if made:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        made.append(real())
        return made[-1]

    monkeypatch.setattr(os, "fork", fork)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(WorkerError, match=r"no process could be made: .* use processes=1"):
        run(SQUARE, gpu=Gpu(processes=2), grid=8)
    assert made
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_an_interrupt_leaves_no_process():
    def late(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            run("SPIN:\nbra SPIN;", gpu=Gpu(processes=2), grid=2)  # which never ends
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_parent_that_dies_takes_its_processes_with_it(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from ptx_text import run\n"
        "from fa4.vgpu import Gpu, processes\n"
        "original = processes._work\n"
        "def work(launch, worker):\n"
        "    os.write(1, f'{os.getpid()}\\n'.encode())\n"
        "    return original(launch, worker)\n"
        "processes._work = work\n"
        "run('SPIN:\\nbra SPIN;', gpu=Gpu(processes=2), grid=2)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        try:
            pids = [int(parent.stdout.readline()) for _ in range(2)]
        finally:
            parent.kill()
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process outlived its parent"
        time.sleep(0.02)


def test_inside_a_thread_and_inside_a_process():
    found = {}
    thread = threading.Thread(target=lambda: found.update(thread=run(SQUARE, gpu=Gpu(processes=2), grid=8)[1]))
    thread.start()
    thread.join()
    expected = run(SQUARE, grid=8)[1]
    assert np.array_equal(found["thread"], expected)
    pid = os.fork()
    if not pid:
        status = 1
        try:
            status = 0 if np.array_equal(run(SQUARE, gpu=Gpu(processes=2), grid=8)[1], expected) else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_an_observer_sees_everything_in_one_process():
    class Recorder:
        def __init__(self):
            self.seen = []

        def launch(self, *_):
            pass

        def block(self, *fields):
            self.seen.append((os.getpid(), *fields))

        def event(self, cta, warp, op, lanes, values):
            self.seen.append((os.getpid(), cta, warp, op, lanes))

    recorders = []
    for number in (1, 2):
        gpu = Gpu(processes=number)
        gpu.observer = Recorder()
        run(SQUARE, gpu=gpu, grid=4)
        recorders.append(gpu.observer)
    assert recorders[0].seen == recorders[1].seen != []


def test_code_is_generated_once_for_all_processes():
    program = Program.parse(kernel(MINE + "setp.lt.u32 %p1, %r0, 3;\n@%p1 bra L;\nmov.u32 %r2, 1;\nL:\nst.global.u32 [%d12], %r9;"))
    reports = []
    for _ in range(2):
        gpu = Gpu(processes=2)
        for i, address in enumerate((A, B, C)):
            gpu.register_buffer(address, 4096, str(i))
        gpu.launch(program, "k", (4,), (32,), 0, [a.to_bytes(8, "little") for a in (A, B, C)])
        reports.append(set(next(iter(program.code.values())).blocks))
    assert reports[0] == reports[1]
    assert (1, False) in reports[0], "code under a mask is known after the first launch"


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
def test_numbers_of_processes(number):
    with pytest.raises(LaunchError, match=r"processes=.*: must be a whole number, at least 1"):
        Gpu(processes=number)


def test_other_systems(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LaunchError, match="several processes are made as Linux does, this is darwin; use processes=1"):
        Gpu(processes=2)
    assert Gpu(processes=1).processes == 1
