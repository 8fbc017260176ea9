"""Mutation: what is changed, and what becomes of it."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_text import run

from fa4.vgpu import Gpu
from fa4.vgpu.mutate import Mutation, schedules

pytestmark = pytest.mark.vgpu

BODY = """
.shared .align 8 .b64 bar;
mov.u32 %r1, dynamic;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra MADE;
mbarrier.init.shared.b64 [bar], 32;
MADE:
bar.sync 0;
bar.sync 0;
mad.lo.u32 %r2, %r0, 4, %r1;
setp.lt.u32 %p2, %r0, 32;
@!%p2 bra READER;
st.shared.u32 [%r2], %r0;
mbarrier.arrive.shared.b64 _, [bar];
bra END;
READER:
AGAIN:
mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0;
@!%p3 bra AGAIN;
ld.shared.u32 %r4, [%r2+-128];
st.global.u32 [%d11], %r4;
END:
setp.eq.u32 %p4, %r0, 1000;
@%p4 fence.acq_rel.gpu;
@!%p4 bra OUT;
bar.sync 3;
OUT:
"""


def mutation_of(body, seeds, **launch):
    """Of the launch of a body, tried under ``seeds`` schedules."""
    gpu = Gpu("sm_90a", unwritten="nan")
    gpu.captures = []
    run(body, gpu=gpu, **launch)
    (capture,) = gpu.captures
    return Mutation(capture, schedules(seeds))


@pytest.fixture(scope="module")
def mutation():
    return mutation_of(BODY, 3, threads=64, shared=512)


def test_verdicts(mutation):
    verdicts = [mutation.judge(mutant) for mutant in mutation.mutants()]
    found = {(v.mutant.kind, v.mutant.change, v.mutant.text.split()[0].split(".")[0]): v for v in verdicts}
    outcomes = [(v.mutant.kind, v.mutant.change, v.outcome) for v in verdicts]
    assert outcomes == [
        ("count", "one more", "caught"),
        ("barrier", "removed", "survived"),  # either of two in a row may go, not both
        ("barrier", "id 3, used elsewhere", "equivalent"),
        ("barrier", "removed", "equivalent"),
        ("barrier", "id 3, used elsewhere", "equivalent"),
        ("arrive", "removed", "caught"),
        ("wait", "removed", "caught"),
        ("phase", "flipped", "caught"),
        ("fence", "removed", "equivalent"),
        ("barrier", "removed", "not executed"),
        ("barrier", "id 0, used elsewhere", "not executed"),
    ]
    assert found["arrive", "removed", "mbarrier"].how.startswith("DeadlockError, round_robin 0")
    assert found["wait", "removed", "mbarrier"].how.startswith("DataRaceError")


def test_a_capture_runs_again(mutation):
    results = mutation.capture.replay(mutation.program, schedule="priority", seed=5)
    (words,) = [data.view(np.uint32) for name, data in results.items() if name.startswith("a ")]
    assert (words[32:64] == np.arange(32)).all()


def test_a_changed_value_is_caught(mutation):
    name, before = next((n, d) for n, d in mutation.results[0].items() if n.startswith("a "))
    after = before.copy()
    after.view(np.uint32)[40] = np.float32(1e9).view(np.uint32)
    assert mutation._close(name, before)
    assert not mutation._close(name, after)


UNUSED = """
.shared .align 8 .b64 bar;
.shared .align 8 .b64 unused;
mov.u32 %r1, dynamic;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra MADE;
mbarrier.init.shared.b64 [bar], 64;
mbarrier.init.shared.b64 [unused], 64;
MADE:
bar.sync 0;
st.global.u32 [%d11], %r0;
mbarrier.arrive.shared.b64 _, [unused];
mbarrier.arrive.shared.b64 _, [bar];
AGAIN:
mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0;
@!%p3 bra AGAIN;
@AFTER
"""


NEXT = """
xor.b32 %r2, %r0, 32;
mul.wide.u32 %d3, %r2, 4;
add.u64 %d3, %d3, %d0;
ld.global.u32 %r3, [%d3];
"""


@pytest.mark.parametrize(("after", "last"), [("", "equivalent"), (NEXT, "caught")])
def test_what_nothing_depends_on_is_equivalent(after, last):
    """An mbarrier that nobody waits for; and a wait that nothing follows, or something."""
    mutation = mutation_of(UNUSED.replace("@AFTER", after), 2, threads=64, shared=512)
    outcomes = {
        (m.text.split()[0].split(".")[1], m.text.split("[")[1][:3], m.change): mutation.judge(m).outcome
        for m in mutation.mutants()
        if "[" in m.text
    }
    assert outcomes["init", "unu", "one more"] == outcomes["arrive", "unu", "removed"] == "equivalent"
    assert outcomes["try_wait", "bar", "removed"] == last
    assert outcomes["arrive", "bar", "removed"] == outcomes["init", "bar", "one more"] == "caught"


TWO_FENCES = """
.shared .align 8 .b64 bar;
mov.u32 %r1, dynamic;
mad.lo.u32 %r2, %r0, 4, %r1;
st.shared.u32 [%r2], %r0;
fence.proxy.async.shared::cta;
@BETWEEN
fence.proxy.async;
bar.sync 0;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra END;
cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END:
"""


@pytest.mark.parametrize(
    ("between", "outcomes"), [("", ["equivalent"] * 2), ("bar.sync 0;\nst.shared.u32 [%r2], %r0;", ["survived", "caught"])]
)
def test_of_two_fences_either_may_go(between, outcomes):
    """Unless something is written in between."""
    mutation = mutation_of(TWO_FENCES.replace("@BETWEEN", between), 2, threads=64, shared=512)
    assert [mutation.judge(m).outcome for m in mutation.mutants() if m.kind == "fence"] == outcomes


TURNS = """
mov.u32 %r1, dynamic;
mov.u32 %r2, %ctaid.x;
st.shared.v4.u32 [%r1], {%r2, %r2, %r2, %r2};
fence.proxy.async.shared::cta;
AGAIN:
ld.acquire.gpu.global.u32 %r3, [%d2];
setp.lt.u32 %p1, %r3, %r2;
@%p1 bra AGAIN;
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1], [%r1], 16;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
red.release.gpu.global.add.u32 [%d2], 1;
"""


@pytest.mark.parametrize(("body", "outcome"), [(TURNS, "caught"), (TURNS.replace("AGAIN:", "").replace("@%p1 bra AGAIN;", ""), "survived")])
def test_additions_must_stay_in_order_where_they_were(body, outcome):
    """CTAs add in turns; without the loop nothing is in order, and so nothing is lost."""
    mutation = mutation_of(body, 2, threads=1, shared=64, grid=2)
    verdicts = [mutation.judge(mutant) for mutant in mutation.mutants() if mutant.kind == "semaphore"]
    assert [verdict.outcome for verdict in verdicts] == [outcome] * 2
    assert all("order of additions" in verdict.how for verdict in verdicts) == (outcome == "caught")


TWO_STORES = """
mov.u32 %r1, dynamic;
st.shared.u32 [%r1], 1;
st.shared.u32 [%r1+16], 2;
fence.proxy.async.shared::cta;
cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 16;
cp.async.bulk.commit_group;
cp.async.bulk.global.shared::cta.bulk_group [%d0+16], [%r1+16], 16;
cp.async.bulk.commit_group;
@
cp.async.bulk.wait_group 0;
"""
READ_FIRST = "cp.async.bulk.wait_group.read 1;\nst.shared.u32 [%r1], 3;"


@pytest.mark.parametrize(("between", "outcomes"), [("", ["equivalent", "caught"]), (READ_FIRST, ["caught", "caught"])])
def test_of_two_groups_that_are_waited_for_together_one_is_enough(between, outcomes):
    mutation = mutation_of(TWO_STORES.replace("@", between), 2, threads=1, shared=64)
    assert [mutation.judge(mutant).outcome for mutant in mutation.mutants() if mutant.kind == "commit"] == outcomes
