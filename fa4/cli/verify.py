"""``fa4 verify``: run a kernel, of this project or of a peer, on the virtual GPU over a matrix of requests and compare with float64."""

from __future__ import annotations

import argparse
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
    parser.add_argument("--direction", default="forward", choices=("forward", "backward"), help="of a peer (default: %(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """A row for each head dim and mask: the worst of its lengths. Exit status 1 where an error leaves its bound."""
    import fa4
    from fa4.errors import UnsupportedError

    if arguments.peer:
        with fa4.settings(vgpu_processes=arguments.processes):
            return _run_peer(arguments)
    if arguments.direction == "backward":
        raise UnsupportedError("direction", "backward", "this project has no backward kernels yet", "leave it out, or name a peer")
    print(f"forward, {arguments.dtype}, {arguments.arch} on the virtual GPU, {arguments.schedule} schedule, seed {arguments.seed}")
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
    return 1 if wrong else 0


def _run_peer(arguments: argparse.Namespace) -> int:
    """A line for each request, as it is done: the result closest to its bound. Exit status 1 where one leaves it."""
    from dataclasses import replace

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
    """For out and lse, over all lengths: whether all are within their bound, and the cells of the one that is closest to it."""
    import torch

    from fa4 import attention
    from fa4.testing import AttentionShape, compare_attention, make_inputs

    def kernel(*tensors: Any, **keywords: Any) -> Any:
        return attention(*tensors, return_lse=True, backend="vgpu", arch=arguments.arch, **keywords)

    worst: dict[str, tuple[bool, list[str]]] = {}
    closest: dict[str, float] = {}
    for lengths in _LENGTHS:
        inputs = make_inputs(AttentionShape(1, *lengths, *_HEADS, head_dim), getattr(torch, arguments.dtype), seed=arguments.seed)
        for result in compare_attention(kernel, inputs, backward=False, **options):
            if result.share >= closest.get(result.name, -1.0):
                closest[result.name] = result.share
                where = f"{lengths} {','.join(map(str, result.index))}"
                cells = [f"{result.error:.2e}", f"{result.bound:.2e}", f"{result.ulp:.3g}", where, "ok" if result.ok else "WRONG"]
                worst[result.name] = result.ok, cells
    return worst


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
