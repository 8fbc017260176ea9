"""Every order visits every tile exactly once, for any sizes, in whole numbers that do not overflow."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fa4.arch import ARCHS, get_arch
from fa4.errors import ArgumentError, UnsupportedError
from fa4.reference import visible
from fa4.schedule import ORDERS, Schedule, Tile, TileProblem, default_order
from fa4.schedule.order import MAX_GRID, l2_budget, section_size

BOUND = st.none() | st.integers(-40, 40)


@st.composite
def problems(draw, longest=300, packed=None):
    """Small problems: dense or packed, any mask, both directions."""
    packed = draw(st.booleans()) if packed is None else packed
    batch = draw(st.integers(2, 4) if packed else st.integers(0, 5))
    length = st.tuples(st.integers(0, longest), st.integers(0, longest))
    heads_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return TileProblem(
        lengths=tuple(draw(st.lists(length, min_size=batch, max_size=batch))) if packed else (draw(length),),
        batch=batch,
        heads=heads_kv * group,
        heads_kv=heads_kv,
        tile=draw(st.tuples(st.integers(1, 100), st.integers(1, 100))),
        window=draw(st.tuples(BOUND, BOUND)),
        backward=draw(st.booleans()),
    )


@st.composite
def schedules(draw, **options):
    problem = draw(problems(**options))
    return Schedule(problem, draw(st.sampled_from(list(ORDERS))), problem.group * draw(st.integers(1, 20)))


def all_tiles(problem):
    return {
        Tile(block, head, batch)
        for batch in range(problem.batch)
        for head in range(problem.heads)
        for block in range(problem.blocks(batch))
    }


def check_exactly_once(schedule):
    visited = [schedule.tile(index) for index in range(schedule.problem.tiles)]
    assert len(visited) == len(set(visited)) == schedule.problem.tiles
    assert set(visited) == all_tiles(schedule.problem)
    assert [schedule.index(tile) for tile in visited] == list(range(schedule.problem.tiles))


@given(schedules())
def test_every_tile_exactly_once(schedule):
    check_exactly_once(schedule)


def test_a_smaller_last_section_that_is_overlooked_is_caught(monkeypatch):
    schedule = Schedule(TileProblem(((300, 300),), batch=5, heads=2), "single", 4)
    check_exactly_once(schedule)
    monkeypatch.setattr("fa4.schedule.order.min", lambda size, _rest: size, raising=False)
    with pytest.raises(AssertionError):
        check_exactly_once(schedule)


LARGE = st.integers(1, 1 << 31)


@given(st.data())
def test_large_problems_there_and_back(data):
    """2^31 tokens, 4,194,304 keys: a map with an inverse, from as many numbers as there are tiles, meets each tile once."""
    seqlen, keys, batch = data.draw(LARGE), data.draw(st.integers(1, 4_194_304)), data.draw(st.integers(1, 1 << 16))
    heads_kv, group = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 16))
    window = data.draw(st.sampled_from([(None, None), (None, 0), (1024, 0), (5, None)]))
    problem = TileProblem(((seqlen, keys),), batch, heads_kv * group, heads_kv, tile=(64, 64), window=window)
    section = problem.group * data.draw(st.integers(1, 1 << 20))
    order = data.draw(st.sampled_from(["persistent", *([] if problem.tiles > MAX_GRID else ["lpt", "spt", "row"])]))
    check_there_and_back(Schedule(problem, order, section), data)


@given(st.data())
def test_large_packed_batches_there_and_back(data):
    lengths = tuple(data.draw(st.lists(st.tuples(LARGE, st.integers(1, 4_194_304)), min_size=2, max_size=6)))
    problem = TileProblem(lengths, len(lengths), 8, 1, tile=(64, 128), window=(None, 0))
    check_there_and_back(Schedule(problem, "persistent", 8), data)


def check_there_and_back(schedule, data):
    problem = schedule.problem
    for _ in range(8):
        index = data.draw(st.integers(0, problem.tiles - 1))
        tile = schedule.tile(index)
        assert schedule.index(tile) == index
        assert 0 <= tile.batch < problem.batch
        assert 0 <= tile.head < problem.heads
        assert 0 <= tile.block < problem.blocks(tile.batch)
        assert 0 < problem.cost(tile.block, tile.batch) <= 1 + -(-problem.length(tile.batch)[1] // problem.tile[1])


@pytest.mark.parametrize("arch", ARCHS)
def test_case_19(arch):
    """4,194,304 keys, 8 query heads to 1 key head: exact arithmetic."""
    problem = TileProblem(((4_194_304, 4_194_304),), 1, 8, 1, tile=(128, 128), window=(None, 0))
    assert problem.tiles == 32768 * 8
    assert problem.operand_bytes() == 1 << 31
    schedule = Schedule.of(problem, "lpt", get_arch(arch))
    assert schedule.section == 8  # one group, although its operands do not fit
    assert schedule.tile(0) == Tile(32767, 0, 0)
    assert problem.cost(32767) == 32768 + 1
    assert sum(problem.cost(block) for block in range(problem.blocks())) == 32768 * 32769 // 2 + 32768


def test_more_tokens_than_32_bits_number():
    problem = TileProblem(((1 << 31, 1 << 31),), 4, 8, 8, tile=(64, 64))
    assert problem.tiles == 1 << 30
    assert Schedule(problem, "lpt", 8).tile(problem.tiles - 1) == Tile((1 << 25) - 1, 7, 3)


@given(problems(longest=80, packed=False))
def test_steps_are_those_that_the_mask_leaves(problem):
    """Against the mask of the reference, element by element: the blocks between the first and the last with anything visible."""
    if not problem.batch:
        return
    sizes, (own, other) = problem.length(0), (problem.tile[problem.backward], problem.tile[not problem.backward])
    # -1 says open to the reference, and is a number here.
    window = tuple(None if bound is None else bound if bound != -1 else -0.9999 for bound in problem.window)
    seen = visible(np.arange(sizes[0]), np.arange(sizes[1]), offset=sizes[1] - sizes[0], window_size=window)
    seen = seen.T if problem.backward else seen
    for block in range(problem.blocks()):
        columns = np.flatnonzero(seen[block * own : block * own + own].any(axis=0)) // other
        steps = problem.steps(block)
        assert list(steps) == (list(range(columns[0], columns[-1] + 1)) if columns.size else [])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("window", [(None, 0), (None, 100), (500, None), (500, 0), (700, -3), (None, None)], ids=str)
def test_longest_and_shortest_first_are_sorted(window, backward):
    """With bounds on one side, or up to the diagonal, the closed form is the sorted order, within the one block that the end cuts."""
    problem = TileProblem(((2000, 2000),), 2, 3, 3, tile=(128, 128), window=window, backward=backward)
    for order, sign in (("lpt", -1), ("spt", 1)):
        schedule = Schedule(problem, order, 6)
        costs = [problem.cost(schedule.tile(index).block) for index in range(problem.tiles)]
        drops = [sign * (a - b) for a, b in itertools.pairwise(costs)]
        assert max(drops) <= 1
        assert sign * (costs[0] - costs[-1]) <= 0
        if None in window:
            assert max(drops) <= 0


@pytest.mark.parametrize("arch", ARCHS)
def test_sections_fit_the_l2(arch):
    l2 = int(ARCHS[arch].l2)
    for seqlen, heads, heads_kv, batch in ((1024, 16, 16, 4), (8192, 16, 4, 4), (32768, 64, 8, 2), (1 << 20, 8, 1, 1)):
        problem = TileProblem(((seqlen, seqlen),), batch, heads, heads_kv)
        section = section_size(problem, l2)
        groups = section // problem.group
        assert groups * problem.group == section <= heads * batch
        assert groups == 1 or groups * problem.operand_bytes() <= l2_budget(l2)
        rest = heads * batch % section
        assert rest == 0 or section - rest < -(-heads * batch // section) * problem.group  # evened out


def test_worked_section():
    """B200: half of 126 MB holds 15 operands of 4 MB; 64 heads make 5 sections of 13, 13, 13, 13 and 12."""
    assert section_size(TileProblem(((8192, 8192),), 4, 16, 16), int(get_arch("sm_100a").l2)) == 13


def test_default_orders():
    def order(deterministic=False, **options):
        return default_order(TileProblem(((512, 512),), 1, 2, 2, **options), deterministic)

    assert order() == "persistent"
    assert order(backward=True) == "single"
    assert order(window=(None, 0)) == order(window=(64, None)) == "lpt"
    assert order(window=(None, 0), backward=True) == "lpt"
    assert order(True, window=(None, 0), backward=True) == order(True, backward=True) == "spt"
    assert default_order(TileProblem(((5, 5), (9, 9)), 2)) == "lpt"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"batch": -1}, "batch"),
        ({"heads": 0}, "heads"),
        ({"heads": 3, "heads_kv": 2}, "heads"),
        ({"tile": (0, 64)}, "tile"),
        ({"lengths": ((-1, 5),)}, "lengths"),
        ({"lengths": ((1, 1), (2, 2)), "batch": 3}, "lengths"),
    ],
)
def test_bad_problems(arguments, name):
    with pytest.raises(ArgumentError, match=name):
        TileProblem(**{"lengths": ((5, 5),), **arguments})


def test_bad_schedules():
    problem = TileProblem(((1 << 31, 128),), 1 << 10, 8, 2, tile=(64, 64))
    with pytest.raises(ArgumentError, match="order='sorted'"):
        Schedule(problem, "sorted", 4)
    with pytest.raises(ArgumentError, match="section=3"):
        Schedule(problem, "persistent", 3)
    with pytest.raises(UnsupportedError, match="more than the 2147483647 blocks of a grid; use 'persistent'"):
        Schedule(problem, "lpt", 4)
    with pytest.raises(UnsupportedError, match="do not fit 64 bits"):
        TileProblem(((1 << 62, 1),), 64, 1, tile=(1, 1))
