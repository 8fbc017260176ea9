"""The main kernel of the Blackwell backward on the virtual GPU: right gradients, a fixed order of sums, what pairs save."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from backward_call import ARCH, PLAIN, Options, buffers, comparisons, compiled, gradients, problem_of, run, scalars
from canaries import changed_canaries, embedded

from fa4.arch import get_arch
from fa4.config import (
    TMEM_COLUMNS,
    BlackwellBackwardConfig,
    Exp2Policy,
    backward_columns,
    backward_shared_memory,
    blackwell_backward_refusal,
    check_blackwell_backward,
    padded_head_dim,
)
from fa4.errors import UnsupportedError
from fa4.problem import AttentionProblem
from fa4.testing import AttentionShape, make_inputs
from fa4.tuning import blackwell_backward_config
from fa4.vgpu import Gpu
from fa4.vgpu.isa import tcgen05

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]

CAUSAL, WINDOW = Options(causal=True), Options(window_size=(70, 20))
CAPPED = Options(window_size=(70, 20), softcap=2.0)


def single(problem):
    """As tuned, with one CTA for each key tile."""
    tuned = blackwell_backward_config(problem, get_arch(ARCH))
    return replace(tuned, cta_pair=False, stages=2) if tuned.cta_pair else tuned


def paired(problem):
    """As tuned, with pairs of CTAs."""
    return replace(blackwell_backward_config(problem, get_arch(ARCH)), cta_pair=True, stages=1)


def name_of(value):
    """Test ids without addresses."""
    return getattr(value, "__name__", str(value))


def assert_right(shape, options, configure, dtype=torch.bfloat16, **how):
    """Within the bound of float64, with every check on."""
    inputs = make_inputs(shape, dtype, layout=how.pop("layout", "contiguous"))
    config = configure(problem_of(inputs, options, how.get("deterministic", False)))
    results = gradients(Gpu(ARCH, checks="hazards"), inputs, options, config, **how)
    found = comparisons(results, inputs, options, how.get("dlse", False))
    assert all(each.ok for each in found), "\n".join(map(str, found))
    return results


@pytest.mark.parametrize(
    ("shape", "options", "configure", "dtype", "how"),
    [
        (AttentionShape(1, 300, 300, 2, 1, 64), CAUSAL, single, torch.bfloat16, {}),
        (AttentionShape(2, 65, 129, 2, 2, 64), CAUSAL, single, torch.bfloat16, {"layout": "padded", "dlse": True}),
        (AttentionShape(1, 1, 17, 3, 1, 64), CAUSAL, single, torch.bfloat16, {"layout": "heads_first"}),
        (AttentionShape(1, 200, 300, 1, 1, 112), CAPPED, single, torch.float16, {}),
        (AttentionShape(1, 130, 200, 1, 1, 40), replace(CAUSAL, softmax_scale=-0.3), single, torch.bfloat16, {}),
        (AttentionShape(1, 256, 130, 1, 1, 192, 128), CAUSAL, single, torch.bfloat16, {}),
        (AttentionShape(1, 300, 400, 1, 1, 192, 128), CAUSAL, paired, torch.bfloat16, {}),
        (AttentionShape(1, 300, 300, 1, 1, 128), PLAIN, paired, torch.bfloat16, {}),
        (AttentionShape(1, 300, 400, 2, 1, 128), CAUSAL, paired, torch.bfloat16, {"deterministic": True}),
        (AttentionShape(1, 300, 77, 1, 1, 128), CAUSAL, paired, torch.bfloat16, {"deterministic": True}),
    ],
    ids=name_of,
)
def test_gradients(shape, options, configure, dtype, how):
    assert_right(shape, options, configure, dtype, **how)


LENGTHS = [(65, 129), (128, 256), (300, 77), (1, 17), (256, 640)]
HEADS = [(1, 1), (4, 1), (3, 1)]
# Serial: with one CTA swizzles of 128, 32 and 32 bytes in the second part of dQ, or one part; in a pair of 64, 32 and 64, and with less dQ
# than dS in the memory that they share.
SERIAL = [*itertools.product([(192, 128), (144, 112), (240, 16), (64, 256)], [single])]
SERIAL += itertools.product([(192, 128), (160, 160), (64, 256)], [paired])
KERNELS = [*itertools.product([(64, 64), (96, 96), (128, 128)], [single, paired]), *SERIAL]


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "ordered"])
@pytest.mark.parametrize("options", [CAUSAL, PLAIN, WINDOW, CAPPED], ids=["causal", "full", "window", "softcap"])
@pytest.mark.parametrize(("dims", "configure"), KERNELS, ids=name_of)
def test_matrix(dims, options, configure, deterministic):
    """Every kernel with all lengths, which take turns with the head counts; kernels take turns with the dtypes."""
    dtype = [torch.bfloat16, torch.float16][(dims[0] // 32 + options.causal + deterministic) % 2]
    for i, (lengths, number) in enumerate(zip(LENGTHS, itertools.count(dims[0] // 32 + deterministic))):
        shape = AttentionShape(1 + i % 2, *lengths, *HEADS[number % 3], *dims)
        assert_right(shape, options, configure, dtype, deterministic=deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("emulated", [0, 16])
@pytest.mark.parametrize(
    ("dims", "configure"), [((64, 64), single), ((128, 128), paired), *itertools.product([(192, 128)], [single, paired])], ids=name_of
)
def test_any_share_of_exponentials(dims, configure, emulated):
    shape = AttentionShape(1, 300, 200, 2, 1, *dims)
    for options in (CAUSAL, CAPPED):
        assert_right(shape, options, lambda problem: replace(configure(problem), exp2=Exp2Policy(emulated)))


# What is not seen, and what is not there


def test_what_nothing_sees_is_exactly_zero():
    """Queries before the first key; keys that the window of no query reaches, in tiles of their own and beside others."""
    dq, _, _ = assert_right(AttentionShape(1, 300, 20, 1, 1, 64), CAUSAL, single)
    assert not dq[:, : 300 - 20].any()
    assert dq[:, 300 - 20 :].any()
    windowed = partial(assert_right, configure=single, dtype=torch.float16)  # in a kernel that test_gradients runs too
    _, dk, dv = windowed(AttentionShape(1, 20, 300, 1, 1, 96), replace(CAPPED, window_size=(30, 10)))
    first = 300 - 20 - 30
    for x in (dk, dv):
        assert not x[:, :first].any()
        assert x[:, first:].any()
    for x in windowed(AttentionShape(1, 200, 200, 1, 1, 96), replace(CAPPED, window_size=(-20, 10))):
        assert not x.any()


def test_nothing_beside_the_outputs_is_written():
    """Rows, heads, columns and batches beside dK and dV: between their elements too, where bounds of a buffer see nothing."""
    inputs = make_inputs(AttentionShape(2, 65, 129, 2, 1, 40))
    (whole_dk, dk), (whole_dv, dv) = (embedded(inputs.k.shape, (1, 3, 1, 8), torch.bfloat16) for _ in range(2))
    b = replace(buffers(inputs, CAUSAL), dk=dk, dv=dv)
    run(Gpu(ARCH), compiled(problem_of(inputs, CAUSAL)), inputs, b, scalars(CAUSAL, 40))
    assert dk.isfinite().all()
    assert dv.isfinite().all()
    assert changed_canaries(whole_dk, dk) == changed_canaries(whole_dv, dv) == 0


# The order of sums

SCHEDULES = [("round_robin", 0, "early"), ("priority", 1, "late"), ("priority", 2, "early"), ("random", 4, "late")]
SHAPES = {single: AttentionShape(1, 100, 400, 1, 1, 64), paired: AttentionShape(1, 100, 400, 1, 1, 128)}  # as tuned
SERIAL_PAIR = AttentionShape(1, 100, 400, 1, 1, 192, 128)


def sums(gpu, shape=None, options=CAUSAL, configure=single, deterministic=True, edit=None):
    """The accumulator of dQ, dK and dV."""
    shape = shape or SHAPES[configure]
    inputs = make_inputs(shape)
    problem = problem_of(inputs, options, deterministic)
    artifact = compiled(problem, configure(problem))
    if edit:
        artifact = replace(artifact, ptx=edit(artifact.ptx))
    b = buffers(inputs, options, deterministic)
    run(gpu, artifact, inputs, b, scalars(options, shape.head_dim))
    return [x.view(torch.int32 if x.dtype.itemsize == 4 else torch.int16) for x in (b.dq, b.dk, b.dv)]


def differing(schedules, **how):
    """Which of dq, dk, dv are not the same under all schedules."""
    gpus = (Gpu(ARCH, schedule=order, seed=seed, delay=delay, resident=2 + 2 * (seed % 3)) for order, seed, delay in schedules)
    first, *others = (sums(gpu, **how) for gpu in gpus)
    return {name for other in others for name, a, b in zip(("dq", "dk", "dv"), first, other, strict=True) if not torch.equal(a, b)}


@pytest.mark.parametrize("configure", [single, paired])
def test_deterministic_is_bitwise_equal_under_all_schedules(configure):
    """Five of them with strict priorities."""
    more = [("priority", seed, ["late", "early"][seed % 2]) for seed in (3, 4, 5)]
    assert differing(SCHEDULES + more, configure=configure) == set()


def test_fast_is_not():
    """Four key tiles add to dQ in the order in which they come; dK and dV are sums of one CTA."""
    assert differing(SCHEDULES, deterministic=False) == {"dq"}


def without_wait(ptx):
    """Nobody waits for his turn."""
    edited, count = re.subn(r"(ld\.acquire\.gpu.*\n\s*setp\.ge\.s32\s+%p\d+, %r\d+, )%r\d+;", r"\g<1>0;", ptx)
    assert count == 1
    return edited


def relaxed(strong):
    """The semaphore still counts, but hands nothing on."""

    def edit(ptx):
        assert strong in ptx
        return ptx.replace(strong, strong.rpartition(".")[0] + ".relaxed")

    return edit


def test_a_missing_wait_for_the_turn_gives_other_bits():
    assert differing(SCHEDULES, edit=without_wait) == {"dq"}


@pytest.mark.parametrize("configure", [single, paired])
@pytest.mark.parametrize(
    ("edit", "ordered"), [(None, True), (without_wait, False), (relaxed("ld.acquire"), False), (relaxed("red.release"), False)]
)
def test_semaphores_order_what_is_added(configure, edit, ordered):
    """By happens-before, in one schedule, whether or not bits differ in it."""
    gpu = Gpu(ARCH, checks="hazards")
    gpu.sums = []
    sums(gpu, configure=configure, edit=edit)
    assert (gpu.sums[0].unordered is None) == ordered


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "configure"), [(SHAPES[single], single), (SHAPES[paired], paired), (SERIAL_PAIR, paired)], ids=name_of)
@pytest.mark.parametrize("options", [CAUSAL, PLAIN], ids=["causal", "full"])
def test_deterministic_under_fifty_schedules(options, shape, configure):
    schedules = [("priority", seed, ["late", "early"][seed % 2]) for seed in range(50)]
    assert differing(schedules, shape=replace(shape, seqlen_k=600), options=options, configure=configure) == set()


def test_a_sequence_has_the_same_gradients_in_any_batch():
    inputs = make_inputs(AttentionShape(3, 140, 300, 2, 1, 64))
    whole = gradients(Gpu(ARCH), inputs, CAUSAL, deterministic=True)
    alone = replace(inputs, **{name: getattr(inputs, name)[1:2] for name in ("q", "k", "v", "dout", "dlse")})
    for a, b in zip(whole, gradients(Gpu(ARCH), alone, CAUSAL, deterministic=True), strict=True):
        assert torch.equal(a[1:2].view(torch.int16), b.view(torch.int16))


# What pairs save


def test_pairs_halve_operands_and_reductions(monkeypatch):
    """Per CTA: the bytes of operand B that its tensor core reads for S, dP, dV and dK, and the bytes it adds to dQ in global memory."""
    read, issue = Counter(), tcgen05.issue

    def counted(cta, multiply):
        if not multiply.form.transposed[0]:  # A of dQ alone is read along its rows
            read[pairs] += multiply.form.n * multiply.form.k * 2
        issue(cta, multiply)

    monkeypatch.setattr(tcgen05, "issue", counted)
    for pairs, configure in ((False, single), (True, paired)):
        dim = SHAPES[configure].head_dim
        inputs = make_inputs(AttentionShape(1, 128, 512, 1, 1, dim))  # whose queries see keys of every tile
        gpu = Gpu(ARCH)
        gradients(gpu, inputs, CAUSAL, configure(problem_of(inputs, CAUSAL, True)), deterministic=True)
        stored = inputs.k.numel() * 2 + inputs.v.numel() * 2
        tiles = 4  # of keys, each with one of queries
        assert (1 + pairs) * (gpu.report().bytes["bulk store"] - stored) == tiles * 128 * dim * 4
        assert (1 + pairs) * read[pairs] == tiles * 4 * 128 * dim * 2


# Configurations


@pytest.mark.parametrize(("cta_pair", "served"), [(False, 672), (True, 160)], ids=["single", "pair"])
def test_columns_are_apart_where_they_must_be(cta_pair, served):
    """For all head dims that are served; tensor memory holds what is still needed."""
    found = 0
    for d, dv in itertools.product(range(8, 257, 8), repeat=2):
        columns = backward_columns(d, dv, cta_pair)
        config = BlackwellBackwardConfig(1 if cta_pair or columns.serial else 2, cta_pair=cta_pair)
        try:
            check_blackwell_backward(config, d, dv)
        except UnsupportedError:
            continue
        found += 1
        starts = columns.dV, columns.dK, columns.S, columns.dQ
        sizes = padded_head_dim(dv), padded_head_dim(d), 128, padded_head_dim(d) // config.cluster
        dV, dK, S, dQ = (set(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))
        second = columns.second
        firsts = (
            columns.dP,
            columns.dP + second.within,
            columns.S,
            columns.dP,
        )  # of each half of the queries 32 columns of dP, 32 others, P, dS
        strides = second.dp, second.dp, second.p, second.ds
        of_half = [
            [set(range(first + half * by, first + half * by + 32)) for first, by in zip(firsts, strides, strict=True)] for half in (0, 1)
        ]
        (dP0, P0, dS0), (dP1, P1, dS1) = ((some | others, *rest) for some, others, *rest in of_half)
        dP, P, dS = dP0 | dP1, P0 | P1, dS0 | dS1
        assert (len(dP), len(P), len(dS)) == (128, 64, 64)
        assert not dV & dK
        assert not (dV | dK) & (S | dP | dQ)
        assert max(dV | dK | S | dP | dQ) < TMEM_COLUMNS
        assert P <= S
        assert sum(columns.parts) == len(dQ)
        assert dS0 <= dP0
        assert dS1 <= dP1
        if columns.serial:
            assert not set(range(columns.dP, columns.dP + 64)) & S  # the first product, when S may not have been read
            assert dP - S == set(range(columns.dP, columns.dP + 64))
            assert dP & S == set(range(columns.S + 32, columns.S + 96))
            assert not dP & P  # which dV may not have read
            assert min(columns.parts) > 0
            assert not set(range(columns.dQ + columns.parts[0], columns.dQ + len(dQ))) & S  # which waits for the first part to be read
        assert set(range(columns.S, columns.S + 64)) >= P0  # of each warpgroup where it alone has read
        assert set(range(columns.S + 64, columns.S + 128)) >= P1
        if not columns.serial:
            assert not S & dP
            assert not dQ & P
            assert cta_pair or not dQ & S
        if columns.dq_apart:
            assert not dQ & dS
    assert found == served


def test_what_is_served_has_a_configuration_that_fits():
    refused = [blackwell_backward_refusal(*dims) for dims in itertools.product(range(8, 257, 8), repeat=2)]
    assert 0 < sum(map(bool, refused)) < len(refused)
    for dims, refusal in zip(itertools.product(range(8, 257, 8), repeat=2), refused, strict=True):
        if not refusal:
            check_blackwell_backward(blackwell_backward_config(AttentionProblem("backward", "bfloat16", *dims), get_arch(ARCH)), *dims)


def test_budget_and_map_show_their_arithmetic():
    need = backward_shared_memory(BlackwellBackwardConfig(1, cta_pair=True), 128, 128)
    assert need.size == int(get_arch(ARCH).smem_per_block)
    assert need.arithmetic == (
        "3072 + 128 x (K 128 + V 128 + 1 stages x Q 128 + dO 128 + dS 128 + K of both 128 + dS to send 64) x 2 + 2 x dQ 128 x 16 x 4 "
        "= 232448 bytes"
    )
    need = backward_shared_memory(BlackwellBackwardConfig(1, cta_pair=True), 192, 128)
    assert (need.size, need.arithmetic) == (
        232448,
        "3072 + 128 x (K 192 + V 128 + Q 96 + dO 64 + dS 128 + K of both 192) x 2 + dQ 24576 = 232448 bytes",
    )
    assert backward_columns(192, 128).arithmetic == "dV 128 + dK 192 + dQ, or S and half of dP, 192 = 512 columns of tensor memory"


def test_bad_configurations_are_refused():
    for fields, argument in (
        ({"stages": 3}, "stages"),
        ({"stages": 2, "cta_pair": True}, "cta_pair"),
        ({"stages": 2, "registers": (200, 152, 72)}, "registers"),
        ({"stages": 2, "order": "persistent"}, "order"),
    ):
        with pytest.raises(ValueError, match=argument) as caught:
            BlackwellBackwardConfig(**fields)
        assert caught.value.argument == argument
    for config, dims, rule in (
        (BlackwellBackwardConfig(2), (256, 256), "768 columns of tensor memory, which has 512"),
        (BlackwellBackwardConfig(2), (192, 16), "no room to overlap tiles"),
        (BlackwellBackwardConfig(1, cta_pair=True), (192, 192), "576 columns of tensor memory, which has 512"),
        (BlackwellBackwardConfig(1, cta_pair=True), (224, 96), "bytes of shared memory, of 232448"),
        (BlackwellBackwardConfig(1, cta_pair=True), (48, 48), "no multiples of 32"),
    ):
        with pytest.raises(UnsupportedError, match=rule):
            check_blackwell_backward(config, *dims)
