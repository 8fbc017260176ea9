"""Configurations of this project's forward kernel by the performance model: each switch and register budget against the tuned one.

    python benchmarks/configs.py [--arch sm_100a] [--head-dim 128 [--head-dim-v 128]] [--causal] [--seqlen 8192] [--only NAME ...]

Ratios of predicted speed, machine by machine of one ensemble; nothing is said of ratios whose interval reaches into 0.97 to 1.03.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from fa4 import tuning
from fa4.arch import get_arch
from fa4.config import RESCALES, AmpereForwardConfig, BlackwellForwardConfig, Exp2Policy
from fa4.errors import ArgumentError, Fa4Error
from fa4.perfmodel import Request, ensemble, predict, preset, ratio, record, verdict
from fa4.perfmodel.compare import Interval
from fa4.problem import AttentionProblem

REGISTERS = ((192, 80, 48), (184, 96, 48), (184, 88, 56), (176, 112, 48), (200, 64, 48))
EMULATED = (0, 2, 3, 4, 5, 6)


def tuned(request: Request) -> Any:
    """The configuration that a call of this request gets."""
    bounds = None, 0 if request.causal else None
    problem = AttentionProblem.of("forward", request.dtype, request.head_dims, bounds, 0.0, False)
    return tuning.config(problem, get_arch(request.arch), tuning.Queries.of(request.seqlen, 1))


def variants(config: Any, head_dims: tuple[int, int]) -> Iterator[tuple[str, Any]]:
    """(name, configuration) of every single change."""
    if isinstance(config, AmpereForwardConfig):
        for tile_m, tile_n, threads in ((128, 64, 128), (128, 64, 256), (128, 32, 128), (64, 64, 128), (128, 48, 128), (128, 128, 256)):
            yield f"tile {tile_m} x {tile_n}, {threads} threads", replace(config, tile_m=tile_m, tile_n=tile_n, threads=threads)
        yield "one stage", replace(config, stages=1)
        yield "two stages", replace(config, stages=2)
        return
    assert isinstance(config, BlackwellForwardConfig)
    for registers in REGISTERS:
        yield f"registers {registers}", replace(config, registers=registers)
    for count in EMULATED:
        yield f"exp2 emulated {count}/16", replace(config, exp2=Exp2Policy(count))
        yield f"exp2 emulated {count}/16, in the second half", replace(config, exp2=Exp2Policy(4 * count, 64, after=32))
    for keys in (32, 64, 96):
        yield f"early_keys {keys}", replace(config, early_keys=keys)
    for pair in (False, True):
        yield f"pair {pair}", tuning.with_pair(config, pair, *head_dims)
    for order in ("persistent", "lpt", "dynamic", "single"):
        yield f"order {order}", replace(config, order=order)
    for how in RESCALES:
        yield f"rescale {how}", replace(config, rescale=how)
    for field in fields(config):  # switches
        if isinstance(getattr(config, field.name), bool) and field.name not in ("cta_pair", "o_over_q"):
            switched: dict[str, Any] = {field.name: not getattr(config, field.name)}
            with suppress(ArgumentError):  # that goes only with other stages, or without a pair
                yield f"{field.name} {switched[field.name]}", replace(config, **switched)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="sm_100a")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--head-dim-v", type=int, default=0)
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--machines", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=[], help="variants whose name begins so")
    arguments = parser.parse_args()
    request = Request(arguments.arch, arguments.head_dim, arguments.head_dim_v, arguments.seqlen, causal=arguments.causal)
    machines = ensemble(preset(arguments.arch), arguments.machines)
    config = tuned(request)
    base = predict(request, record(request, config), machines)
    print(
        f"{request}\n{config}\ntuned: {Interval.of(base.tflops)} TFLOPS, main loop {base.steady:.3f}, spills {base.report.spills}",
        flush=True,
    )
    for name, other in variants(config, request.head_dims):
        if other == config or (arguments.only and not name.startswith(tuple(arguments.only))):
            continue
        try:
            found = predict(request, record(request, other), machines)
        except Fa4Error as error:
            print(f"{name}: {str(error).splitlines()[0][:110]}", flush=True)
            continue
        speed = ratio(found.tflops, base.tflops)
        print(f"{name}: {speed}, {verdict(speed)}; main loop {found.steady:.3f}, spills {found.report.spills}", flush=True)


if __name__ == "__main__":
    main()
