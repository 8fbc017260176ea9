"""Tensor cores: their races, what they read unfenced, and the fences that the PTX ISA wants; each with a clean twin."""

from __future__ import annotations

import numpy as np
import pytest
import test_tensor_multiply as blackwell
import test_wgmma as hopper
from matrix_tiles import SHARED, registers
from test_tensor_memory import give_back

from fa4.vgpu import DataRaceError, Gpu, ProxyFenceError, TensorFenceError, TensorMemoryError, UninitializedError, VgpuError
from fa4.vgpu.errors import PendingMultiplyError

pytestmark = pytest.mark.vgpu

SCHEDULES = [("round_robin", 0), ("random", 0), ("priority", 0), ("priority", 1)]

# tcgen05: warps fill shared memory and D, thread 0 multiplies, and all read D.

BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
PUBLISH = "fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;"
FILL_D = f"tcgen05.st.sync.aligned.32x32b.x64.b32 [%r2], {registers(20, 64)};"
STORED, LOADED = "tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;"
ISSUE = "setp.ne.u32 %p4, %r0, 0;\n@%p4 bra ISSUED;\n"
WAIT = f"WAIT:\n{blackwell.READY}\n@!%p3 bra WAIT;"


def tensor_body():
    ones = "".join(f"mov.b32 %r{20 + i}, 0f3F800000;\n" for i in range(64))
    start = "\n".join([PUBLISH, ones, FILL_D, STORED, BEFORE, "bar.sync 0;", ISSUE, AFTER])
    issue = [blackwell.step(0, accumulate=1), blackwell.step(1), blackwell.commit(), "ISSUED:\n"]
    return "\n".join([start, *issue]) + blackwell.finish(64)


