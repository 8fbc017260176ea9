"""What the compiler makes of the Blackwell backward: registers, memories, the instructions of a trip by role. Nothing is executed."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import attention_modifiers as examples
import pytest
from golden import assert_recorded
from ptx_loops import loops
from score_functions import BENT, BOUNDED
from test_blackwell_code import KINDS, MASKS, tmem_columns

from fa4.arch import get_arch
from fa4.config import BlackwellBackwardConfig, backward_columns, backward_shared_memory, padded_head_dim
from fa4.inspection.ptx import opcodes
from fa4.kernels.blackwell.backward.kernel import BlackwellBackward
from fa4.problem import AttentionProblem
from fa4.tuning import blackwell_backward_config, with_pair

pytestmark = pytest.mark.compile

GOLDEN = Path(__file__).with_name("backward_resources.json")


def problem(head_dim, mask="full", dtype="bfloat16", head_dim_v=None, **features):
    return AttentionProblem("backward", dtype, head_dim, head_dim_v or head_dim, **MASKS[mask], **features)


# Those that other tests run by default, so that they are compiled once.
DEFAULT = [
    (problem(64, "causal"), "sm_100a"),
    (problem(128), "sm_100a"),
    (problem(128, "causal", deterministic=True), "sm_100a"),
    (problem(192, "causal", head_dim_v=128), "sm_100a"),
]
FULL = [
    (problem(d, mask, dtype, dv, **features), "sm_100a")
    for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128))
    for mask, dtype, features in (
        ("full", "bfloat16", {}),
        ("causal", "bfloat16", {}),
        ("causal", "bfloat16", {"deterministic": True}),
        ("causal", "float16", {}),
        ("window", "bfloat16", {"softcap": True}),
        ("window", "bfloat16", {"deterministic": True}),
    )
]
FULL += [(problem(128, "causal"), "sm_103a")]
# Pairs where a call gets one CTA.
FULL += [
    (task, arch, with_pair(blackwell_backward_config(task, get_arch(arch)), True, 192, 128)) for task, arch in FULL if task.head_dim == 192
]
CASES = [pytest.param(*case, None) for case in DEFAULT]
CASES += [pytest.param(*(*case, None)[:3], marks=pytest.mark.slow) for case in FULL if case not in DEFAULT]

MORE = {
    **KINDS,
    "packed": ("fma.rn.f32x2", "add.rn.f32x2", "sub.rn.f32x2", "mul.rn.f32x2"),
    "select": ("selp.f32", "selp.b32"),
    "reduce-add": "cp.reduce.async.bulk",
    "shared load": "ld.shared",
    "shared store": "st.shared",
    "send": "cp.async.bulk.shared::cluster.shared::cta",
    "acquire": "ld.acquire",
    "release": "red.release",
}
SIGNS = {"mma": "mma", "load": "tma load", "compute": "ex2", "reduce": "reduce-add"}
"""What only one role's loop has."""


def identifier(value):
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, BlackwellBackwardConfig):
        return "pair" if value else "tuned"
    name = BlackwellBackward(value, blackwell_backward_config(value, get_arch("sm_100a"))).name
    return name.removeprefix("fa4_blackwell_backward_")


def test_memory_table_of_the_page():
    page = Path(__file__).parents[3] / "docs" / "kernels" / "blackwell-backward.md"
    rows = re.findall(
        r"^\| (\d+), (\d+) \| (pair|one CTA)(, serial)? \| (\d+) \| (\d+) \|$", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) == 5
    for d, dv, kind, serial, size, columns in rows:
        dims = int(d), int(dv)
        tuned = blackwell_backward_config(problem(dims[0], head_dim_v=dims[1]), get_arch("sm_100a"))
        config = with_pair(tuned, kind == "pair", *dims)
        assert config == tuned or serial
        assert bool(serial) == backward_columns(*dims, config.cta_pair).serial
        assert int(size) == backward_shared_memory(config, *dims).size
        assert int(columns) == backward_columns(*dims, config.cta_pair).end


def trips(ptx):
    """Instructions of a trip of each loop over query tiles, by role, in the order of the text; branches that a trip may skip count too."""
    found = {role: [] for role in SIGNS}
    for body in loops(ptx, MORE["mma"], *MORE["tma load"], MORE["reduce-add"], "ex2."):
        counts = Counter()
        for opcode in opcodes("\n".join(body)):
            counts.update(kind for kind, begins in MORE.items() if opcode.startswith(begins))
        (role,) = [role for role, sign in SIGNS.items() if counts[sign]]
        found[role].append({kind: counts[kind] for kind in MORE if counts[kind]})
    return found


def facts(compiled):
    """What backward_resources.json records: [registers, stack, spill stores, spill loads, shared memory], columns, and trips."""
    return {"resources": compiled.resources, "tmem": tmem_columns(compiled.ptx), **trips(compiled.ptx)}


