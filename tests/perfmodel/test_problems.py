"""From tiles to problems, ensembles and verdicts; machines."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from fa4.arch import get_arch
from fa4.errors import ModelError
from fa4.perfmodel.compare import Interval, ratio, verdict
from fa4.perfmodel.extrapolate import Sample, TileCost, attention_flop, fit, makespan, problem_cycles, streaming_cycles, waiting
from fa4.perfmodel.machine import Parameter, ensemble, preset
from fa4.schedule import Schedule, TileProblem

PRESETS = ("sm_80", "sm_90a", "sm_100a", "sm_103a")
COST = TileCost(1000, 100, 300)


def problem(seqlen=1024, causal=False, backward=False, **more):
    window = (None, 0 if causal else None)
    return TileProblem(((seqlen, seqlen),), tile=(256, 128), window=window, backward=backward, **more)


def scheduled(order, **more):
    return Schedule.of(problem(**more), order, get_arch("sm_100a"))


def test_fit_finds_the_cost_of_a_tile():
    samples = [Sample(steps, tiles, COST.cycles(steps, tiles)) for steps, tiles in ((8, 1), (16, 1), (24, 3))]
    found = fit(samples)
    assert (found.start, found.step, found.turn) == pytest.approx((1000, 100, 300))
    assert fit(samples[:2]).turn == 0
    with pytest.raises(ModelError, match="do not determine the cost"):
        fit(samples[:1])


def test_whole_waves():
    """4 tiles of 8 steps on 3 SMs: two waves one after the other, or two tiles in one CTA."""
    assert makespan(COST, scheduled("single"), 3) == 2 * (1000 + 800)
    assert makespan(COST, scheduled("persistent"), 3) == 1000 + 2 * 800 + 300
    assert makespan(COST, scheduled("persistent"), 300) == 1000 + 800
    assert makespan(COST, scheduled("dynamic"), 3) == 1000 + 2 * 800 + 300
    assert makespan(COST, scheduled("dynamic"), 300) == 1000 + 800


def test_free_blocks_take_the_longest_tile_that_is_left():
    """8, 6, 4 and 2 steps on 2 SMs: 8 and 2, 6 and 4; a CTA starts once, and turns to its second tile."""
    order = scheduled("dynamic", causal=True)
    assert [len(order.problem.steps(order.tile(i).block)) for i in range(4)] == [8, 6, 4, 2]
    assert makespan(COST, order, 2) == 1000 + 300 + 1000
    assert makespan(COST, scheduled("persistent", causal=True), 2) == 1000 + 300 + 1200  # 4 and 8


def test_a_triangle():
    """Longest first on two SMs: 8 + 2 and 6 + 4 steps."""
    assert makespan(COST, scheduled("lpt", causal=True), 2) == 2 * 1000 + 10 * 100


def test_flop_as_benchmarks_count():
    assert attention_flop(problem(batch=2, heads=3)) == 4 * 2 * 3 * 1024 * 1024 * 128
    assert attention_flop(problem(causal=True)) == 2 * 1024 * 1024 * 128
    assert attention_flop(problem(backward=True)) == 10 * 1024 * 1024 * 128


def test_what_the_backward_does_beside_its_main_kernel():
    machine = preset("sm_100a").changed(launch=0)
    moved = 1024 * (128 * (2 + 2 + 4 + 4 + 2) + 8)
    assert streaming_cycles(problem(backward=True), machine) == pytest.approx(moved / machine.dram.value * machine.clock.value)
    assert streaming_cycles(problem(), machine) == 0


def test_tiles_of_a_deterministic_backward_wait():
    """Eight blocks of keys that all begin with the first block of queries take turns; one alone waits for nobody."""
    machine = preset("sm_100a").changed(launch=0)
    many = Schedule.of(TileProblem(((1024, 1024),), backward=True), "spt", get_arch("sm_100a"))
    one = Schedule.of(TileProblem(((1024, 128),), backward=True), "spt", get_arch("sm_100a"))
    for steps in (0.25, 1.5):
        cost = replace(COST, wait=steps * COST.step)
        assert waiting(cost, many, 148) == pytest.approx((9 + 7 * steps) / 9)
        assert waiting(cost, one, 148) == 1
        slow, fast = (problem_cycles(cost, many, machine, 1, how) for how in (True, False))
        assert slow - fast == pytest.approx((waiting(cost, many, 148) - 1) * makespan(cost, many, 148))


def test_intervals_and_verdicts():
    interval = Interval.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (interval.median, interval.low, interval.high) == pytest.approx((3, 1.4, 4.6))
    assert ratio([2, 4], [1, 2]).median == 2
    assert verdict(Interval(1.1, 1.04, 1.2)) == "faster"
    assert verdict(Interval(1.1, 1.02, 1.2)) == "undecided"
    assert verdict(Interval(0.9, 0.8, 0.96)) == "slower"
    for wrong in (lambda: ratio([1], [1, 2]), lambda: Interval.of([])):
        with pytest.raises(ModelError):
            wrong()


@pytest.mark.parametrize("arch", PRESETS)
def test_every_number_has_a_unit_a_source_and_a_range(arch):
    for name, p in preset(arch).parameters():
        assert p.unit, name
        assert p.source, name
        assert p.low <= p.value <= p.high, name


@pytest.mark.parametrize("arch", PRESETS)
def test_samples_stay_in_their_ranges(arch):
    machine = preset(arch)
    known = dict(machine.parameters())
    for sample in ensemble(machine, 50)[1:]:
        for name, p in sample.parameters():
            assert known[name].low <= p.value <= known[name].high
    assert ensemble(machine, 3) == ensemble(machine, 3)
    assert ensemble(machine, 3)[1] != ensemble(machine, 3, seed=1)[1]
    assert machine.sample(Random(0)) != machine


def test_units_of_each_architecture():
    machines = {arch: preset(arch) for arch in PRESETS}
    assert machines["sm_80"].tcgen05 is machines["sm_80"].tma is machines["sm_90a"].tcgen05 is None
    assert machines["sm_90a"].wgmma.value == 4096
    assert machines["sm_103a"].mufu.value == machines["sm_100a"].mufu.value / 2 == 4


def test_bad_machines():
    with pytest.raises(ModelError, match="has no machine model"):
        preset("sm_70")
    with pytest.raises(ModelError, match="is no number of sm_100a"):
        preset("sm_100a").changed(speed=3)
    with pytest.raises(ModelError, match="must be low <= value <= high"):
        Parameter(1, "clock", "guess", 2, 3)
