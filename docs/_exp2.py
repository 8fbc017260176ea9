"""The figures of ``docs/exp2.md``: error by degree, and clocks by emulated share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fa4.arch import ARCHS
from fa4.emulate_exp import COEFFICIENTS
from fa4.emulate_exp.coefficients import POLYNOMIAL_ERROR
from fa4.emulate_exp.cost import best_share, tile_cycles
from fa4.emulate_exp.twin import polynomial
from fa4.problem import AttentionProblem
from fa4.tuning import exp2_policy

PUBLISHED = {1: 3.9e-2, 2: 2.1e-3, 3: 8.8e-5, 4: 3.1e-6, 5: 1.4e-7}
"""FlashAttention-4's polynomials (arXiv 2603.05451)."""
TYPES = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Largest relative error of rounding."""
HEAD_DIMS = {64: "#d55e00", 128: "#0072b2"}


def error_by_degree(new_figure: Callable[..., Any]) -> Any:
    """Draw the largest error by degree beside the published ones, and the error of degree 3 over the fractions."""
    figure, (by_degree, curve) = new_figure(2, (10.0, 3.8))
    degrees = list(COEFFICIENTS)
    by_degree.plot(
        list(PUBLISHED), list(PUBLISHED.values()), "o", color="#444444", fillstyle="none", markersize=9, label="FlashAttention-4"
    )
    by_degree.plot(degrees, [POLYNOMIAL_ERROR[d] for d in degrees], "o-", color="#0072b2", markersize=4, label="here")
    for name, error in TYPES.items():
        by_degree.axhline(error, color="#999999", linestyle="--", linewidth=1)
        by_degree.annotate(f"rounding to {name}", (6, error), ha="right", va="bottom", fontsize=8)
    by_degree.set_yscale("log")
    by_degree.set(title="Largest relative error of p(f) in float32", xlabel="degree", ylabel="abs(p(f) / 2^f - 1)")
    by_degree.legend()

    f = np.linspace(0, 1, 401).astype(np.float32)
    errors = polynomial(f, COEFFICIENTS[3]) / np.exp2(f.astype(np.float64)) - 1
    curve.plot(f, [round(float(1e5 * value), 3) for value in errors], color="#0072b2")
    curve.axhline(0, color="#444444", linewidth=1)
    curve.set(title="Degree 3: 0 at f = 0, and equal peaks", xlabel="fraction f", ylabel="relative error, 1e-5")
    return figure


def cycles_by_share(new_figure: Callable[..., Any]) -> Any:
    """Draw the clocks of a tile by emulated share for each architecture, with the best share and the policy marked."""
    figure, panels = new_figure(len(ARCHS), (16.0, 3.2))
    shares = [i / 100 for i in range(61)]
    for panel, arch in zip(panels, ARCHS.values(), strict=True):
        for head_dim, colour in HEAD_DIMS.items():
            panel.plot(
                [100 * s for s in shares], [tile_cycles(arch, head_dim, s).total for s in shares], color=colour, label=f"D {head_dim}"
            )
            best = best_share(arch, head_dim)
            panel.plot([100 * best], [tile_cycles(arch, head_dim, best).total], "*", color=colour, markersize=11)
            for causal in (False, True):
                chosen = exp2_policy(AttentionProblem("forward", "bfloat16", head_dim, head_dim, causal=causal), arch).share
                panel.plot([100 * chosen], [tile_cycles(arch, head_dim, chosen).total], "o", color=colour, fillstyle="none", markersize=9)
        panel.set(title=arch.name, xlabel="emulated (%)")
        panel.set_ylim(bottom=0)
    panels[0].set_ylabel("clocks per tile of 128 x 128")
    panels[0].legend(loc="lower left")
    return figure
