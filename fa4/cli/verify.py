"""``fa4 verify``: run a kernel on the virtual GPU over a matrix of requests and compare with float64."""

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
    parser.add_argument("--head-dim", type=_integers, default=[64], help="head dims, separated by commas (default: 64)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and schedule (default: %(default)s)")
    parser.add_argument("--schedule", default="round_robin", choices=("round_robin", "random", "priority"), help="default: %(default)s")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """A row for each head dim and mask: the worst of its lengths. Exit status 1 where an error leaves its bound."""
    import fa4

    print(f"forward, {arguments.dtype}, {arguments.arch} on the virtual GPU, {arguments.schedule} schedule, seed {arguments.seed}")
    print(f"lengths (Sq, Sk): {', '.join(map(str, _LENGTHS))}; {_HEADS[0]} query heads to {_HEADS[1]} key head")
    rows = []
    wrong = 0
    with fa4.settings(vgpu_seed=arguments.seed, vgpu_schedule=arguments.schedule):
        for head_dim in arguments.head_dim:
            for mask, options in _MASKS.items():
                worst = _worst(arguments, head_dim, options)
                wrong += sum(not ok for ok, _ in worst.values())
                rows += [[f"D {head_dim}, {mask}", name, *cells] for name, (_, cells) in worst.items()]
    print(format_table(["request", "result", "worst error", "bound", "ulp", "at (Sq, Sk) index", ""], rows))
    print(f"{wrong} of {len(rows)} results leave their bound" if wrong else f"all {len(rows)} results within their bound")
    return 1 if wrong else 0


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
            share = float("inf") if not result.ok else result.error / result.bound if result.bound else 0.0
            if share >= closest.get(result.name, -1.0):
                closest[result.name] = share
                where = f"{lengths} {','.join(map(str, result.index))}"
                cells = [f"{result.error:.2e}", f"{result.bound:.2e}", f"{result.ulp:.3g}", where, "ok" if result.ok else "WRONG"]
                worst[result.name] = result.ok, cells
    return worst


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
