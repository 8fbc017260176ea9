"""Which configuration a kernel gets: tables by what limits it, each row with its reason. Pure functions, no cutlass, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fa4 import dispatch
from fa4.arch import Arch, get_arch
from fa4.config import (
    PAIR_COLUMNS,
    TMEM_LANES,
    AmpereForwardConfig,
    BlackwellBackwardConfig,
    BlackwellForwardConfig,
    Exp2Policy,
    PostprocessConfig,
    PreprocessConfig,
    backward_columns,
    blackwell_backward_refusal,
    blackwell_forward_refusal,
    blackwell_forward_shared_memory,
    check_ampere_forward,
    padded_head_dim,
)
from fa4.errors import UnsupportedError
from fa4.problem import AttentionProblem

KernelConfig = AmpereForwardConfig | BlackwellForwardConfig | BlackwellBackwardConfig | PreprocessConfig | PostprocessConfig


@dataclass(frozen=True)
class Row:
    """A configuration for padded head dims up to ``width`` (the larger of D and Dv), and why."""

    width: int
    config: AmpereForwardConfig
    reason: str


# No figure here was measured on a GPU. Registers are those of the compiler (tests/kernels/ampere/resources.json), shared memory is
# ampere_forward_shared_memory, and blocks per SM follow from both: 64 K registers, 164 KB (sm_80) or 100 KB (sm_86, 89, 120) per SM,
# of which a block takes 1 KB more than it asks for.
#
# 32 rows per warp (tile_m 128, 128 threads) read K and V from shared memory half as often as 16 rows, but O and S then take
# (Dv + tile_n) registers per thread instead of half of that.
_SM_80 = (
    Row(64, AmpereForwardConfig(128, 64, 2, 128), "48 KB, 2 blocks per SM; one barrier per tile"),
    Row(96, AmpereForwardConfig(128, 64, 2, 128), "72 KB, 2 blocks per SM; one barrier per tile"),
    Row(128, AmpereForwardConfig(128, 48, 2, 128), "80 KB, 2 blocks per SM; tile_n 64 spills 8 to 24 bytes with some masks"),
    Row(192, AmpereForwardConfig(128, 64, 2, 256), "144 KB, 1 block of 8 warps per SM; 32 rows per warp need more than 255 registers"),
    Row(256, AmpereForwardConfig(128, 64, 1, 256), "128 KB, 1 block of 8 warps per SM; 2 stages would need 192 KB"),
)

# Everything that has 99 KB per block, and the parts with more whose own kernels do not serve a request: one table that fits all.
_OTHERS = (
    Row(64, AmpereForwardConfig(128, 64, 2, 128), "48 KB, 2 blocks per SM"),
    Row(128, AmpereForwardConfig(64, 64, 1, 128), "48 KB, 2 blocks per SM; 32 rows per warp spill on sm_100a and sm_120a"),
    Row(192, AmpereForwardConfig(128, 64, 1, 256), "96 KB, 1 block of 8 warps per SM"),
    Row(256, AmpereForwardConfig(128, 32, 1, 256), "96 KB, 1 block of 8 warps per SM; 64 x 64 with 4 warps spills on sm_100a"),
)


def ampere_forward_config(problem: AttentionProblem, arch: Arch) -> AmpereForwardConfig:
    """Configuration of the Ampere forward kernel; neither masks nor softcap change it.

    Raises:
        UnsupportedError: no row fits the shared memory of ``arch``; the message shows the arithmetic.
    """
    width = max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    table = _SM_80 if arch.name == "sm_80" else _OTHERS
    row = next((row for row in table if width <= row.width), table[-1])
    check_ampere_forward(row.config, problem.head_dim, problem.head_dim_v, arch)
    return row.config


@dataclass(frozen=True)
class Queries:
    """What of a call's queries decides a configuration of the Blackwell forward, by counts of tiles of 128 rows.

    ``tiles`` of a head, or where ``pack_heads`` is above 1 of the heads that share a key head: 1, 2, or 3 for all above. It depends on
    neither batch nor lengths of keys, so a sequence gets the same kernel alone and in any batch.
    """

    tiles: int = 3
    pack_heads: int = 1

    @classmethod
    def of(cls, seqlen_q: int, group: int) -> Queries:
        """For ``seqlen_q`` positions and ``group`` query heads for each key head.

        Heads are packed where a tile of 128 rows would not be full, and the group takes fewer tiles so: each of them reads K and V.
        """
        places = 1 << (group - 1).bit_length()
        packed = _tiles(seqlen_q * places)
        if seqlen_q <= TMEM_LANES and places <= TMEM_LANES and packed < group:
            return cls(min(packed, 3), places)
        return cls(min(_tiles(seqlen_q), 3))


# Registers are (192, 80, 48), FlashAttention-4's. Moving some from softmax to correction, (184, 88, 56), is published as 2.1% faster
# without a mask and 0% with a causal one (AVO, arXiv 2603.24517, in its own kernel). Replayed there is nothing between them (D 128, both
# 1.03 of what 3 of 16 take with 184); and with 184 some softmax spills unless correction rescales 32 columns at a time instead of 64.
#
# ``rescale``: by counts "branch", which at D 128 issues 16 instructions of correction's 172 in a trip that moves no reference, where
# "select" issues all of its 160. The same ablation says 8.1% and 1.6% for a form without a branch; hardware has to decide.
LONG = Queries()


def _tiles(rows: int) -> int:
    return -(-rows // TMEM_LANES)


MOST_KEY_TILES = 3
"""Key tiles of K and V in the ring: one in use, one that has come, one that is to come."""


def with_stages(config: BlackwellForwardConfig, head_dim: int, head_dim_v: int) -> BlackwellForwardConfig:
    """With as many stages as shared memory holds, up to ``MOST_KEY_TILES``; O has a place of its own where that leaves three stages.

    With two, K of the next key tile could not be loaded before this one's S is complete: where it makes a third fit, V has its own.
    """
    limit = int(get_arch("sm_100a").smem_per_block)
    for o_over_q in (False, True):
        one, two = (
            blackwell_forward_shared_memory(replace(config, stages=n, o_over_q=o_over_q), head_dim, head_dim_v).size for n in (2, 3)
        )
        stages = min(2 + (limit - one) // (two - one), 2 * MOST_KEY_TILES)
        if stages >= 3 or o_over_q:
            break
    config = replace(config, stages=stages, o_over_q=o_over_q)
    apart = replace(config, stages=3, v_apart=True) if stages == 2 and not config.cta_pair else config
    return apart if blackwell_forward_shared_memory(apart, head_dim, head_dim_v).size <= limit else config


def with_pair(config: KernelConfig, pair: bool, head_dim: int, head_dim_v: int) -> KernelConfig:
    """With or without CTA pairs, and what goes with either; other kernels than the Blackwell ones have none and stay as they are.

    Where a thread of the backward reads dQ by parts of 96 columns at most, 136 registers hold them. There compute needs more than 144: of
    a pair it spills one with a window and a softcap, with serial tiles up to 26 with functions on scores. Where a thread reads whole rows
    of dQ, no exponential is emulated.
    """
    if isinstance(config, BlackwellForwardConfig):
        return with_stages(replace(config, cta_pair=pair, stages=2, v_apart=False), head_dim, head_dim_v)
    if isinstance(config, BlackwellBackwardConfig):
        by_parts = pair or backward_columns(head_dim, head_dim_v).serial
        if by_parts:
            return replace(config, cta_pair=pair, stages=1, registers=(152, 136, 72))
        return replace(config, cta_pair=pair, stages=2, registers=(144, 152, 72), exp2=Exp2Policy(0))
    return config


def blackwell_forward_config(problem: AttentionProblem, arch: Arch, queries: Queries = LONG) -> BlackwellForwardConfig:
    """Configuration of the Blackwell forward kernel for calls with such ``queries``.

    Raises:
        UnsupportedError: the head dims do not fit tensor or shared memory; the message shows the arithmetic.
    """
    d, dv = problem.head_dim, problem.head_dim_v
    refusal = blackwell_forward_refusal(d, dv)
    if refusal:
        raise UnsupportedError("head_dim", (d, dv), refusal, f"the Ampere kernel serves it on {arch.name}")
    masked = problem.causal or any(problem.window)
    row = BlackwellForwardConfig(2, q_tiles=min(queries.tiles, 2), pack_heads=queries.pack_heads, exp2=exp2_policy(problem, arch, queries))
    row = replace(row, ctas=int(arch.sm_count) // 2 * 2, l2_budget=int(arch.l2) // 2)
    if row.q_tiles == 1:  # softmax has the registers of a warpgroup that has no tile; with 192 a window on both sides spills
        row = replace(row, registers=(240, 80, 48))
    elif not masked or max(d, dv) > 128:  # replayed: 2 to 5% faster; with a mask up to D 128 it is not
        row = replace(row, early_keys=64)
    if _pays_pair(problem, queries):
        row = replace(row, cta_pair=True)
    row = with_stages(row, d, dv)
    # The end of a tile overlaps the beginning of the next. Tiles of equal length are shared out evenly; unequal ones go to whoever is free,
    # longest first.
    return replace(row, order="dynamic" if masked else "persistent")


def blackwell_backward_config(problem: AttentionProblem, arch: Arch) -> BlackwellBackwardConfig:
    """Configuration of the Blackwell backward kernel: pairs of CTAs from D 96 to 128, single ones else.

    For a tile of 128 queries and keys the products take 20 D clocks, shared memory 22 D + 512 with a single CTA and 14 D + 768 with a pair
    (docs/kernels/blackwell-backward.md): a pair saves 20% at D 96, 23% at D 128, and 13% at D 64, where waiting for the other CTA weighs
    more; flash-attn-4 pairs from D 128 on. At (192, 128), replayed, one CTA is 1.08 to 1.15 times as fast as a pair. Nothing of it was
    measured on a GPU of ours. A single CTA has two tiles of Q where S and dP of two tiles fit. Longest tiles first where they differ;
    deterministic, shortest first, so that tiles seldom wait (docs/schedules.md).

    Raises:
        UnsupportedError: the head dims do not fit tensor or shared memory; the message shows the arithmetic.
    """
    d, dv = problem.head_dim, problem.head_dim_v
    refused = blackwell_backward_refusal(d, dv)
    if refused:
        raise UnsupportedError("head_dim", (d, dv), refused, "backend 'cpu' serves it")
    masked = problem.causal or any(problem.window)
    order = "spt" if problem.deterministic else "lpt" if masked else "single"
    padded = padded_head_dim(d), padded_head_dim(dv)
    pair = 96 <= padded[0] <= TMEM_LANES and not any(dim % PAIR_COLUMNS for dim in padded)
    alone = BlackwellBackwardConfig(1, order=order, l2_budget=int(arch.l2) // 2, exp2=exp2_policy(problem, arch))
    row = with_pair(alone, pair, d, dv)
    assert isinstance(row, BlackwellBackwardConfig)
    return row


def _pays_pair(problem: AttentionProblem, queries: Queries) -> bool:
    """Whether two CTAs should multiply together.

    By counts: above D 128 a CTA alone has a ring of two tiles, K and V of one key tile, so nothing of the next is loaded ahead; that of a
    pair, whose slots are half as large, has four or five. Per query it loads half of the bytes of K and V, and per key tile the tensor core
    reads 88 KB of shared memory instead of 128 KB (D 192). Up to 128 the ring holds three tiles or more, and flash-attn-4, which has pairs
    at 128, too, turns them off in code that CUDA 12.9 generates: published as about 18% slower (flash-attention 2461). With a mask the 512
    rows visit keys that only some of them see: replayed at (192, 128), causal, a pair is 0.96 times as fast as one CTA at 1k tokens, 1.07
    and 1.13 times at 4k and 16k. Up to 256 rows one of the CTAs would have none; the columns of a product come in 32s.
    """
    wide = max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)) > 128
    visible = not any(problem.window) and not (problem.causal and problem.modified)
    long = queries.tiles > 2 and queries.pack_heads == 1
    return wide and long and visible and padded_head_dim(problem.head_dim_v) % PAIR_COLUMNS == 0


def config(problem: AttentionProblem, arch: Arch, queries: Queries = LONG) -> KernelConfig:
    """Configuration of the kernel that ``dispatch.kernel`` names for a request; without ``queries`` for long ones.

    Raises:
        UnsupportedError: none fits ``arch``.
    """
    if problem.direction == "preprocess":
        return PreprocessConfig()
    if problem.direction == "postprocess":
        return PostprocessConfig()
    target = dispatch.kernel_target(problem, arch.family)
    if target == ("forward", "blackwell"):
        return blackwell_forward_config(problem, arch, queries)
    if target == ("backward", "blackwell"):
        return blackwell_backward_config(problem, arch)
    return ampere_forward_config(problem, arch)


def around_backward(problem: AttentionProblem, dlse: bool = False) -> tuple[tuple[AttentionProblem, KernelConfig], ...]:
    """What is launched before and after the main kernel of a backward problem, and how; ``dlse`` says whether lse has a gradient.

    Both know dtype and one head dim alone, so that requests share them.
    """
    before = AttentionProblem("preprocess", problem.dtype, problem.head_dim_v, problem.head_dim_v)
    after = AttentionProblem("postprocess", problem.dtype, problem.head_dim, problem.head_dim)
    return (before, PreprocessConfig(dlse)), (after, PostprocessConfig())


def kernels(problem: AttentionProblem, arch: Arch) -> list[tuple[AttentionProblem, KernelConfig]]:
    """All kernels that serve a request, each with its configuration.

    Raises:
        UnsupportedError: none fits ``arch``.
    """
    found = [(problem, config(problem, arch))]
    if problem.direction == "backward":
        found += [*around_backward(problem), around_backward(problem, dlse=True)[0]]
    return found


@dataclass(frozen=True)
class Exp2Row:
    """An emulation policy for mean padded head dims (D + Dv) / 2 up to ``width``, without and with a mask, and why.

    ``modified`` is that with a mask where registers are short: with functions on scores, or two query tiles of packed heads.
    """

    width: int
    full: Exp2Policy
    masked: Exp2Policy
    modified: Exp2Policy
    reason: str


# "Replayed" is fa4.perfmodel (benchmarks/configs.py, 3 machines, nvidia-cutlass-dsl 4.8.1 with CUDA 12.9). "Model" is
# fa4.emulate_exp.cost, whose curves docs/exp2.md shows; a test holds these rows against it. "Published" is what the authors of
# FlashAttention-4 (arXiv 2603.05451) report: 10 to 25% of a row on B200, at head dim 128 19% without and 12.5% with a causal mask, and
# nothing on sm_103a, whose special-function unit is twice as fast. No figure here was measured on a GPU of ours.
# In the forward only pairs of the second half of a row of 128 keys are emulated: the first half of P, with which the next product begins,
# is there sooner, and emulation has the registers of scores that are done with.
# Functions on scores leave no registers for that: some kernels spill, which spill nothing where the share is spread over the row.
_SPREAD = Exp2Policy(4)
_QUARTER = Exp2Policy(16, 64, after=32)
_MORE = Exp2Policy(20, 64, after=32)
_EXP2_SM_100A = (
    Exp2Row(
        96,
        _QUARTER,
        _QUARTER,
        _SPREAD,
        "exp2 takes longer than the products; the model falls until 37.5% (D 96) or 45% (D 64); replayed at D 64, 31% are 1% less without "
        "a mask and 5% less with one; spread over the row, a quarter is 1 to 2% less",
    ),
    Exp2Row(
        128,
        _MORE,
        _QUARTER,
        Exp2Policy(3),
        "in the model exp2 ties with the products, flat from 12.5% on; replayed as a pair, without a mask, 31% are 1.03 to 1.07 times as "
        "fast as 25%; with a mask 25% are 1.01 to 1.03 times as fast as 19%, and 31% no faster",
    ),
    Exp2Row(
        256,
        _MORE,
        _QUARTER,
        Exp2Policy(0),
        "in the model the products take longer than exp2, but they wait for softmax: replayed as a pair, 31% are 1.04 to 1.05 times as "
        "fast as 25%; with a mask 25% are 1.02 to 1.09 times as fast as none",
    ),
)

_EXP2_SM_100A_BACKWARD = Exp2Policy(4)
"""Replayed, without and with a causal mask: 1.02 times as fast as with none at D 128, 1.03 times at (192, 128). Not where tiles neither
overlap nor come in parts: at D 64 it would be 1.00 and 1.02, and the deterministic mode 0.91 of the fast one at 16k tokens instead of 0.92.
Functions on scores need the registers: with 4 some of their kernels spilled."""


def exp2_policy(problem: AttentionProblem, arch: Arch, queries: Queries = LONG) -> Exp2Policy:
    """Which share of a row's exponentials the Blackwell kernels emulate: none but on sm_100a.

    In the backward that of CTA pairs and serial tiles; ``with_pair`` sets it to none elsewhere.
    """
    if arch.name != "sm_100a":
        return Exp2Policy(0)
    if problem.direction == "backward":
        return Exp2Policy(0) if problem.modified else _EXP2_SM_100A_BACKWARD
    width = (padded_head_dim(problem.head_dim) + padded_head_dim(problem.head_dim_v)) / 2
    row = next((row for row in _EXP2_SM_100A if width <= row.width), _EXP2_SM_100A[-1])
    masked = problem.causal or any(problem.window)
    if problem.modified:
        return row.modified if masked else _SPREAD
    if masked and queries.tiles > 1 and queries.pack_heads > 1:
        return row.modified
    return row.masked if masked else row.full
