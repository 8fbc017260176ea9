"""The device twin on the virtual GPU leads where the oracle leads."""

from __future__ import annotations

from functools import cache

import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_tensor
from order_probe import Locate, persist

from fa4.schedule import Schedule, TileProblem
from fa4.schedule.order import l2_budget, section_size
from fa4.vgpu import OutOfBoundsError, attach

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]

L2 = 8 << 20
MASKS = {"full": (None, None), "causal": (None, 0), "left": (64, None), "both": (64, 0)}


ARCH = "sm_80"


@pytest.fixture(scope="module", autouse=True)
def gpu():
    with attach(ARCH) as gpu:
        yield gpu


@pytest.fixture(scope="module")
def compiled(gpu):
    """The probe by (order, falling, wide), compiled once each; runs take numbers only."""

    @cache
    def get(order, falling, wide):
        out = make_fake_tensor(Int64, (cute.sym_int(), 3), (3, 1), assumed_align=8)
        return cute.compile(Locate(order, falling, wide, l2_budget(L2)), out, *[Int64(0)] * 6)

    return get


@pytest.fixture(scope="module")
def compiled_persist(gpu):
    out = make_fake_tensor(Int64, (cute.sym_int(), 4), (4, 1), assumed_align=8)
    return cute.compile(persist, out, *[Int64(0)] * 4, Int32(0), False)


def on_device(compiled, schedule, first, count):
    """Where ``count`` numbers from ``first`` lead; -7 stays where a number is none."""
    problem = schedule.problem
    out = torch.full((count, 3), -7, dtype=torch.int64)
    function = compiled(schedule.order, schedule.falling, schedule.wide)
    function(out, first, problem.blocks(), problem.heads, problem.batch, problem.operand_bytes(), problem.group)
    return out


def check(compiled, problem, order, first=0, count=None):
    schedule = Schedule(problem, order, section_size(problem, L2))
    count = problem.tiles if count is None else count
    out = on_device(compiled, schedule, first, count + 3)
    expected = [tuple(schedule.tile(index)) if index < problem.tiles else (-7, -7, -7) for index in range(first, first + count + 3)]
    assert torch.equal(out, torch.tensor(expected))


# (Sq = Sk, heads, heads_kv, batch), where half of 8 MB holds operands of 512 * Sk bytes: one section, several, a smaller last one.
SIZES = [(1, 1, 1, 1), (300, 6, 2, 3), (2000, 8, 8, 3), (3000, 6, 3, 5), (1700, 5, 1, 4), (9000, 4, 2, 2)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("order", ["row", "single", "lpt", "dynamic", "spt"])
def test_all_tiles(compiled, order, size):
    seqlen, heads, heads_kv, batch = size
    for backward in (False, True):
        for window in MASKS.values():
            problem = TileProblem(((seqlen, seqlen),), batch, heads, heads_kv, window=window, backward=backward)
            check(compiled, problem, order)


def test_sizes_cover_the_kinds_of_sections():
    kinds = set()
    for seqlen, heads, heads_kv, batch in SIZES:
        section = section_size(TileProblem(((seqlen, seqlen),), batch, heads, heads_kv), L2)
        rows = heads * batch
        kinds.add("one" if section >= rows else "smaller last" if rows % section else "equal")
    assert kinds == {"one", "smaller last", "equal"}


def test_numbers_beyond_32_bits(compiled):
    """2^31 queries, 4,194,304 keys, 2^33 tiles: at the start, around 2^31 and 2^32, and at the end."""
    problem = TileProblem(((1 << 31, 4_194_304),), 32, 8, 1, tile=(64, 128))
    assert problem.tiles == 1 << 33
    assert Schedule(problem, "persistent", 8).wide
    for first in (0, (1 << 31) - 32, (1 << 32) - 32, problem.tiles - 64):
        check(compiled, problem, "persistent", first, 64)


def test_case_19(compiled):
    problem = TileProblem(((4_194_304, 4_194_304),), 1, 8, 1, window=(None, 0))
    for first in (0, problem.tiles - 64):
        check(compiled, problem, "lpt", first, 64)


def test_as_many_tiles_as_a_grid_can_have(compiled):
    problem = TileProblem((((1 << 31) - 1, 128),), 1, 1, 1, tile=(1, 128))
    for first in (0, problem.tiles - 64):
        check(compiled, problem, "single", first, 61)


@pytest.mark.parametrize("sms", [1, 5, 1000])
def test_persistent_blocks_visit_every_tile_once(compiled_persist, sms):
    problem = TileProblem(((1000, 1000),), 3, 6, 2)
    schedule = Schedule(problem, "persistent", 6)
    out = torch.zeros((problem.tiles, 4), dtype=torch.int64)
    compiled_persist(out, problem.blocks(), problem.heads, problem.batch, schedule.section, sms)
    assert torch.equal(out, torch.tensor([(*schedule.tile(index), 1) for index in range(problem.tiles)]))


def test_a_wrong_section_is_caught(compiled, compiled_persist):
    """The comparison sees an oracle whose sections are one group larger; and the virtual GPU a write past the end."""
    problem = TileProblem(((3000, 3000),), 5, 6, 3)
    right = Schedule(problem, "single", section_size(problem, L2))
    wrong = Schedule(problem, "single", right.section + problem.group)
    out = on_device(compiled, right, 0, problem.tiles)
    assert torch.equal(out, torch.tensor([tuple(right.tile(i)) for i in range(problem.tiles)]))
    assert not torch.equal(out, torch.tensor([tuple(wrong.tile(i)) for i in range(problem.tiles)]))
    with pytest.raises(OutOfBoundsError):
        compiled_persist(torch.zeros((5, 4), dtype=torch.int64), problem.blocks(), problem.heads, problem.batch, 2, 1)
