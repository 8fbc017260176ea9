"""The Gantt chart is well-formed, and shows every tile where it ran."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from fa4.arch import get_arch
from fa4.schedule import Schedule, TileProblem, simulate
from fa4.schedule.picture import WAITING, gantt

SVG = "{http://www.w3.org/2000/svg}"
H100 = get_arch("sm_90a")


def strokes(text):
    """(colour, x, y, width) of every tile, in pixels."""
    lines = []
    for path in ElementTree.fromstring(text).iter(f"{SVG}path"):
        for x, y, width in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)", path.get("d")) if path.get("stroke", "").startswith("#") else []:
            lines.append((path.get("stroke"), float(x), float(y), float(width)))
    return lines


def test_every_tile_is_drawn_in_proportion():
    problem = TileProblem(((4096, 4096),), 1, 16, 16, window=(None, 0))
    result = simulate(Schedule.of(problem, "lpt", H100), H100)
    drawn = strokes(gantt({"lpt": result}))
    assert len(drawn) == problem.tiles
    assert max(x + width for _, x, _, width in drawn) == pytest.approx(900, abs=0.5)
    busy = 900 / result.makespan * result.total
    assert sum(width for *_, width in drawn) == pytest.approx(busy, rel=0.03)


def test_waiting_is_grey_and_titles_are_there():
    problem = TileProblem(((2048, 2048),), 1, 2, 2, window=(None, 0), backward=True)
    orders = {order: simulate(Schedule.of(problem, order, H100), H100, deterministic=True) for order in ("spt", "row")}
    text = gantt(orders)
    assert text.index(">spt: 17 steps") < text.index(">row: ")
    grey = [line for line in strokes(text) if line[0] == WAITING]
    assert grey
    assert not [line for line in strokes(gantt({"spt": orders["spt"]})) if line[0] == WAITING]


def test_nothing_to_draw():
    result = simulate(Schedule.of(TileProblem(((0, 5),)), "lpt", H100), H100)
    assert strokes(gantt({"lpt": result})) == []
