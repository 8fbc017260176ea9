"""A failing run says how it is repeated, and is reduced to the choices of the schedule that it needs."""

from __future__ import annotations

import pytest
from ptx_text import run

from fa4.vgpu import Gpu, LaunchError, TrapError, VgpuError, minimise
from fa4.vgpu.choices import Choice, Replay, _reduced
from fa4.vgpu.program import Program

pytestmark = pytest.mark.vgpu

# Six warps add 1 to a counter: each loads it, and stores it a block later. A seventh looks behind a barrier, and traps if one is missing.
COUNTER = """
.shared .align 4 .b32 count;
setp.eq.u32 %p1, %r0, 0;
@%p1 st.shared.u32 [count], 0;
bar.sync 0;
setp.ge.u32 %p2, %r0, 192;
@%p2 bra LAST;
and.b32 %r4, %r0, 31;
setp.ne.u32 %p3, %r4, 0;
@%p3 bra DONE;
ld.shared.u32 %r2, [count];
bra.uni HALF;
HALF:
add.u32 %r2, %r2, 1;
st.shared.u32 [count], %r2;
DONE:
bar.sync 1;
bra.uni END;
LAST:
bar.sync 1;
ld.shared.u32 %r3, [count];
setp.ne.u32 %p4, %r3, @EXPECTED;
@%p4 trap;
END:
mov.u32 %r5, 0;
"""

# The source of a bulk store changes while the store may not have read it: the engine must come late.
LATE = """
mov.u32 %r1, dynamic;
mad.lo.u32 %r2, %r0, 4, %r1;
st.shared.u32 [%r2], 5;
fence.proxy.async.shared::cta;
bar.sync 0;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra END;
cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 256;
cp.async.bulk.commit_group;
END:
bar.sync 0;
@%p1 bra OUT;
cp.async.bulk.wait_group 0;
ld.global.u32 %r3, [%d0];
setp.ne.u32 %p2, %r3, 5;
@%p2 trap;
OUT:
bar.sync 0;
"""


def captured(body, threads=224, **options):
    """The launch and the error, None where it does not fail."""
    gpu = Gpu("sm_90a", **options)
    gpu.captures = []
    try:
        run(body, gpu=gpu, threads=threads, shared=512)
    except VgpuError as error:
        return gpu.captures[0], error
    return gpu.captures[0], None


def first_failure(body):
    """(launch, seed, error) of the first failing run of the random schedule."""
    for seed in range(40):
        capture, error = captured(body, schedule="random", seed=seed)
        if error is not None:
            return capture, seed, error
    raise AssertionError("no seed fails")


def test_a_lost_update_needs_one_preemption():
    """A warp is interrupted between its load and its store; the plainest schedule never does that."""
    body = COUNTER.replace("@EXPECTED", "6")
    capture, seed, error = first_failure(body)
    assert f"again with schedule='random', seed={seed}" in str(error)
    found = minimise(capture, "random", seed)
    assert len(found.choices) == 1
    (choice,) = found.choices
    assert choice.what == "switch"
    assert found.recorded > 5
    assert str(found).splitlines()[0].startswith("TrapError: the kernel executed trap")
    assert str(choice) in str(found)
    assert "%r2, %r2, 1;" in found.places[0]  # between the load and the store
    with pytest.raises(TrapError):
        found.replay()
    capture.replay(Program.parse(capture.ptx), scheduler=Replay(()))  # passes without it


def test_two_lost_updates_need_two():
    """Of two rounds, in each of which an update is lost."""
    body = COUNTER.replace("@EXPECTED", "6").replace("setp.ne.u32 %p4, %r3, 6", "setp.le.u32 %p4, %r3, 4")
    capture, seed, _ = first_failure(body)
    found = minimise(capture, "random", seed)
    assert len(found.choices) >= 1
    for left_out in range(len(found.choices)):
        rest = found.choices[:left_out] + found.choices[left_out + 1 :]
        capture.replay(Program.parse(capture.ptx), scheduler=Replay(rest))
    with pytest.raises(TrapError):
        found.replay()


def test_what_fails_in_any_schedule_needs_no_choice():
    capture, error = captured(COUNTER.replace("@EXPECTED", "7"), schedule="priority", seed=3)
    assert "again with schedule='priority', seed=3" in str(error)
    found = minimise(capture, "priority", 3)
    assert found.choices == ()
    assert "in the plainest schedule" in str(found)


def test_what_does_not_fail_is_refused():
    capture, error = captured(COUNTER.replace("@EXPECTED", "6"), schedule="priority")
    assert error is None
    with pytest.raises(LaunchError, match=r"minimise: k does not fail in schedule='priority', seed=0"):
        minimise(capture, "priority")


def test_engines_are_late_in_the_plainest_schedule():
    """Without a wait the store comes after the look at it: no engine is drawn while a warp can run."""
    missing = LATE.replace("cp.async.bulk.wait_group 0;", "")
    assert captured(LATE, threads=64)[1] is None
    found = minimise(captured(missing, threads=64, schedule="priority", seed=6)[0], "priority", 6)
    assert found.choices == ()


@pytest.mark.parametrize("needed", [{3}, {0, 9}, {1, 4, 7}, set(range(10))])
def test_delta_debugging_leaves_what_is_needed(needed):
    choices = [Choice((0, 0), i, "switch", (0, 1)) for i in range(10)]
    kept = _reduced(choices, lambda part: needed <= {choice.step for choice in part})
    assert {choice.step for choice in kept} == needed