def run_tensor(body, checks, schedule="round_robin", seed=0):
    memories, exact = blackwell.simple()
    source = np.zeros(SHARED // 4, np.uint32)
    source[: len(memories[0]) // 4] = memories[0].view(np.uint32)
    out = np.zeros(128 * 64, np.uint32)
    gpu = Gpu("sm_100a", checks=checks, schedule=schedule, seed=seed, unwritten="nan")
    whole = give_back(blackwell.begin(memories[0], 1) + body)
    blackwell.run(whole, gpu=gpu, threads=128, shared=SHARED - 1024, arrays=(None, source, out))
    return np.array_equal(out.view(np.float32).reshape(128, 64), exact + 1)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_clean_multiplication(schedule, seed):
    for checks in ("hazards", "isa"):
        assert run_tensor(tensor_body(), checks, schedule, seed)


# what is changed: (text, what stands there instead, checks that find it, error, part of the message)
TENSOR_FAULTS = {
    "operands unfenced": ("fence.proxy.async.shared::cta;", "", "hazards", ProxyFenceError, "A of tcgen05.mma reads shared memory"),
    "mbarrier unfenced": (PUBLISH, "", "hazards", ProxyFenceError, "no fence.mbarrier_init|A of tcgen05.mma"),
    "D read before the commit has arrived": (
        WAIT, "", "hazards", VgpuError, "tensor memory of CTA .* nothing orders|ends before a multiplication that uses its memory"
    ),
    "D multiplied before the store is done": (STORED, "", "hazards", DataRaceError, "behind the write by tcgen05.st of warp"),
    "D multiplied without a barrier": (
        f"bar.sync 0;\n{ISSUE}", ISSUE, "hazards", VgpuError, "nothing orders this behind|no fence.proxy.async follows|was never written"
    ),
    "a load that has not been waited for": (LOADED, "", "isa", DataRaceError, "before tcgen05.wait::ld"),
    "no fence behind the store": (BEFORE, "", "isa", TensorFenceError, "in order, but without .* the write by tcgen05.st of warp"),
    "no fence before the multiplication": (ISSUE + "\n" + AFTER, ISSUE, "isa", TensorFenceError, "the write by tcgen05.st of warp"),
    "no fence before the load": (WAIT + "\n" + AFTER, WAIT, "isa", TensorFenceError, r"read in order, but without .* by tcgen05 of CTA"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSOR_FAULTS)
def test_faults_of_tensor_memory(name):
    text, instead, checks, error, message = TENSOR_FAULTS[name]
    body = tensor_body()
    assert body.count(text) == 1 or name == "no fence behind the store"
    faulty = body.replace(text, instead)
    for schedule, seed in SCHEDULES if checks == "hazards" else SCHEDULES[:2]:
        with pytest.raises(error, match=message):
            run_tensor(faulty, checks, schedule, seed)
    if checks == "isa":
        assert run_tensor(faulty, "hazards")


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_tensor_memory_is_not_used_after_it_was_given_back(schedule, seed):
    body = tensor_body()
    early = body.replace(LOADED, f"{LOADED}\n@SYNC\nsetp.ge.u32 %p1, %r0, 32;\n@%p1 bra FREED;\n{FREE}\nFREED:")
    assert run_tensor(early.replace("@SYNC", "bar.sync 0;"), "hazards", schedule, seed)
    with pytest.raises((DataRaceError, TensorMemoryError), match=r"given back here|not allocated"):
        run_tensor(early.replace("@SYNC", ""), "hazards", schedule, seed)


FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 512;"


def test_relaxed_operations_with_tensor_fences_order_tensor_memory():
    """The pattern of the ISA for two threads: the arrival and the wait are relaxed, the fences order."""
    body = tensor_body().replace(WAIT, WAIT.replace("parity", "parity.relaxed.cta"))
    assert run_tensor(body, "isa")


# wgmma: warps fill shared memory and multiply.

FENCE = "wgmma.fence.sync.aligned;"
GENERIC = "fence.proxy.async.shared::cta;\nbar.sync 0;"


def run_wgmma(body, memory, checks, schedule="round_robin", seed=0):
    return hopper.execute(body, memory, 4096, gpu=Gpu("sm_90a", checks=checks, schedule=schedule, seed=seed)).reshape(128, 32)


def again(between, transform=lambda text: text):
    """A multiplication, and behind ``between`` the second of its steps once more."""

    def twice(text):
        second = next(line for line in text.splitlines() if line.startswith("wgmma.mma_async") and ", 1, 1, 1, 0, 0;" in line)
        end = "wgmma.wait_group.sync.aligned 0;\n"
        head, tail = text.split(end)
        return transform(f"{head}{end}{between}\n{second}\nwgmma.commit_group.sync.aligned;\n{end}{tail}")

    return hopper.simple(before=GENERIC, transform=twice)[:2]


WRITTEN, READ = (f"a register of the result that was {how}" for how in ("written", "read"))
SCALE, SUM = "add.f32 %r21, %r21, %r21;", "add.f32 %r200, %r20, %r21;"
WGMMA_FAULTS = {
    # (clean, faulty, checks, message)
    "accumulators written": (f"mov.b32 %r20, 0;\n{FENCE}", f"{FENCE}\nmov.b32 %r20, 0;", "hazards", WRITTEN),
    "accumulators scaled": (f"{SCALE}\n{FENCE}", SCALE, "hazards", WRITTEN),
    "accumulators read": (f"{SUM}\n{FENCE}", SUM, "isa", READ),
}


@pytest.mark.parametrize("name", WGMMA_FAULTS)
def test_registers_of_wgmma_need_a_fence(name):
    clean, faulty, checks, message = WGMMA_FAULTS[name]
    body, memory = again(clean)
    for schedule, seed in SCHEDULES:
        run_wgmma(body, memory, "isa", schedule, seed)
    body, memory = again(faulty)
    for schedule, seed in SCHEDULES:
        with pytest.raises(TensorFenceError, match=message) as caught:
            run_wgmma(body, memory, checks, schedule, seed)
        assert "wgmma.mma_async" in caught.value.place.ptx_text
    if checks == "isa":
        run_wgmma(body, memory, "hazards")
    run_wgmma(body, memory, "basic")


def test_the_first_wgmma_needs_a_fence():
    body, memory, _ = hopper.simple(before=GENERIC)
    run_wgmma(body, memory, "isa")
    with pytest.raises(TensorFenceError, match=r"the first wgmma has no wgmma\.fence in front of it"):
        run_wgmma(body.replace(FENCE, ""), memory, "hazards")


def test_a_registers_of_wgmma_need_a_fence():
    def in_registers(text):
        return hopper.re.sub(r"(m64n64k16\S* \{[^}]*\}), \d+, (\d+, \d), 1, 1, 0, 0;", r"\1, {%r10, %r11, %r12, %r13}, \2, 1, 1, 0;", text)

    zero = "".join(f"mov.b32 %r{10 + i}, 0;\n" for i in range(4))
    body, memory, _ = hopper.simple(before=f"{GENERIC}\n{zero}", transform=in_registers)
    run_wgmma(body, memory, "isa")
    faulty = body.replace(FENCE, "").replace(zero, f"{FENCE}\n{zero}")
    with pytest.raises(TensorFenceError, match="a register of A that was written before"):
        run_wgmma(faulty, memory, "hazards")


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_operands_of_wgmma(schedule, seed):
    """Written without a proxy fence, read by other warps without a barrier, or overwritten before the wait."""
    body, memory, _ = hopper.simple(before=GENERIC)
    run_wgmma(body, memory, "hazards", schedule, seed)
    with pytest.raises(ProxyFenceError, match="of wgmma reads shared memory"):
        run_wgmma(body.replace("fence.proxy.async.shared::cta;", ""), memory, "hazards", schedule, seed)
    overwrite = f"mov.b32 %r8, 0;\nshl.b32 %r7, %r0, 4;\nst.shared.v4.u32 [%r7+{hopper.A_AT}], {{%r8, %r8, %r8, %r8}};"
    late, memory, _ = hopper.simple(before=GENERIC, end=f"wgmma.wait_group.sync.aligned 0;\nbar.sync 0;\n{overwrite}")
    run_wgmma(late, memory, "hazards", schedule, seed)
    early, memory, _ = hopper.simple(before=GENERIC, between=overwrite)
    with pytest.raises((DataRaceError, ProxyFenceError, PendingMultiplyError, UninitializedError)):
        run_wgmma(early, memory, "hazards", schedule, seed)
