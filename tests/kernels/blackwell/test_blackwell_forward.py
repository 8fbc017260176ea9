"""The Blackwell forward on the virtual GPU: what it leaves alone, what schedules may not change, what it moves, what it skips."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from canaries import changed_canaries, embedded
from forward_call import Options, attention, compiled, scalars
from reported_cases import stepping_row_maximum

from fa4.arch import get_arch
from fa4.config import ELEMENT_BYTES, padded_head_dim
from fa4.problem import AttentionProblem, normalise_window
from fa4.reference import flash2_operand_traffic, standard_attention
from fa4.runtime import virtual
from fa4.testing import AttentionShape, compare, make_inputs, torch_attention
from fa4.testing.traffic import ForwardTraffic
from fa4.tuning import blackwell_forward_config
from fa4.vgpu import Gpu, Report

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]

ARCH = "sm_100a"
CORRECTION = range(8, 12)  # warps
CAUSAL, FULL = Options(causal=True), Options()


def tuned(inputs, causal):
    """The configuration for long queries, whatever the length."""
    problem = AttentionProblem("forward", "bfloat16", inputs.q.shape[3], inputs.v.shape[3], causal=causal)
    return blackwell_forward_config(problem, get_arch(ARCH))


def persistent(inputs):
    """Two CTAs share all tiles, and O is rescaled at every growth of a row's maximum."""
    return replace(tuned(inputs, False), ctas=2, rescale_threshold=0.0)


def bits(tensor):
    return tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


def assert_right(results, inputs, options):
    reference = standard_attention(*[x.double().numpy() for x in (inputs.q, inputs.k, inputs.v)], **options.keywords())
    baseline = torch_attention(inputs.q, inputs.k, inputs.v, **options.keywords())
    expected = zip(("out", "lse"), results, (reference.out, reference.lse), baseline, strict=True)
    found = [compare(name, *each) for name, *each in expected]
    assert all(each.ok for each in found), "\n".join(map(str, found))


# Canaries


