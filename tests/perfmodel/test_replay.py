"""What the replay must say where the answer is known: closed forms, conservation, monotony."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import MACHINE, MMA, event, made, run

from fa4.errors import ModelError
from fa4.perfmodel.machine import preset
from fa4.perfmodel.schedule import Step, WarpSchedule
from fa4.perfmodel.simulation import replay
from fa4.perfmodel.trace import CtaTrace, WarpTrace

INIT = event("init", 0, 64, 1)
COMMIT = event("commit", 64, 0)


def test_a_stream_of_products_reaches_the_peak():
    """A in tensor memory: shared memory is half busy, the tensor core is never idle but for the first fetch and the last signal."""
    report = run([INIT, *[event(*MMA, 1)] * 200, COMMIT, event("wait", 0, 64, 0)])
    assert report.flop == 200 * 2 * 128 * 128 * 16
    assert report.steady() == pytest.approx(8192, rel=1e-6)
    ends = MACHINE.tcgen05_done.value + MACHINE.wake.value
    assert report.cycles == pytest.approx(200 * 64 + ends + 32, abs=5)
    assert report.busy["shared memory"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("smem", "rate"), [(128, 8192), (96, 6144)])
def test_both_operands_from_shared_memory(smem, rate):
    """8 KB for 64 clocks of products: at 128 bytes a clock just enough, below that the port decides."""
    report = run([INIT, *[event(*MMA, 0)] * 200], machine=MACHINE.changed(smem=smem))
    assert report.steady() == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize(("arch", "clocks"), [("sm_100a", 8), ("sm_103a", 4)])
@pytest.mark.parametrize("warps", [1, 4, 8])
def test_special_functions(arch, clocks, warps):
    """Four warps have a unit each; eight share four."""
    machine = preset(arch).changed(jitter=0, launch=0)
    report = run(*[[Step("mufu")] * 100] * warps, machine=machine)
    assert report.cycles == pytest.approx(clocks * 100 * max(1, warps // 4), rel=0.02)
    assert report.busy["mufu"] == pytest.approx(min(warps, 4) / 4, rel=0.02)


def test_dependent_instructions_wait_for_the_result():
    chain = Step("mufu", waits=(0,), sets=(0,), latency="mufu_latency")
    assert run([chain] * 10).cycles == pytest.approx(9 * MACHINE.mufu_latency.value + 1, abs=1)


def test_ping_pong():
    """Two warps hand a token to and fro by mbarriers: each hand-over takes an arrival, and waking up."""
    there, back = ("wait", 0, 64), ("wait", 0, 72)
    first, second = [INIT, event("init", 0, 72, 1), event("bar", 0, 0, 0)], [event("bar", 0, 0, 0)]
    turns = 20
    for i in range(turns):
        first += [event("arrive", 0, 64, 1, 0), event(*back, i & 1)]
        second += [event(*there, i & 1), event("arrive", 0, 72, 1, 0)]
    each = MACHINE.arrive.value + MACHINE.wake.value
    assert run(first, second).cycles == pytest.approx(2 * turns * each + MACHINE.barrier.value, rel=0.02)


def test_a_load_takes_its_latency_and_its_bytes():
    size = 1 << 15
    report = run([INIT, event("arrive", 0, 64, 1, size), event("load", size, 0, 0, 64), event("wait", 0, 64, 0)])
    known = MACHINE.tma_latency.value + size / MACHINE.tma.value + 4096 / MACHINE.smem.value + MACHINE.wake.value
    assert report.cycles == pytest.approx(known, abs=5)


def test_spills_take_the_port():
    """Local loads of four warps at once are served one after the other."""
    report = run(*[[Step("lsu", spill=True)] * 50] * 4)
    assert report.busy["local memory"] * report.cycles == pytest.approx(200 * MACHINE.local_port.value)
    assert report.spills == 50


def test_a_pair_shares_its_operands():
    """cta_group::2 has twice the FLOP a clock; each SM fetches its rows of A and half of B: 8 KB in 128 clocks."""
    trace, schedule = made([INIT, *[event("mma", 2, 256, 256, 16, 2, 0)] * 100], cluster=2)
    schedule.warps[1, 0] = WarpSchedule((), ())  # the even CTA issues
    report = replay(trace, schedule, MACHINE)
    assert report.steady() == pytest.approx(8192, rel=1e-3)
    assert report.busy["tcgen05"] == pytest.approx(1, abs=0.03)
    assert report.busy["shared memory"] == pytest.approx(0.5, abs=0.03)


def test_clusters_follow_each_other():
    trace, schedule = made([Step("mufu")] * 10)
    (cta,) = trace.ctas
    both = type(trace)(**{**vars(trace), "ctas": (cta, type(cta)(1, 1, 0, cta.warps))})
    schedule.warps[1, 0] = schedule.warps[0, 0]
    one, two = (replay(t, schedule, MACHINE.changed(launch=500)).cycles for t in (trace, both))
    assert two == pytest.approx(2 * one)
    assert replay(both, schedule, MACHINE.changed(launch=500), resident=2).cycles < 1.5 * one


def in_turn(count, work):
    """(trace, schedule) of CTAs that each wait for their number, work for so many clocks, and count on."""
    trace, schedule = made([event("poll", 1 << 40, 0), *[Step("mufu")] * (work // 8), event("signal", 1 << 40, 1, 1)])
    warp, order = trace.ctas[0].warps[0], schedule.warps[0, 0]
    ctas, orders = [], {}
    for i in range(count):
        events = (event("poll", 1 << 40, i), *warp.events[1:])
        ctas.append(CtaTrace(i, i, 0, (WarpTrace((0,), events),)))
        orders[i, 0] = WarpSchedule(order.steps, events)
    return replace(trace, ctas=tuple(ctas)), replace(schedule, warps=orders)


def test_ctas_wait_for_each_others_semaphores():
    """Side by side they take turns: each works, its count takes half a round trip, and is noticed within half to one and a half."""
    trip, work, count = MACHINE.global_latency.value, 800, 5
    trace, schedule = in_turn(count, work)
    report = replay(trace, schedule, MACHINE, side_by_side=count)
    assert report.turns[1:] == pytest.approx([work + trip / 2] * (count - 1), abs=20)
    low, high = (work + (count - 1) * (work + trip / 2 + share * trip) for share in (0.5, 1.5))
    assert low < report.cycles < high
    assert sorted(cluster for cluster, _ in report.ends) == [cluster for cluster, _ in report.ends]
    alone = replay(trace, schedule, MACHINE, clusters=[count - 1])
    assert alone.cycles == pytest.approx(work, rel=0.02)


def test_a_turn_that_never_comes_is_an_error():
    trace, schedule = in_turn(2, 80)
    with pytest.raises(ModelError, match="warps wait for what never happens"):
        replay(trace, schedule, MACHINE, clusters=[1, 0])


PIPES = ("fma", "fma2", "alu", "mufu", "convert", "lsu")
STEPS = st.builds(
    lambda pipe, stall, slot, waits: Step(pipe, stall, (waits,), (slot,), latency=pipe + "_latency" if pipe in ("fma", "mufu") else ""),
    st.sampled_from(PIPES),
    st.integers(1, 8),
    st.integers(0, 5),
    st.integers(0, 5),
)
PRODUCTS = st.builds(lambda n, memory: event("mma", 1, 128, n, 16, 2, memory), st.sampled_from((64, 128, 256)), st.integers(0, 1))
STORES = st.builds(lambda wavefronts: event("sts", wavefronts, 128 * wavefronts), st.integers(1, 8))
COPIES = st.sampled_from([event("load", 16384, 0, 0, 64)])
WARPS = st.lists(st.lists(st.one_of(STEPS, PRODUCTS, STORES, COPIES), min_size=1, max_size=40), min_size=1, max_size=8)
SLOWER = {
    "mufu": 16,
    "alu": 4,
    "smem": 64,
    "tcgen05": 4096,
    "tma": 16,
    "tma_latency": 2000,
    "mufu_latency": 60,
}


@given(WARPS)
def test_nothing_is_busy_for_more_than_the_time(warps):
    report = run([INIT], *warps)
    assert all(share <= 1 + 1e-9 for share in report.busy.values())
    assert report.flop == sum(2 * 128 * e.data[2] * 16 for warp in warps for e in warp if getattr(e, "kind", "") == "mma")


@given(WARPS, st.sampled_from(sorted(SLOWER)))
@settings(max_examples=50)
def test_a_slower_part_never_helps(warps, name):
    """Beyond what a changed order among warps can do: greedy scheduling has anomalies (Graham 1969), here of some instructions."""
    before, after = (run([INIT], *warps, machine=machine).cycles for machine in (MACHINE, MACHINE.changed(**{name: SLOWER[name]})))
    assert after >= before * 0.95 - 40


def test_the_check_of_monotony_can_fail():
    assert run([Step("mufu")] * 20, machine=MACHINE.changed(mufu=4)).cycles < run([Step("mufu")] * 20).cycles * 0.6


def test_a_machine_without_a_unit_is_refused():
    with pytest.raises(ModelError, match=r"sm_80.*has no 'tcgen05', which tcgen05.mma needs"):
        run([INIT, event(*MMA, 0)], machine=preset("sm_80"))


def test_waiting_for_ever_is_an_error():
    with pytest.raises(ModelError, match="warps wait for what never happens"):
        run([INIT, event("wait", 0, 64, 0)])
    with pytest.raises(ModelError, match="no mbarrier was initialised at 0x40"):
        run([event("wait", 0, 64, 0)])


def test_a_schedule_of_another_trace_is_refused():
    trace, _ = made([Step("mufu")], [Step("mufu")])
    _, schedule = made([Step("mufu")])
    with pytest.raises(ModelError, match="has no order for these"):
        replay(trace, schedule, MACHINE)