@pytest.mark.parametrize(("task", "arch", "config"), CASES, ids=identifier)
class TestCompiled:
    def test_facts_are_the_recorded_ones(self, compile_ptx, task, arch, config):
        compiled = compile_ptx(task, arch, config)
        assert_recorded(GOLDEN, compiled, arch, facts(compiled))

    def test_loops(self, compile_ptx, task, arch, config):
        """One for each role, but for compute: with and without a mask, and again with one where the left side is bounded."""
        found = trips(compile_ptx(task, arch, config).ptx)
        each = 3 if task.window[0] else 2
        assert {role: len(loops) for role, loops in found.items()} == {"mma": 1, "load": 1, "compute": each, "reduce": 1}
        without, *masked = sorted(found["compute"], key=lambda trip: trip["select"])  # in the text they come in any order
        assert without["select"] < masked[0]["select"]
        assert masked[0] == masked[-1]

    def test_products_and_copies_per_trip(self, compile_ptx, task, arch, config):
        config = config or blackwell_backward_config(task, get_arch(arch))
        found = trips(compile_ptx(task, arch, config).ptx)
        d, dv = map(padded_head_dim, (task.head_dim, task.head_dim_v))
        # S and dP over head dims, dV and dK over queries, dQ over keys of the cluster; dP in two parts where tiles are serial, and some dQ
        (mma,), (load,) = found["mma"], found["load"]
        columns = backward_columns(d, dv, config.cta_pair)
        assert mma["mma"] == (d + (1 + columns.serial) * dv + 2 * 128 + len(columns.parts) * config.cluster * 128) // 16
        assert load["tma load"] == (4 if config.cta_pair else 2)  # Q and dO, and of a pair their halves for dK and dV
        assert all(trip["ex2"] == 64 * (1 - config.exp2.share + task.softcap) for trip in found["compute"])

    def test_nothing_spills(self, compile_ptx, task, arch, config):
        compiled = compile_ptx(task, arch, config)
        assert compiled.resources[1:4] == [0, 0, 0]
        assert ".local" not in compiled.ptx

    def test_memory_is_the_budget(self, compile_ptx, task, arch, config):
        config = config or blackwell_backward_config(task, get_arch(arch))
        compiled = compile_ptx(task, arch, config)
        assert compiled.shared == backward_shared_memory(config, task.head_dim, task.head_dim_v).size
        assert backward_columns(task.head_dim, task.head_dim_v, config.cta_pair).end <= tmem_columns(compiled.ptx) == 512

    def test_name(self, compile_ptx, task, arch, config):
        assert "cutlass" not in compile_ptx(task, arch, config).name


# Kernels with functions on scores. The first is the one that other tests run by default.
MODIFIED = [(problem(64, dtype="float16", softcap=True, deterministic=True), BENT, examples.same_document)]
MORE_MODIFIED = [(problem(128, "window", deterministic=True), BOUNDED, examples.same_document)]
MORE_MODIFIED += [
    (problem(d, mask, head_dim_v=dv, softcap=mask == "window"), score, document)
    for d, dv in ((64, 64), (96, 96), (112, 112), (128, 128), (192, 128))
    for mask in ("causal", "window")
    for score in (None, examples.alibi, BENT, BOUNDED)
    for document in (None, examples.same_document)
    if score or document
]
MODIFIED_CASES = [pytest.param(*case, None) for case in MODIFIED]
MODIFIED_CASES += [pytest.param(*case, None, marks=pytest.mark.slow) for case in MORE_MODIFIED if case not in MODIFIED]
MODIFIED_CASES += [pytest.param(*case, True, marks=pytest.mark.slow) for case in MORE_MODIFIED if case[0].head_dim in (64, 192)]


@pytest.mark.parametrize(("task", "score", "mask", "pair"), MODIFIED_CASES, ids=str)
def test_functions_on_scores_spill_nothing(compile_ptx, task, score, mask, pair):
    """In chunks of 32 queries, or with addresses kept from tile to tile, some did."""
    functions = {"score_mod": score and score.for_backward(), "mask_mod": mask and mask.for_backward()}
    task = replace(task, **functions)
    config = blackwell_backward_config(task, get_arch("sm_100a"))
    compiled = compile_ptx(task, "sm_100a", config if pair is None else with_pair(config, pair, task.head_dim, task.head_dim_v))
    assert compiled.resources[1:4] == [0, 0, 0]
    assert ".local" not in compiled.ptx


@pytest.mark.slow
def test_slopes_cost_nothing_where_a_derivative_ignores_the_score(compile_ptx):
    """Where the slope depends on the score, P is compared with 0 for every query; the multiplication by 1 goes, and that with it."""
    found = {}
    cases = {"passed on": (problem(64, "causal"), examples.alibi, None), "by the score": MODIFIED[0]}
    for name, (task, score, mask) in cases.items():
        functions = {"score_mod": score.for_backward(), "mask_mod": mask and mask.for_backward()}
        text = compile_ptx(replace(task, **functions), "sm_100a").ptx
        found[name] = {opcode: count for opcode, count in Counter(opcodes(text)).items() if opcode in ("setp.neu.f32", "setp.eq.f32")}
    assert not found["passed on"]
    assert sum(found["by the score"].values()) == 3 * 64  # loops, queries
