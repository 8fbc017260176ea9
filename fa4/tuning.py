"""Which configuration a kernel gets: tables by what limits it, each row with its reason. Pure functions, no cutlass, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fa4 import dispatch
from fa4.arch import Arch
from fa4.config import (
    AmpereForwardConfig,
    BlackwellForwardConfig,
    Exp2Policy,
    blackwell_forward_refusal,
    check_ampere_forward,
    padded_head_dim,
)
from fa4.errors import UnsupportedError
from fa4.problem import AttentionProblem


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


# D, Dv up to: as many stages as 227 KB hold, at most 6 (3 key tiles under way).
#
# Registers: both published budgets fill the 64 K of an SM. (192, 80, 48) is FlashAttention-4's. Moving some from softmax to correction,
# (184, 88, 56), is published as 2.1% faster without a mask and 0% with a causal one (AVO, arXiv 2603.24517, in its own kernel). By
# counts there is nothing between them: neither spills, and trips are as long, but for D 64 without a mask, where 184 spill one register.
#
# rescale: by counts "branch", which at D 128 issues 16 instructions of correction's 168 in a trip that moves no reference, where "select"
# issues all of its 160. The same ablation says 8.1% and 1.6% for a form without a branch; hardware has to decide.
_BLACKWELL = (
    (64, 64, BlackwellForwardConfig(stages=6), "163 KB"),
    (96, 96, BlackwellForwardConfig(stages=5), "219 KB"),
    (128, 128, BlackwellForwardConfig(stages=3), "227 KB, all there is"),
    (224, 128, BlackwellForwardConfig(stages=2, o_over_q=True), "up to 227 KB; with a place of its own O would leave room for one stage"),
)

_UNMASKED_REGISTERS = (184, 88, 56)


def blackwell_forward_config(problem: AttentionProblem, arch: Arch) -> BlackwellForwardConfig:
    """Configuration of the Blackwell forward kernel.

    Raises:
        UnsupportedError: the head dims do not fit tensor or shared memory; the message shows the arithmetic.
    """
    d, dv = problem.head_dim, problem.head_dim_v
    refusal = blackwell_forward_refusal(d, dv)
    if refusal:
        raise UnsupportedError("head_dim", (d, dv), refusal, f"the Ampere kernel serves it on {arch.name}")
    row = next(config for most_d, most_dv, config, _ in _BLACKWELL if d <= most_d and dv <= most_dv)
    # Tiles of equal length are shared out evenly, and the end of one overlaps the beginning of the next; unequal ones go to whoever is
    # free, longest first.
    row = replace(row, exp2=exp2_policy(problem, arch), ctas=int(arch.sm_count), l2_budget=int(arch.l2) // 2)
    if problem.causal or any(problem.window):
        return replace(row, order="lpt")
    return replace(row, order="persistent", registers=_UNMASKED_REGISTERS if max(d, dv) > 64 else row.registers)


def config(problem: AttentionProblem, arch: Arch) -> AmpereForwardConfig | BlackwellForwardConfig:
    """Configuration of the kernel that ``dispatch.kernel`` names for a request.

    Raises:
        UnsupportedError: none fits ``arch``.
    """
    if dispatch.kernel_target(problem, arch.family) == ("forward", "blackwell"):
        return blackwell_forward_config(problem, arch)
    return ampere_forward_config(problem, arch)


@dataclass(frozen=True)
class Exp2Row:
    """An emulation policy for mean padded head dims (D + Dv) / 2 up to ``width``, without and with a mask, and why."""

    width: int
    full: Exp2Policy
    masked: Exp2Policy
    reason: str


# "Model" is fa4.emulate_exp.cost, whose curves docs/exp2.md shows; a test holds these rows against it. "Published" is what the authors of
# FlashAttention-4 (arXiv 2603.05451) report: 10 to 25% of a row on B200, at head dim 128 19% without and 12.5% with a causal mask, and
# nothing on sm_103a, whose special-function unit is twice as fast. No figure here was measured on a GPU of ours.
_EXP2_SM_100A = (
    Exp2Row(
        96,
        Exp2Policy(4),
        Exp2Policy(4),
        "exp2 takes longer than the products; the model falls until 37.5% (D 96) or 45% (D 64), cut to the published 25%",
    ),
    Exp2Row(
        128,
        Exp2Policy(3),
        Exp2Policy(2),
        "exp2 ties with the products; the model is flat from 12.5% on, and both published shares lie there",
    ),
    Exp2Row(256, Exp2Policy(0), Exp2Policy(0), "the products take longer than exp2, with all overheads of the model"),
)


def exp2_policy(problem: AttentionProblem, arch: Arch) -> Exp2Policy:
    """Which share of a row's exponentials the forward kernel of ``arch`` emulates: none but on sm_100a."""
    if arch.name != "sm_100a":
        return Exp2Policy(0)
    width = (padded_head_dim(problem.head_dim) + padded_head_dim(problem.head_dim_v)) / 2
    row = next((row for row in _EXP2_SM_100A if width <= row.width), _EXP2_SM_100A[-1])
    return row.masked if problem.causal or any(problem.window) else row.full
