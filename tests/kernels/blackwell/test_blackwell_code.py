"""What the compiler makes of the Blackwell forward: registers, memories, the instructions of a trip by role. Nothing is executed."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import attention_modifiers as examples
import pytest
from golden import assert_recorded
from ptx_loops import loops

from fa4.arch import get_arch
from fa4.config import BlackwellForwardConfig, blackwell_columns, blackwell_forward_shared_memory, padded_head_dim, swizzle_columns
from fa4.errors import UnsupportedError
from fa4.inspection.ptx import opcodes
from fa4.kernels.blackwell.forward.kernel import BlackwellForward
from fa4.problem import AttentionProblem
from fa4.tuning import LONG, Queries, blackwell_forward_config, with_stages

pytestmark = pytest.mark.compile

GOLDEN = Path(__file__).with_name("resources.json")
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (True, True)}}


def problem(head_dim, mask="full", dtype="bfloat16", head_dim_v=None, softcap=False):
    return AttentionProblem("forward", dtype, head_dim, head_dim_v or head_dim, softcap=softcap, **MASKS[mask])


def case(task, arch="sm_100a", queries=LONG, **fields):
    """A task with its configuration: as tuned, or with other fields and as many stages as fit."""
    config = blackwell_forward_config(task, get_arch(arch), queries)
    if fields:
        config = with_stages(replace(config, v_apart=False, **fields), task.head_dim, task.head_dim_v)
    return task, arch, config


# Those that other tests run by default, so that they are compiled once.
DEFAULT = [
    case(problem(64, "causal")),
    case(problem(64, "causal"), queries=Queries(1)),
    case(problem(64, "causal"), cta_pair=True),
    case(problem(64, "causal"), queries=Queries(1, 4)),
    case(problem(64, "window"), queries=Queries(1)),
    case(problem(64, "full", "float16")),
    case(problem(64, "full", "float16", softcap=True), queries=Queries(1)),
    case(problem(40, "causal")),
    case(problem(128, "causal")),
    case(problem(192, "causal", head_dim_v=128)),
]
FULL = [
    case(problem(d, mask, dtype, head_dim_v=dv, softcap=softcap))
    for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128))
    for mask, dtype, softcap in (
        ("full", "bfloat16", False),
        ("causal", "bfloat16", False),
        ("causal", "float16", False),
        ("window", "bfloat16", False),
        ("window", "bfloat16", True),
    )
]
FULL += [case(problem(128, "causal"), "sm_103a"), case(problem(64, "full", "float16", softcap=True))]
FULL += [case(problem(d, mask, head_dim_v=dv), cta_pair=True) for d, dv in ((96, 96), (128, 128)) for mask in MASKS]
FULL += [case(problem(192, mask, head_dim_v=128), cta_pair=pair) for mask, pair in (("causal", False), ("window", True))]
FULL += [case(problem(64, "window", softcap=capped), queries=few) for few in (Queries(1), Queries(1, 4)) for capped in (False, True)]
FULL += [case(problem(d, mask, head_dim_v=dv), queries=Queries(1, 8)) for d, dv in ((128, 128), (192, 128)) for mask in MASKS]
CASES = [pytest.param(*each) for each in DEFAULT]
CASES += [pytest.param(*each, marks=pytest.mark.slow) for each in FULL if each not in DEFAULT]

# What is counted, by how its opcodes begin.
KINDS = {
    "mma": "tcgen05.mma",
    "commit": "tcgen05.commit",
    "tmem load": "tcgen05.ld",
    "tmem store": "tcgen05.st",
    "tmem wait": "tcgen05.wait",
    "ex2": "ex2.",
    "packed": ("fma.rn.f32x2", "add.rn.f32x2", "mul.rn.f32x2"),
    "cvt": "cvt.rn.",
    "select": "selp.f32",
    "barrier wait": "mbarrier.try_wait",
    "barrier arrive": "mbarrier.arrive",
    "fence": ("fence.", "tcgen05.fence"),
    "named barrier": ("bar.sync", "barrier.sync", "bar.arrive", "barrier.arrive", "barrier.cta"),
    "tma load": ("cp.async.bulk.tensor.4d.shared", "cp.async.bulk.tensor.5d.shared"),
    "tma store": ("cp.async.bulk.tensor.4d.global", "cp.async.bulk.tensor.5d.global"),
}


def identifier(value):
    if isinstance(value, str):
        return value
    if isinstance(value, BlackwellForwardConfig):
        return f"q{value.q_tiles}" + "pair" * value.cta_pair + f"h{value.pack_heads}"
    name = BlackwellForward(value, blackwell_forward_config(value, get_arch("sm_100a"))).name
    return name.removeprefix("fa4_blackwell_forward_").rpartition("_")[0]


def count(body):
    found = Counter()
    for opcode in opcodes("\n".join(body)):
        found.update(kind for kind, begins in KINDS.items() if opcode.startswith(begins))
    return {kind: found[kind] for kind in KINDS if found[kind]}


def role(counts):
    """Whose loop it is: only one role does each of these."""
    signs = {"mma": "mma", "load": "tma load", "softmax": "ex2", "correction": "tmem load"}
    return next(name for name, kind in signs.items() if kind in counts)


def trips(ptx):
    """Instructions of a trip of each loop over key tiles, by role, in the order of the text; branches that a trip may skip count too."""
    found = {"load": [], "mma": [], "softmax": [], "correction": []}
    for body in loops(ptx, KINDS["mma"], *KINDS["tma load"], KINDS["tmem load"]):
        counts = count(body)
        found[role(counts)].append(counts)
    return found


def tmem_columns(ptx):
    """Columns of tensor memory that the kernel allocates."""
    ((before, register),) = re.findall(r"\A(.*)tcgen05\.alloc\.\S+\s+\[\S+\], (%\w+);", ptx, re.DOTALL)
    return int(re.findall(rf"mov\.\w+\s+{re.escape(register)}, (\d+);", before)[-1])


def facts(compiled):
    """What resources.json records: [registers, stack, spill stores, spill loads, shared memory], columns, and trips that differ."""
    by_role = {name: [t for i, t in enumerate(found) if t not in found[:i]] for name, found in trips(compiled.ptx).items()}
    return {"resources": compiled.resources, "tmem": tmem_columns(compiled.ptx), **by_role}


@pytest.mark.parametrize(("task", "arch", "config"), CASES, ids=identifier)
class TestCompiled:
    def test_facts_are_the_recorded_ones(self, compile_ptx, task, arch, config):
        compiled = compile_ptx(task, arch, config)
        assert_recorded(GOLDEN, compiled, arch, facts(compiled))

    def test_loops(self, compile_ptx, task, arch, config):
        """One for each role, but for the softmax: with and without a mask. Query tiles share them but with a left bound."""
        found = trips(compile_ptx(task, arch, config).ptx)
        assert {name: len(loops) for name, loops in found.items() if name != "softmax"} == {"load": 1, "mma": 1, "correction": 1}
        each = 3 if task.window[0] else 2
        assert len(found["softmax"]) == each * (config.q_tiles if task.window[0] else 1)

    def test_products_and_copies_per_trip(self, compile_ptx, task, arch, config):
        found = trips(compile_ptx(task, arch, config).ptx)
        (mma,), (load,) = found["mma"], found["load"]
        assert mma["mma"] == config.q_tiles * (padded_head_dim(task.head_dim) + config.tile_n) // 16
        # K and V: one box each, or one for each block of columns where the last of them is not full.
        columns = (task.head_dim, padded_head_dim(task.head_dim)), (task.head_dim_v, padded_head_dim(task.head_dim_v) // config.cluster)
        widths = [(d, tile, swizzle_columns(tile)) for d, tile in columns]
        assert load["tma load"] == sum(tile // width if d % width else 1 for d, tile, width in widths)

    def test_share_of_exponentials(self, compile_ptx, task, arch, config):
        """Those that are not emulated, the factor's, and with softcap one for each score."""
        expected = config.tile_n * (1 - config.exp2.share) + 1 + config.tile_n * task.softcap
        assert {loop["ex2"] for loop in trips(compile_ptx(task, arch, config).ptx)["softmax"]} == {expected}

    def test_nothing_spills(self, compile_ptx, task, arch, config):
        compiled = compile_ptx(task, arch, config)
        assert compiled.resources[1:4] == [0, 0, 0]
        assert ".local" not in compiled.ptx

    def test_memory_is_the_budget(self, compile_ptx, task, arch, config):
        compiled = compile_ptx(task, arch, config)
        assert compiled.shared == blackwell_forward_shared_memory(config, task.head_dim, task.head_dim_v).size
        assert blackwell_columns(config, task.head_dim_v).end <= tmem_columns(compiled.ptx) == 512

    def test_name(self, compile_ptx, task, arch, config):
        name = compile_ptx(task, arch, config).name
        assert name == BlackwellForward(task, config).name + "_0"
        assert "cutlass" not in name


