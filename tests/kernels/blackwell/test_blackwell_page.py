"""Numbers on docs/kernels/blackwell-forward.md are those of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from golden import TOOLCHAIN
from test_blackwell_code import GOLDEN, problem

from fa4.arch import get_arch
from fa4.config import WARP, BlackwellForwardConfig, blackwell_columns, blackwell_forward_shared_memory
from fa4.kernels.blackwell.forward.kernel import BlackwellForward
from fa4.kernels.blackwell.forward.pipelines import GRAPH
from fa4.tuning import Queries, blackwell_forward_config, with_stages

PAGE = (Path(__file__).parents[3] / "docs" / "kernels" / "blackwell-forward.md").read_text(encoding="utf-8")
ARCH = get_arch("sm_100a")


def rows(first):
    """Cells of the table whose header starts with ``first``, below it."""
    block = re.search(rf"^\| ?{first} \|.*\n\|[-| ]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]


def head_dims(cell):
    d, dv = map(int, cell.split(","))
    return d, dv


def test_barriers():
    assert [(name.strip("`"), int(arrivals)) for name, arrivals, _ in rows("barrier")] == [(n, count) for n, (count, _) in GRAPH.items()]


def test_memory():
    table = rows(r"D, Dv \| CTAs")
    assert len(table) == 13
    for dims, ctas, q_tiles, stages, o_over_q, *cells in table:
        d, dv = head_dims(dims)
        config = with_stages(BlackwellForwardConfig(2, q_tiles=int(q_tiles), cta_pair=ctas == "2"), d, dv)
        assert (stages, o_over_q) == (str(config.stages), "yes" if config.o_over_q else "no")
        size = blackwell_forward_shared_memory(config, d, dv).size
        assert list(map(int, cells)) == [size, blackwell_columns(config, dv).end]
    assert blackwell_forward_shared_memory(BlackwellForwardConfig(stages=3), 128, 128).arithmetic in PAGE


def test_packing():
    """The longest queries of 8 and of 4 heads that are packed."""
    found = [max(n for n in range(1, 300) if Queries.of(n, group).pack_heads > 1) for group in (8, 4)]
    assert "with 8 heads up to\n  {} positions, with 4 up to {}".format(*found) in PAGE


def test_registers():
    (_, *masked), (_, *plain) = rows(r"\| softmax")
    for mask, cells in (("causal", masked), ("full", plain)):
        softmax, correction, other = blackwell_forward_config(problem(128, mask), ARCH).registers
        assert list(map(int, cells)) == [softmax, correction, other, 4 * WARP * (2 * softmax + correction + other)]


def test_trips():
    recorded = json.loads(GOLDEN.read_text())
    if TOOLCHAIN not in recorded:
        pytest.skip(f"no resources recorded for {TOOLCHAIN}")
    table = rows(r"D, Dv \| MMA")
    assert len(table) == 3
    for dims, *cells in table:
        d, dv = head_dims(dims)
        task = problem(d, "causal", head_dim_v=dv)
        facts = recorded[TOOLCHAIN][f"{BlackwellForward(task, blackwell_forward_config(task, ARCH)).name}_0 sm_100a"]
        (mma,), (load,), (correction,), softmax = facts["mma"], facts["load"], facts["correction"], facts["softmax"][-1]
        assert cells == [
            str(mma["mma"]),
            *(str(softmax[kind]) for kind in ("ex2", "packed", "cvt")),
            f"{softmax['tmem load']}, {softmax['tmem store']}",
            f"{correction['tmem load']}, {correction['tmem store']}",
            str(load["tma load"]),
        ]
