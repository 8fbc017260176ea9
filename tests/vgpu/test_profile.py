"""What ``Profile`` reports of kernels for which every number can be told by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from matrix_tiles import SHARED
from ptx_text import run
from test_tensor_memory import give_back
from test_tensor_multiply import SYNC, begin, commit, finish, instruction_descriptor, multiply, only_thread_0

from fa4.vgpu import Gpu, LaunchError, Profile, TrapError
from fa4.vgpu.descriptor import MatrixDescriptor

pytestmark = pytest.mark.vgpu


def profiled(body, roles=None, arch="sm_90a", **options):
    gpu = Gpu(arch, unwritten="nan")
    gpu.observer = profile = Profile(roles)
    run(body, gpu=gpu, **options)
    (report,) = profile.reports
    return report


# Of an access by 32 lanes: where lane %r0 goes, the instruction, its wavefronts, and as few as its words need.
ACCESSES = {
    "each its own bank": ("shl.b32 %r2, %r0, 2;", "ld.shared.u32 %r3, [%r2];", 1, 1),
    "two words a bank": ("shl.b32 %r2, %r0, 3;", "ld.shared.u32 %r3, [%r2];", 2, 1),
    "all in one bank": ("shl.b32 %r2, %r0, 7;", "st.shared.u32 [%r2], %r0;", 32, 1),
    "a row padded by a word": ("mul.lo.u32 %r2, %r0, 132;", "st.shared.u32 [%r2], %r0;", 1, 1),
    "all the same word": ("mov.u32 %r2, 64;", "ld.shared.u32 %r3, [%r2];", 1, 1),
    "two bytes a lane": ("shl.b32 %r2, %r0, 1;", "ld.shared.u16 %h3, [%r2];", 1, 1),
    "16 bytes a lane": ("shl.b32 %r2, %r0, 4;", "ld.shared.v4.u32 {%r3, %r4, %r5, %r6}, [%r2];", 4, 4),
    "16 bytes a lane, rows of 128": ("shl.b32 %r2, %r0, 7;", "st.shared.v4.u32 [%r2], {%r0, %r0, %r0, %r0};", 32, 4),
    "one lane": ("setp.eq.u32 %p1, %r0, 5; mov.u32 %r2, 0;", "@%p1 st.shared.u32 [%r2], %r0;", 1, 1),
    "matrix rows of 16 bytes": ("shl.b32 %r2, %r0, 4;", "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r2];", 1, 1),
    "matrix rows of 128 bytes": ("shl.b32 %r2, %r0, 7;", "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r2];", 8, 1),
    "four matrices, swizzled": (
        "shl.b32 %r2, %r0, 7; and.b32 %r3, %r0, 7; shl.b32 %r3, %r3, 4; xor.b32 %r2, %r2, %r3;",
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {%r0, %r0, %r0, %r0};",
        4,
        4,
    ),
    "cp.async of 16 bytes, rows of 128": (
        "shl.b32 %r2, %r0, 7; mul.wide.u32 %d5, %r0, 16; add.u64 %d5, %d0, %d5;",
        "cp.async.cg.shared.global [%r2], [%d5], 16; cp.async.wait_all;",
        32,
        4,
    ),
}


@pytest.mark.parametrize(("place", "access", "wavefronts", "ideal"), ACCESSES.values(), ids=ACCESSES)
def test_bank_conflicts(place, access, wavefronts, ideal):
    report = profiled(f"{place}\nadd.u32 %r2, %r2, dynamic;\n{access}", shared=8192)
    (work,) = report.shared
    assert (work.executed, work.wavefronts, work.ideal) == (1, wavefronts, ideal)
    assert work.source.startswith("PTX line ")


def test_bytes_by_space_and_instructions_by_role_and_line():
    body = "ld.global.u32 %r1, [%d11];\nsetp.lt.u32 %p1, %r0, 32;\n@%p1 bra END;\nst.global.u32 [%d12], %r1;\nEND:"
    report = profiled(body, roles=["first", "second"], threads=64, grid=3)
    first, second = report.roles
    assert first.warps == (0,)
    assert second.instructions - first.instructions == 3 * 1
    assert (first.by_class.get("st", 0), second.by_class["st"]) == (0, 3)
    store = next(by for by in report.by_source.values() if by == {"second": 3})
    assert store
    assert sum(sum(by.values()) for by in report.by_source.values()) == first.instructions + second.instructions
    assert report.bytes["global"] == 3 * 4 * (64 + 32)


BARRIER = """
setp.ge.u32 %p1, %r0, 32;
@%p1 bra LATE;
bar.sync 1, 64;
bra END;
LATE:
{work}
bar.sync 1, 64;
END:
"""


def test_waits_at_a_barrier():
    """Warp 0 waits for what warp 1 still has to do, and warp 1, the last, for nothing."""
    reports = [profiled(BARRIER.format(work="add.u32 %r1, %r0, 1;\n" * n), ["early", "late"], threads=64) for n in (5, 25)]
    for report in reports:
        waits = {wait.role: wait for wait in report.waits}
        assert (waits["early"].opcode, waits["early"].on) == ("bar.sync", "barrier 1")
        assert (waits["early"].executed, waits["early"].stopped) == (1, 1)
        assert (waits["late"].executed, waits["late"].stopped, waits["late"].time) == (1, 0, 0)
        early, late = report.roles
        assert early.waited == waits["early"].time
        assert early.share == early.waited / report.time
        assert late.share == 0
    few, many = (next(w.time for w in r.waits if w.role == "early") for r in reports)
    assert few == 5 + 1, "its instructions, and the barrier"
    assert many - few == 20


MBARRIER = """
.shared .align 8 .b64 bar;
.shared .align 128 .b8 tile[1024];
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [bar], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
setp.ne.u32 %p2, %r0, 32;
@%p2 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [bar], 1024;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [%d0], 1024, [bar];
WAIT:
setp.ge.u32 %p2, %r0, 32;
@%p2 bra END;
AGAIN:
mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0;
@!%p3 bra AGAIN;
setp.ne.u32 %p2, %r0, 0;
@%p2 bra END;
fence.proxy.async.shared::cta;
cp.async.bulk.global.shared::cta.bulk_group [%d1], [tile], 512;
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d2], [tile], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END:
"""


def test_bulk_copies_and_mbarriers():
    report = profiled(MBARRIER, ["consumer", "producer"], threads=64)
    found = {(b.kind, b.role): (b.copies, b.bytes) for b in report.bulk}
    assert found == {("load", "producer"): (1, 1024), ("store", "consumer"): (1, 512), ("reduce", "consumer"): (1, 256)}
    assert (report.bytes["bulk load"], report.bytes["bulk store"]) == (1024, 512 + 256)
    wait = next(w for w in report.waits if w.opcode.startswith("mbarrier.try_wait"))
    assert (wait.role, wait.on, wait.executed, wait.stopped) == ("consumer", "mbarrier 0x400", 1, 1)
    assert 0 < wait.time < report.time
    done = next(w for w in report.waits if "wait_group" in w.opcode)
    assert (done.executed, done.stopped, done.time) == (1, 0, 0), "a thread that waits for its own copies makes them happen"


def test_products_of_mma():
    operands = "{%f1, %f2, %f3, %f4}, {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%f0, %f0, %f0, %f0}"
    product = f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {operands};\n"
    (work,) = profiled(".reg .f32 %f<8>;\nmov.f32 %f0, 0f00000000;\nmov.u32 %r1, 0;\n" + 3 * product, threads=64).products
    assert (work.role, work.opcode, work.shape) == ("warps 0-1", "mma", "m16n8k16")
    assert (work.executed, work.flop) == (6, 6 * 2 * 16 * 8 * 16)


def test_products_of_wgmma():
    """Two of 64 x 8 x 16 by four warps."""
    descriptor = MatrixDescriptor(1024, 128, 256, 0).encode(False)
    product = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r1, %r2, %r3, %r4}}, {descriptor}, {descriptor}, 0, 1, 1, 0, 0;\n"
    body = f"wgmma.fence.sync.aligned;\n{2 * product}wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
    report = profiled(body, threads=128, shared=4096)
    (work,) = report.products
    assert (work.opcode, work.shape, work.executed, work.flop) == ("wgmma.mma_async", "m64n8k16", 8, 2 * 2 * 64 * 8 * 16)
    assert {w.opcode.split(".")[1]: w.executed for w in report.waits} == {"wait_group": 4}


@pytest.mark.parametrize(("group", "m"), [(1, 128), (2, 256)])
def test_products_of_tcgen05(group, m):
    """By one thread, of a pair by that of the even CTA."""
    descriptor = MatrixDescriptor(1024, 128, 256, 0).encode(True)
    line = multiply(descriptor, descriptor, instruction_descriptor(m, 32, "bf16", "bf16", "f32"), group=group)
    lines = only_thread_0([line, line, commit(group, 3 if group == 2 else None)], leader=group == 2)
    body = give_back(begin(np.zeros(1024, np.uint8), group) + (SYNC if group == 2 else "") + lines + finish(32))
    roles = ["issues", "waits", "waits", "waits"]
    arrays = None, np.zeros(group * SHARED // 4, np.uint32), np.zeros(group * 128 * 32, np.uint32)
    cluster = None if group == 1 else (2,)
    report = profiled(body, roles, "sm_100a", threads=128, grid=group, shared=SHARED - 1024, arrays=arrays, cluster=cluster)
    (work,) = report.products
    assert (work.role, work.shape, work.executed, work.flop) == ("issues", f"m{m}n32k16", 2, 2 * 2 * m * 32 * 16)


def test_a_launch_that_fails():
    """Up to where it failed; a warp that waits for ever was stopped."""
    gpu = Gpu("sm_90a")
    gpu.observer = profile = Profile()
    with pytest.raises(TrapError):
        run("setp.ge.u32 %p1, %r0, 32;\n@%p1 bra LATE;\nbar.sync 0;\nLATE: add.u32 %r1, %r0, 1;\ntrap;", gpu=gpu, threads=64)
    (report,) = profile.reports
    assert [(w.executed, w.stopped) for w in report.waits] == [(1, 1)]


def test_text_and_json():
    report = profiled(MBARRIER, ["consumer", "producer"], threads=64)
    assert json.loads(json.dumps(report.data()))["bulk"][0]["bytes"] == 1024
    text = str(report)
    for part in ("roles", "instructions by source line", "waits", "bulk copies: 1,792 bytes", "bytes: "):
        assert f"\n{part}" in text
    assert "\n  and " in report.text(lines=1)


def test_a_name_for_each_warp():
    with pytest.raises(LaunchError, match="3 names, but k has 2 warps"):
        profiled("add.u32 %r1, %r0, 1;", ["a", "b", "c"], threads=64)


def test_reports_of_several_launches_and_no_cost_without():
    gpu = Gpu("sm_90a", unwritten="nan")
    gpu.observer = profile = Profile()
    run("add.u32 %r1, %r0, 1;", gpu=gpu)
    run("add.u32 %r1, %r0, 1;\nadd.u32 %r1, %r1, 1;", gpu=gpu)
    first, second = profile.reports
    assert second.roles[0].instructions == first.roles[0].instructions + 1
    assert first.roles[0].role == "warp 0"
    assert first.roles[0].instructions == gpu.reports[0].instructions