@pytest.mark.parametrize(
    ("lengths", "dim"),
    [
        ((65, 129), 64),
        ((300, 77), 64),
        ((1, 17), 40),
        ((130, 70), (192, 128)),
        pytest.param((130, 70), (128, 96), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_nothing_beside_the_outputs_is_written(lengths, dim):
    """Rows, heads, columns and batches beside both outputs: between their elements too, where bounds of a buffer see nothing."""
    dim, dim_v = dim if isinstance(dim, tuple) else (dim, dim)
    inputs = make_inputs(AttentionShape(2, *lengths, 2, 1, dim, dim_v))
    whole_out, out = embedded((2, lengths[0], 2, dim_v), (1, 3, 1, 8), torch.bfloat16)
    whole_lse, lse = embedded((2, 2, lengths[0]), (1, 1, 5), torch.float32)
    artifact = compiled(inputs.q, inputs.v, CAUSAL, arch=ARCH)
    virtual.run(Gpu(ARCH), artifact, (inputs.q, inputs.k, inputs.v), (out, lse), scalars(CAUSAL, dim))
    assert_right((out.clone(), lse.clone()), inputs, CAUSAL)
    assert changed_canaries(whole_out, out) == 0
    assert changed_canaries(whole_lse, lse) == 0


def test_canaries_notice_a_byte():
    memory, inside = embedded((2, 3), (1, 2), torch.float32)
    inside[...] = math.nan
    assert changed_canaries(memory, inside) == 0
    memory[1, 1] = 0.0
    assert changed_canaries(memory, inside) == 4


# Schedules

SCHEDULES = [("round_robin", 0, "early"), ("random", 1, "late"), ("priority", 3, "early")]
HANDFUL = [
    (AttentionShape(1, 300, 200, 1, 1, 64), CAUSAL, torch.bfloat16),
    (AttentionShape(1, 140, 260, 3, 1, 64), FULL, torch.float16, persistent),
    (AttentionShape(1, 120, 400, 1, 1, 64), Options(window_size=(140, 30)), torch.bfloat16),
    (AttentionShape(1, 140, 300, 1, 1, 192, 128), CAUSAL, torch.bfloat16),
]
TWO_TILES_AND_LEFT_BOUND = (AttentionShape(1, 200, 400, 1, 1, 64), Options(window_size=(140, 30)), torch.bfloat16)


def assert_bitwise_equal_over(schedules, shape, options, dtype, configure=lambda inputs: None):
    inputs = make_inputs(shape, dtype)
    config = configure(inputs)
    expected = attention(Gpu(ARCH, checks="isa"), inputs.q, inputs.k, inputs.v, options, config)
    assert_right(expected, inputs, options)
    for schedule, seed, delay in schedules:
        gpu = Gpu(ARCH, schedule=schedule, seed=seed, delay=delay, resident=1 + seed % 3, checks="isa")
        results = attention(gpu, inputs.q, inputs.k, inputs.v, options, config)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(results, expected, strict=True)), (schedule, seed, delay)


@pytest.mark.parametrize("case", HANDFUL, ids=lambda case: str(case[:3]))
def test_schedules_do_not_change_a_bit(case):
    assert_bitwise_equal_over(SCHEDULES, *case)


@pytest.mark.slow
@pytest.mark.parametrize("delay", ["late", "early"])
@pytest.mark.parametrize("schedule", ["random", "priority"])
@pytest.mark.parametrize("case", [*HANDFUL, TWO_TILES_AND_LEFT_BOUND], ids=lambda case: str(case[:3]))
def test_twenty_seeds_do_not_change_a_bit(case, schedule, delay):
    assert_bitwise_equal_over([(schedule, seed, delay) for seed in range(20)], *case)


# Traffic and work


def rescale_decisions(traffic):
    """Of every correction warp, for each query tile and each key tile after the first."""
    config = traffic.config
    return traffic.heads * 4 * config.cluster * config.q_tiles * sum(max(0, tiles - 1) for tiles in traffic.key_tiles)


@dataclass
class Blocks:
    """An observer of virtual GPUs that counts how often warps, and how many lanes in all, entered a basic block."""

    entries: Counter = field(default_factory=Counter)
    lanes: Counter = field(default_factory=Counter)

    def block(self, cta, warp, block, lanes):
        self.entries[warp, block] += 1
        self.lanes[block] += lanes

    def launch(self, launch, program):
        pass

    def event(self, cta, warp, op, lanes, values):
        pass


@dataclass(frozen=True)
class Run:
    """One call, and what it did."""

    results: tuple
    report: Report
    traffic: ForwardTraffic
    blocks: Blocks
    code: list

    def instructions(self, index):
        """Those of a block."""
        block = self.code[index]
        return block.ops if block.end is None else (*block.ops, block.end)

    @property
    def exponentials(self):
        """How many the special-function unit computed of each row and key tile, the factor's included, on average."""
        traffic = self.traffic
        steps = traffic.heads * traffic.config.cluster * 4 * traffic.config.q_tiles * sum(traffic.key_tiles)
        found = (
            n * sum(op.opcode.startswith("ex2.") for op in self.instructions(i)) for (warp, i), n in self.blocks.entries.items() if warp < 8
        )
        return sum(found) / steps

    @property
    def rescales(self):
        """How often a correction warp multiplied O: what it stored to tensor memory, in units of O's columns."""
        columns = 0
        for (warp, index), n in self.blocks.entries.items():
            if warp in CORRECTION:
                found = (re.fullmatch(r"tcgen05\.st\.\S+\.x(\d+)\.b32", op.opcode) for op in self.instructions(index))
                columns += n * sum(int(match[1]) for match in found if match)
        rescales, rest = divmod(columns, padded_head_dim(self.traffic.shape.dim_v))
        assert rest == 0
        return rescales

    @property
    def skipped(self):
        """The share of decisions that were against a rescale."""
        return 1 - self.rescales / rescale_decisions(self.traffic)


def run(inputs, options, config=None, outputs=None, **gpu):
    blocks = Blocks()
    gpu = Gpu(ARCH, **gpu)
    gpu.observer = blocks
    (batch, seqlen_q, heads_q, d), (seqlen_k, heads_kv, dv) = inputs.q.shape, inputs.v.shape[1:]
    config = config or tuned(inputs, options.causal)
    artifact = compiled(inputs.q, inputs.v, options, config, ARCH)
    results = attention(gpu, inputs.q, inputs.k, inputs.v, options, artifact=artifact, outputs=outputs)
    assert_right([x.clone() for x in results], inputs, options)
    shape = AttentionShape(batch, seqlen_q, seqlen_k, heads_q, heads_kv, d, dv)
    traffic = ForwardTraffic(shape, config, normalise_window(options.window_size, options.causal))
    (kernel,) = artifact.kernels
    return Run(results, gpu.report(), traffic, blocks, virtual.parsed(artifact.ptx, artifact.cubin).kernel(kernel.name).blocks)


def assert_moves(found):
    """To the byte: by TMA FlashAttention-2's and the named terms, by threads the statistics and the zeros."""
    moved, t = Counter(found.report.bytes), found.traffic  # what did not happen is not listed
    assert moved["bulk load"] == t.loads
    assert moved["bulk store"] == t.stores
    assert moved["bulk load"] + moved["bulk store"] == t.flash2 + t.beyond_queries + t.beyond_keys - t.masked - t.without_keys
    assert moved["global"] == t.statistics + t.zeros


@pytest.mark.parametrize("n", [256, 768])
def test_traffic_is_that_of_flash_attention_2(n):
    """With Br the query rows of a CTA; see tests/reference/test_ledger.py for the algorithm itself."""
    shape = AttentionShape(1, n, n, 2, 1, 64)
    found = run(make_inputs(shape, torch.float16), FULL)
    assert_moves(found)
    assert found.traffic.loads + found.traffic.stores == ELEMENT_BYTES * 2 * flash2_operand_traffic(n, 64, found.traffic.rows)


@pytest.mark.parametrize(
    ("shape", "options", "dtype"),
    [
        (AttentionShape(1, 300, 700, 1, 1, 64), CAUSAL, torch.bfloat16),  # ragged tiles; a mask
        (AttentionShape(2, 300, 20, 2, 1, 64), CAUSAL, torch.bfloat16),  # a CTA without keys
        (AttentionShape(1, 100, 200, 1, 1, 64), FULL, torch.float16),  # the second query tile is empty
        (AttentionShape(1, 130, 300, 1, 1, 40), CAUSAL, torch.bfloat16),  # padded head dims
        (AttentionShape(1, 130, 300, 1, 1, 192, 128), CAUSAL, torch.bfloat16),  # two head dims
    ],
    ids=str,
)
def test_traffic_of_ragged_tiles(shape, options, dtype):
    assert_moves(run(make_inputs(shape, dtype), options))


def test_most_rescales_are_skipped_and_the_share_is_emulated():
    found = run(make_inputs(AttentionShape(1, 1024, 1024, 1, 1, 64)), CAUSAL)
    assert found.traffic.config.exp2.share == 0.25
    assert 96 <= found.exponentials <= 97
    assert rescale_decisions(found.traffic) == 4 * 2 * (1 + 3 + 5 + 7)
    assert found.skipped > 0.8


def test_threshold_zero_rescales_at_every_growth():
    inputs = make_inputs(AttentionShape(1, 260, 768, 2, 1, 64), torch.float16)
    found = run(inputs, FULL, persistent(inputs))
    assert found.report.launches[0].grid == (2, 1, 1)
    assert found.skipped < 0.7
    assert run(inputs, FULL).rescales == 0
    assert_moves(found)


def test_rescales_are_those_that_the_threshold_asks_for():
    """Rises by 8.1 and 7.9 in turn: every second one passes the threshold of 8, the others stay below it. One warp has rows."""
    found = run(stepping_row_maximum(8, 128, torch.bfloat16, rising=False), Options(causal=True, softmax_scale=1.0))
    assert found.rescales == 4
