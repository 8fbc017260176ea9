"""The Blackwell backward for some of the gradients: the bits of the kernel for all of them, with less work."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from backward_call import ARCH, Options, gradients, problem_of
from test_blackwell_backward import name_of, paired, single

from fa4.config import BlackwellBackwardConfig, Needed, backward_columns, padded_head_dim
from fa4.kernels.blackwell.backward.kernel import BlackwellBackward
from fa4.testing import AttentionShape, make_inputs
from fa4.vgpu import Gpu

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]

CAUSAL = Options(causal=True)
SUBSETS = [Needed(*map(bool, bits)) for bits in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1))]
BY_NAME = {needed.names: needed for needed in SUBSETS}
# Two key tiles or pairs, so that in any order of two additions dQ has the same bits; three query tiles, two heads of a group.
SHAPES = {
    single: AttentionShape(1, 300, 200, 2, 1, 64),
    paired: AttentionShape(1, 300, 400, 2, 1, 128),
}
SERIAL = AttentionShape(1, 300, 200, 2, 1, 192, 128)


def run(shape, configure, needed, deterministic):
    """((dq, dk, dv), report) with all checks."""
    inputs = make_inputs(shape)
    gpu = Gpu(ARCH, checks="hazards")
    config = replace(configure(problem_of(inputs, CAUSAL, deterministic)), needed=needed)
    return gradients(gpu, inputs, CAUSAL, config, deterministic=deterministic), gpu.report()


run_full = cache(lambda *case: run(*case[:2], Needed(), case[2]))


def products(shape, needed, cluster):
    """Instructions of the tensor core for a query tile and the keys of a cluster."""
    d, dv = padded_head_dim(shape.head_dim), padded_head_dim(shape.head_dim_v or shape.head_dim)
    columns = backward_columns(d, dv, cluster == 2)
    found = d // 16 + (1 + columns.serial) * (dv // 16) * needed.scores  # S, dP, by halves where tiles are serial
    return found + 8 * (needed.dv + needed.dk + len(columns.parts) * cluster * needed.dq)


def count(report, opcode):
    """Warp instructions that begin so."""
    return sum(number for name, number in report.by_opcode.items() if name.startswith(opcode))


def check(shape, configure, needed, deterministic):
    found, report = run(shape, configure, needed, deterministic)
    expected, full = run_full(shape, configure, deterministic)
    for name, mine, all_of_them in zip(("dq", "dk", "dv"), found, expected, strict=True):
        assert (mine is not None) == getattr(needed, name)
        assert mine is None or torch.equal(mine.view(torch.int16), all_of_them.view(torch.int16)), name
    cluster = 2 if configure is paired else 1
    products_of_all, mine = count(full, "tcgen05.mma"), count(report, "tcgen05.mma")
    tiles, rest = divmod(products_of_all, products(shape, Needed(), cluster))
    assert (tiles > 2, rest) == (True, 0)
    assert mine == tiles * products(shape, needed, cluster)
    reductions = count(full, "cp.reduce.async.bulk")
    assert reductions > 0
    assert count(report, "cp.reduce.async.bulk") == reductions * needed.dq
    stored = {"dk": full.ctas * 128 * shape.head_dim * 2, "dv": full.ctas * 128 * (shape.head_dim_v or shape.head_dim) * 2}
    added = full.bytes["bulk store"] - sum(stored.values())  # to dQ
    assert report.bytes["bulk store"] == added * needed.dq + sum(size for name, size in stored.items() if getattr(needed, name))
    assert report.instructions < full.instructions


# Kernels that tests/runtime/test_backward.py runs too.
DEFAULT = [
    (single, "dv", False),
    (single, "dq", True),
]


@pytest.mark.parametrize(("configure", "names", "deterministic"), DEFAULT, ids=name_of)
def test_bits_and_work(configure, names, deterministic):
    check(SHAPES[configure], configure, BY_NAME[names], deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("needed", SUBSETS, ids=lambda needed: needed.names)
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "ordered"])
@pytest.mark.parametrize(
    ("shape", "configure"),
    [(SERIAL, single), (SERIAL, paired), (SHAPES[single], single), (SHAPES[paired], paired), (SHAPES[paired], single)],
    ids=name_of,
)
def test_matrix(shape, configure, deterministic, needed):
    shape = replace(shape, seqlen_k=400 if configure is paired else 200)
    check(shape, configure, needed, deterministic)


def test_subsets_are_kernels_of_their_own():
    inputs = make_inputs(SHAPES[single])
    problem = problem_of(inputs, CAUSAL)
    names = {BlackwellBackward(problem, replace(single(problem), needed=needed)).name for needed in (Needed(), *SUBSETS)}
    assert len(names) == 1 + len(SUBSETS)


def test_nothing_needed_is_refused():
    with pytest.raises(ValueError, match="some gradient"):
        BlackwellBackwardConfig(1, needed=Needed(False, False, False))
