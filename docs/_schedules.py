"""The figures of ``docs/schedules.md``: Gantt charts of two problems."""

from __future__ import annotations

from fa4.arch import get_arch
from fa4.schedule import Order, Schedule, TileProblem, simulate
from fa4.schedule.picture import gantt

ARCH = get_arch("sm_100a")


def causal() -> str:
    """Row order against longest first, forward, as in the first example of the page."""
    return _compare(TileProblem(((8192, 8192),), 4, 16, 16, tile=(256, 128), window=(None, 0)), ("row", "lpt"))


def deterministic() -> str:
    """Longest first against shortest first, deterministic backward of two sequences."""
    problem = TileProblem(((8192, 8192),), 2, 16, 16, tile=(128, 128), window=(None, 0), backward=True)
    return _compare(problem, ("lpt", "spt"), deterministic=True)


def _compare(problem: TileProblem, orders: tuple[Order, ...], deterministic: bool = False) -> str:
    return gantt({f"{order} order": simulate(Schedule.of(problem, order, ARCH), ARCH, deterministic) for order in orders})