@pytest.mark.parametrize(
    ("task", "queries", "score", "mask"),
    [
        (problem(64, dtype="float16"), Queries(1), None, examples.same_document),  # which other tests run
        pytest.param(problem(64, dtype="float16"), LONG, None, examples.same_document, marks=pytest.mark.slow),
        pytest.param(problem(64, "causal"), LONG, examples.alibi, examples.same_document, marks=pytest.mark.slow),
        pytest.param(problem(64, "causal", "float16"), LONG, examples.alibi, None, marks=pytest.mark.slow),
        pytest.param(problem(128, "causal"), LONG, examples.alibi, None, marks=pytest.mark.slow),
        pytest.param(problem(128), LONG, None, examples.same_document, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_functions_on_scores_spill_nothing(compile_ptx, task, queries, score, mask):
    """A mask is asked before scores take registers: with the scores in registers a document mask spilled some 10 of them."""
    functions = {"score_mod": score and score.for_kernels(), "mask_mod": mask and mask.for_kernels()}
    compiled = compile_ptx(*case(replace(task, **functions), queries=queries))
    assert compiled.resources[1:4] == [0, 0, 0]
    assert ".local" not in compiled.ptx


def test_kernels_that_do_not_fit_are_refused():
    with pytest.raises(UnsupportedError, match="a multiple of 32"):
        BlackwellForward(problem(40), BlackwellForwardConfig(3, cta_pair=True))


def test_default_run_is_small():
    assert len(DEFAULT) <= 12


def test_loops_are_told_apart():
    inner = ["$L_2:", "tcgen05.ld.sync x;", "@%p bra $L_2;"]
    outer = ["$L_1:", "tcgen05.mma.x;", *inner, "bra.uni $L_1;"]
    assert loops("\n".join(outer), "tcgen05.ld", "tcgen05.mma") == [inner]
    assert loops("\n".join(outer), "ex2.") == []
    assert trips("\n".join(inner))["correction"] == [{"tmem load": 1}]
