"""``fa4 verify``: run a kernel, of this project or of a peer, on the virtual GPU over a matrix of requests and compare with float64."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

from fa4._table import format_table

_MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window (40, 9)": {"window_size": (40, 9)},
    "softcap 10": {"softcap": 10.0},
}
_LENGTHS = [(1, 17), (65, 129), (192, 320), (300, 77), (5, 0)]
_HEADS = (3, 1)
_BITS_LENGTHS = (140, 400)  # four key tiles add to a query tile: with two the order changes nothing


def add_command(commands: Any) -> None:
    """Add ``fa4 verify``."""
    parser = commands.add_parser("verify", help="run a kernel on the virtual GPU over a matrix, print worst errors")
    parser.add_argument("--arch", default="sm_80", help="architecture (default: %(default)s)")
    parser.add_argument("--head-dim", type=_integers, help="head dims, separated by commas (default: 64; all of a peer)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and schedule (default: %(default)s)")
    parser.add_argument("--schedule", default="round_robin", choices=("round_robin", "random", "priority"), help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=1, help="that share each grid (default: %(default)s)")
    parser.add_argument(
        "--peer", choices=("flash-attn-4",), help="kernels of others, which must be installed, as witnesses of the virtual GPU"
    )
    parser.add_argument(
        "--direction", default="forward", choices=("forward", "backward"), help="backward: gradients too (default: %(default)s)"
    )
    help_ = "deterministic kernels, and their bits over so many schedules (default: 5)"
    parser.add_argument("--deterministic", type=int, nargs="?", const=5, metavar="RUNS", help=help_)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """A row for each head dim and mask: the worst of its lengths. Exit status 1 where an error leaves its bound."""
    import fa4

    if arguments.peer:
        with fa4.settings(vgpu_processes=arguments.processes):
            return _run_peer(arguments)
    print(f"{arguments.direction}, {arguments.dtype}, {arguments.arch} on the virtual GPU,", end=" ")
    print(f"{arguments.schedule} schedule, seed {arguments.seed}")
    print(f"lengths (Sq, Sk): {', '.join(map(str, _LENGTHS))}; {_HEADS[0]} query heads to {_HEADS[1]} key head")
    rows = []
    wrong = 0
    with fa4.settings(vgpu_seed=arguments.seed, vgpu_schedule=arguments.schedule, vgpu_processes=arguments.processes):
        for head_dim in arguments.head_dim or [64]:
            for mask, options in _MASKS.items():
                worst = _worst(arguments, head_dim, options)
                wrong += sum(not ok for ok, _ in worst.values())
                rows += [[f"D {head_dim}, {mask}", name, *cells] for name, (_, cells) in worst.items()]
    print(format_table(["request", "result", "worst error", "bound", "ulp", "at (Sq, Sk) index", ""], rows))
    print(f"{wrong} of {len(rows)} results leave their bound" if wrong else f"all {len(rows)} results within their bound")
    differing = _check_bits(arguments) if arguments.deterministic is not None else 0
    return 1 if wrong or differing else 0


def _check_bits(arguments: argparse.Namespace) -> int:
    """A line for each request, as it is done: whether all schedules gave the same bits, or what differs; how many requests differ."""
    import torch

    from fa4 import determinism
    from fa4.testing import AttentionShape, make_inputs

    shape = AttentionShape(1, *_BITS_LENGTHS, *_HEADS)
    differing = 0
    for head_dim in arguments.head_dim or [64]:
        inputs = make_inputs(replace(shape, head_dim=head_dim), getattr(torch, arguments.dtype), seed=arguments.seed)
        for mask, options in _MASKS.items():
            run = partial(_results, arguments, options)
            seeds = range(arguments.seed, arguments.seed + arguments.deterministic)
            found = determinism.check(run, (inputs,), runs=arguments.deterministic, seeds=seeds)
            differing += not found or found.unordered is not None
            print(f"D {head_dim}, {mask}, lengths {_BITS_LENGTHS}: {found}", flush=True)
    return differing


def _results(arguments: argparse.Namespace, options: dict[str, Any], inputs: Any) -> dict[str, Any]:
    """Out and lse, and the gradients of both where they are asked for."""
    from fa4.testing.check import run_attention

    backward = arguments.direction == "backward"
    results: dict[str, Any] = run_attention(
        partial(_kernel, arguments), inputs, dlse=inputs.dlse if backward else None, backward=backward, **options
    )
    return results


def _kernel(arguments: argparse.Namespace, *tensors: Any, **options: Any) -> Any:
    import fa4

    deterministic = arguments.deterministic is not None
    return fa4.attention(*tensors, return_lse=True, backend="vgpu", arch=arguments.arch, deterministic=deterministic, **options)


def _run_peer(arguments: argparse.Namespace) -> int:
    """A line for each request, as it is done: the result closest to its bound. Exit status 1 where one leaves it."""
    from fa4.errors import ArgumentError
    from fa4.testing.witness import VERSION, run_witnesses, witnesses

    matrix = witnesses(arguments.arch, arguments.direction == "backward")
    cases = [replace(case, seed=arguments.seed) for case in matrix if not arguments.head_dim or case.dims[0] in arguments.head_dim]
    if not cases:
        dims = ", ".join(sorted({str(case.dims[0]) for case in matrix}, key=int))
        raise ArgumentError("head_dim", arguments.head_dim, "the matrix has no such head dim", f"choose from {dims}")
    print(f"{arguments.peer} {VERSION}, {arguments.direction}, bfloat16, {arguments.arch} on the virtual GPU,", end=" ")
    print(f"{arguments.schedule} schedule, seed {arguments.seed}: {len(cases)} requests", flush=True)
    failed = 0
    for answer in run_witnesses(arguments.arch, cases, arguments.schedule, [arguments.seed]):
        failed += not answer.ok
        shown = [result for result in answer.results if not result.ok] or sorted(answer.results, key=lambda r: r.share)[-1:]
        print(f"{'' if answer.ok else 'WRONG '}{answer.witness}:", "; ".join(map(str, shown)), answer.failure, flush=True)
    print(f"{failed} of {len(cases)} requests failed" if failed else f"all {len(cases)} requests within their bounds")
    return 1 if failed else 0


def _worst(arguments: argparse.Namespace, head_dim: int, options: dict[str, Any]) -> dict[str, tuple[bool, list[str]]]:
    """For each result, over all lengths: whether all are within their bound, and the cells of the one that is closest to it."""
    import torch

    from fa4.testing import AttentionShape, compare_attention, make_inputs

    backward = arguments.direction == "backward"
    worst: dict[str, tuple[bool, list[str]]] = {}
    closest: dict[str, float] = {}
    for lengths in _LENGTHS:
        inputs = make_inputs(AttentionShape(1, *lengths, *_HEADS, head_dim), getattr(torch, arguments.dtype), seed=arguments.seed)
        for result in compare_attention(partial(_kernel, arguments), inputs, backward=backward, use_dlse=backward, **options):
            if result.share >= closest.get(result.name, -1.0):
                closest[result.name] = result.share
                where = f"{lengths} {','.join(map(str, result.index))}"
                cells = [f"{result.error:.2e}", f"{result.bound:.2e}", f"{result.ulp:.3g}", where, "ok" if result.ok else "WRONG"]
                worst[result.name] = result.ok, cells
    return worst


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
