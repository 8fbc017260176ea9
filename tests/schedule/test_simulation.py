"""Bounds that scheduling theory gives, and what the simulation says of orders."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from test_order import problems

from fa4.arch import ARCHS, get_arch
from fa4.errors import UnsupportedError
from fa4.problem import AttentionProblem
from fa4.schedule import ORDERS, Schedule, TileProblem, default_order, list_schedule, longest_first, simulate, simulate_heads
from fa4.schedule.simulation import TURN
from fa4.tuning import blackwell_backward_config

COSTS = st.lists(st.integers(1, 60), min_size=1, max_size=60)
B200 = get_arch("sm_100a")


ONE_SIDED = [(None, 0), (None, 5), (3, None), (None, None)]


class FewSms:
    """A B200 with another number of SMs."""

    def __init__(self, sms):
        self.sm_count, self.l2 = sms, B200.l2


def makespan(costs, machines):
    placed = list_schedule(costs, machines)
    return max(start + cost for (_, start), cost in zip(placed, costs, strict=True))


def graham_bound(costs, machines):
    return sum(costs) / machines + (1 - 1 / machines) * max(costs)


@given(COSTS, st.integers(1, 16))
def test_any_order_keeps_grahams_bound(costs, machines):
    """total / m + (1 - 1/m) * longest (Graham 1966)."""
    assert makespan(costs, machines) <= graham_bound(costs, machines) + 1e-9


def test_grahams_bound_can_be_reached_and_broken():
    assert makespan([1] * 6 + [3], 3) == graham_bound([1] * 6 + [3], 3)
    assert sum([3, 1, 3, 1]) > graham_bound([3, 1, 3, 1], 2)  # one machine left idle
    assert max(sum([9, 9, 9]), sum([1, 1, 1])) > graham_bound([9, 1, 9, 1, 9, 1], 2)  # by position, not to the one that is free


def optimum(costs, machines):
    """Least makespan, over every assignment that is not a renumbering of another or already worse than the best."""
    costs, best = sorted(costs, reverse=True), sum(costs)

    def assign(job, loads):
        nonlocal best
        if job == len(costs):
            best = max(loads)
            return
        for machine in {load: machine for machine, load in enumerate(loads)}.values():
            more = loads[machine] + costs[job]
            if more < best:
                assign(job + 1, (*loads[:machine], more, *loads[machine + 1 :]))

    assign(0, (0,) * machines)
    return best


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 4))
def test_optimum_is_the_least_of_all_assignments(costs, machines):
    def loads(places):
        return [sum(cost for cost, place in zip(costs, places, strict=True) if place == machine) for machine in range(machines)]

    assert optimum(costs, machines) == min(max(loads(places)) for places in itertools.product(range(machines), repeat=len(costs)))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=10), st.integers(1, 4))
def test_longest_first_is_close_to_the_optimum(costs, machines):
    """4/3 - 1/(3m) (Graham 1969), against the optimum by brute force."""
    ordered = [costs[i] for i in longest_first(costs)]
    assert makespan(ordered, machines) <= (4 / 3 - 1 / (3 * machines)) * optimum(costs, machines) + 1e-9


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=2), st.integers(1, 4), st.sampled_from(ONE_SIDED))
def test_longest_first_order_of_tiles_is_close_to_the_optimum(lengths, sms, window):
    """The same for the tiles of a dense batch in one section, as they are numbered."""
    problem = TileProblem((lengths[0],), len(lengths), 1, 1, tile=(8, 4), window=window)
    schedule = Schedule(problem, "lpt", len(lengths))
    costs = [problem.cost(tile.block, tile.batch) for tile in map(schedule.tile, range(problem.tiles))]
    if costs:
        assert simulate(schedule, FewSms(sms)).makespan <= (4 / 3 - 1 / (3 * sms)) * optimum(costs, sms) + 1e-9


def test_longest_first_bound_is_tight_and_other_orders_break_it():
    costs = [5, 5, 4, 4, 3, 3, 3]  # Graham's example for 3 machines: 11 against 9
    assert makespan(costs, 3) == pytest.approx((4 / 3 - 1 / 9) * optimum(costs, 3))
    assert makespan([1, 1, 1, 1, 1, 1, 6], 2) > (4 / 3 - 1 / 6) * optimum([1, 1, 1, 1, 1, 1, 6], 2)


@given(problems(), st.sampled_from(list(ORDERS)), st.integers(1, 12), st.integers(1, 9))
def test_every_order_keeps_grahams_bound(problem, order, sms, sections):
    """Static rounds do so where costs never rise or never fall; the persistent order serves tiles of equal length."""
    schedule = Schedule(problem, order, problem.group * sections)
    costs = [problem.cost(tile.block, tile.batch) for tile in map(schedule.tile, range(problem.tiles))]
    if not costs or (order == "persistent" and costs not in (sorted(costs), sorted(costs, reverse=True))):
        return
    result = simulate(schedule, FewSms(sms))
    assert result.total == sum(costs)
    assert result.makespan <= graham_bound(costs, sms) + 1e-9
    assert result.makespan >= result.lower_bound
    check_no_overlap(result)


@given(problems(), st.integers(1, 12))
def test_default_order_keeps_grahams_bound_always(problem, sms):
    schedule = Schedule(problem, default_order(problem), problem.group * 3)
    costs = [problem.cost(tile.block, tile.batch) for tile in map(schedule.tile, range(problem.tiles))]
    if costs:
        assert simulate(schedule, FewSms(sms)).makespan <= graham_bound(costs, sms) + 1e-9


def check_no_overlap(result):
    by_sm = {}
    for span in result.spans:
        assert span.end > span.start >= by_sm.get(span.sm, 0.0)
        by_sm[span.sm] = span.end


def lognormal_lengths(count, median, deviation):
    rng = np.random.default_rng(0)
    return tuple((int(n), int(n)) for n in np.exp(rng.normal(np.log(median), deviation, count)).astype(int) + 1)


NAMED = {
    "full 8k": {"lengths": ((8192, 8192),), "batch": 8, "heads": 16},
    "causal 8k": {"lengths": ((8192, 8192),), "batch": 8, "heads": 16, "window": (None, 0)},
    "causal 32k": {"lengths": ((32768, 32768),), "batch": 2, "heads": 16, "window": (None, 0)},
    "causal 16k, grouped heads": {"lengths": ((16384, 16384),), "batch": 1, "heads": 64, "heads_kv": 8, "window": (None, 0)},
    "window 1k of 16k": {"lengths": ((16384, 16384),), "batch": 4, "heads": 16, "window": (1024, 0)},
    "window on both sides": {"lengths": ((16384, 16384),), "batch": 4, "heads": 16, "window": (512, 512)},
    "last 2k queries of 32k": {"lengths": ((2048, 32768),), "batch": 8, "heads": 32, "window": (None, 0)},
    "packed, lognormal around 1k": {"lengths": lognormal_lengths(64, 1024, 1.0), "batch": 64, "heads": 16, "window": (None, 0)},
    "packed, two long among 200 short": {
        "lengths": ((16384, 16384),) * 2 + ((512, 512),) * 200,
        "batch": 202,
        "window": (None, 0),
        "heads": 8,
    },
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", NAMED)
def test_longest_first_is_within_5_percent_of_the_least(name, backward):
    options = {"heads_kv": NAMED[name]["heads"], **NAMED[name]}
    problem = TileProblem(**options, tile=(128, 128), backward=backward)
    for arch in (get_arch("sm_80"), get_arch("sm_90a"), B200):
        if problem.tiles < 30 * int(arch.sm_count):
            continue
        result = simulate(Schedule.of(problem, "lpt", arch), arch)
        assert result.makespan <= 1.05 * result.lower_bound, arch.name
    assert problem.tiles >= 30 * 108  # at least one was tried


def test_row_order_is_not():
    """The bound above tells orders apart: two long sequences that come last."""
    lengths = NAMED["packed, two long among 200 short"]["lengths"][::-1]
    problem = TileProblem(lengths, len(lengths), 8, 8, window=(None, 0))
    row, lpt = (simulate(Schedule.of(problem, order, B200), B200) for order in ("row", "lpt"))
    assert row.makespan > 1.05 * row.lower_bound
    assert lpt.makespan <= 1.05 * lpt.lower_bound


def causal(backward=False, batch=4, tile=(128, 128)):
    return TileProblem(((8192, 8192),), batch, 16, 16, tile=tile, window=(None, 0), backward=backward)


def test_longest_first_gains_over_row_order():
    row, lpt = (simulate(Schedule.of(causal(tile=(256, 128)), order, B200), B200) for order in ("row", "lpt"))
    assert row.makespan / lpt.makespan == pytest.approx(512 / 479)
    assert lpt.balance > 0.98 > 0.95 > row.balance


def test_deterministic_order_waits_least_with_shortest_first():
    problem = causal(backward=True)
    results = {order: simulate(Schedule.of(problem, order, B200), B200, deterministic=True) for order in ORDERS}
    assert results["spt"].waiting == 0
    assert min(result.waiting for order, result in results.items() if order != "spt") > 0.1 * results["spt"].total
    assert results["spt"].makespan < 0.95 * results["lpt"].makespan
    for result in results.values():
        check_no_overlap(result)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [(None, 0), (None, None)], ids=["causal", "full"])
def test_what_determinism_costs(window, head_dim):
    """In the configurations that the Blackwell backward gets, of single CTAs and of pairs: at most 1.15 of the fast mode; 1.033 today."""
    steps = []
    for deterministic in (False, True):
        request = AttentionProblem.of("backward", "bfloat16", (head_dim, head_dim), window, 0.0, deterministic)
        config = blackwell_backward_config(request, B200)
        dims, tile = (head_dim, head_dim), (128, 128 * config.cluster)
        problem = TileProblem(((8192, 8192),), 4, 16, 16, head_dims=dims, tile=tile, window=window, backward=True)
        steps.append(simulate(Schedule.of(problem, config.order, B200), B200, deterministic, config.cluster).makespan)
    assert config.cluster == (2 if head_dim == 128 else 1)
    assert steps[1] <= 1.035 * steps[0] < 1.15 * steps[0]


def test_row_order_would_cost_more():
    """The bound above tells orders apart."""
    fast, deterministic = (simulate(Schedule.of(causal(backward=True), "row", B200), B200, flag).makespan for flag in (False, True))
    assert deterministic > 1.15 * fast


def test_waiting_by_hand():
    """Two key blocks, all queries: both reach the first query block at the same time, and the second in order adds to dQ a turn later."""
    problem = TileProblem(((512, 256),), tile=(128, 128), backward=True)
    first, second = simulate(Schedule(problem, "row", 1), B200, deterministic=True).spans
    assert (first.start, first.end, first.waiting) == (0, 5, 0)
    assert (second.start, second.end, second.waiting) == (0, 5 + TURN, TURN)


def test_sections_keep_the_operands_in_l2():
    """Longest first over all 128 heads at once reads K and V of 512 MB in turns; 13 or fewer heads fit."""
    problem = causal(batch=8)
    sections, all_heads = Schedule.of(problem, "lpt", B200), Schedule(problem, "lpt", 128)
    with_sections, without = simulate(sections, B200), simulate(all_heads, B200)
    assert sections.section < 16
    assert with_sections.l2_reuse > 0.95
    assert (1 - without.l2_reuse) > 2 * (1 - with_sections.l2_reuse)
    assert with_sections.makespan < 1.02 * without.makespan


def test_l2_reuse_by_hand():
    """Four query blocks of one head on one SM at a time: the first reads both key blocks from memory, the others from L2."""
    problem = TileProblem(((512, 256),), tile=(128, 128))
    assert simulate(Schedule(problem, "row", 1), FewSms(1)).l2_reuse == 1 - 2 / 8
    tiny = FewSms(1)
    tiny.l2 = 2 * 128 * 256 * 2  # half of it is one block: always the other one
    assert simulate(Schedule(problem, "row", 1), tiny).l2_reuse == 0


def test_small_batches_leave_sms_idle():
    """FlashAttention-1 has a block per head, FlashAttention-2 one per query tile."""
    problem = TileProblem(((8192, 8192),), 1, 16, 16)
    heads, tiles = simulate_heads(problem, B200), simulate(Schedule.of(problem, "persistent", B200), B200)
    assert heads.occupancy == 16 / 148
    assert tiles.occupancy == 1
    assert heads.makespan == 64 * 65
    assert heads.makespan / tiles.makespan == 64 / 7  # 1024 tiles on 148 SMs: 7 rounds
    many = TileProblem(((512, 512),), 64, 16, 16)
    assert simulate_heads(many, B200).makespan / simulate(Schedule.of(many, "persistent", B200), B200).makespan == 1


@pytest.mark.parametrize("arch", ARCHS)
def test_empty_problems(arch):
    for lengths, batch in ((((0, 5),), 3), (((5, 5),), 0)):
        result = simulate(Schedule.of(TileProblem(lengths, batch), "lpt", ARCHS[arch]), ARCHS[arch])
        assert (result.makespan, result.total, result.balance, result.l2_reuse) == (0, 0, 1, 0)


def test_refusals():
    with pytest.raises(UnsupportedError, match="not simulated"):
        simulate(Schedule.of(TileProblem(((1 << 31, 128),)), "lpt", B200), B200)
    with pytest.raises(UnsupportedError, match="backward"):
        simulate(Schedule.of(causal(), "lpt", B200), B200, deterministic=True)
