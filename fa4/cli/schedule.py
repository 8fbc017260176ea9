"""``fa4 schedule``: the order in which tiles are computed, compared with others, and its picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fa4.cli.inspect import window


def add_command(commands: Any) -> None:
    """Add ``fa4 schedule``."""
    parser = commands.add_parser("schedule", help="simulate tile orders of a problem: a table and a Gantt chart")
    parser.add_argument("--arch", default="sm_100a", help="architecture (default: %(default)s)")
    parser.add_argument("--seqlen", type=int, default=8192, help="queries, and keys unless --seqlen-k is given (default: %(default)s)")
    parser.add_argument("--seqlen-k", type=int, help="keys")
    parser.add_argument("--lengths", type=_lengths, help="lengths of a packed batch, separated by commas, instead of --seqlen and --batch")
    parser.add_argument("--heads", type=int, default=16, help="query heads (default: %(default)s)")
    parser.add_argument("--heads-kv", type=int, help="key heads (default: as many)")
    parser.add_argument("--batch", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--head-dim", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--causal", action="store_true", help="hide keys right of the diagonal")
    parser.add_argument("--window", type=window, default=(None, None), metavar="L,R", help="keys to the left and right; empty is open")
    parser.add_argument("--tile", type=_pair, metavar="M,N", help="queries and keys of a tile (default: 256,128 forward on Blackwell)")
    parser.add_argument("--backward", action="store_true", help="tiles of the backward pass: blocks of keys")
    parser.add_argument("--pairs", action="store_true", help="backward: two SMs compute a tile of twice as many keys together")
    parser.add_argument("--deterministic", action="store_true", help="backward: tiles add to dQ in a fixed order")
    parser.add_argument("--svg", default="fa4-schedule.svg", metavar="FILE", help="where the Gantt chart goes (default: %(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each order, then the gain of the default one over row order; write the chart of both."""
    from fa4._table import format_table
    from fa4.arch import get_arch
    from fa4.errors import ArgumentError
    from fa4.schedule import ORDERS, Schedule, default_order, simulate, simulate_heads
    from fa4.schedule.picture import gantt

    arch = get_arch(arguments.arch)
    problem = _problem(arguments, arch.family)
    if arguments.deterministic and not problem.backward:
        raise ArgumentError("deterministic", True, "only tiles of the backward pass wait for each other", "add --backward")
    if not Path(arguments.svg).parent.is_dir():
        raise ArgumentError("svg", arguments.svg, "its folder does not exist", "make it first, or name another file")
    if arguments.pairs and not problem.backward:
        raise ArgumentError("pairs", True, "the forward pass has none here", "add --backward")
    chosen = default_order(problem, arguments.deterministic)
    cluster = 2 if arguments.pairs else 1
    results = {order: simulate(Schedule.of(problem, order, arch), arch, arguments.deterministic, cluster) for order in ORDERS}
    if not arguments.deterministic:
        results["one block per head"] = simulate_heads(problem, arch)  # type: ignore[index]  # no order, but a line of the table
    row, best = results["row"], results[chosen]
    least = best.lower_bound
    rows = [
        [
            f"{order} (default)" if order == chosen else order,
            f"{result.makespan:g}",
            f"{result.makespan / least:.3f}" if least else "-",
            f"{100 * result.occupancy:.0f}%",
            f"{100 * result.balance:.1f}%",
            f"{100 * result.waiting / (result.total or 1):.1f}%",
            f"{100 * result.l2_reuse:.1f}%" if order in ORDERS else "-",
        ]
        for order, result in results.items()
    ]
    section = Schedule.of(problem, chosen, arch).section
    sms = f"{best.sms} pairs of SMs" if arguments.pairs else f"{best.sms} SMs"
    print(f"{_title(arguments, problem)}; {arch.name}, {sms}, L2 {arch.l2.value / 2**20:g} MB")
    print(f"{problem.tiles} tiles of {problem.tile[0]} x {problem.tile[1]}; {section} of {problem.heads * problem.batch} heads take turns")
    header = ["order", "steps", "of the least", "SMs used", "busy", "waiting", "K, V from L2" if not problem.backward else "Q, dO from L2"]
    print(format_table(header, rows))
    print(f"{chosen} gains {100 * (row.makespan / (best.makespan or 1) - 1):.1f}% over row order")
    if arguments.deterministic:
        fast = simulate(Schedule.of(problem, default_order(problem), arch), arch, cluster=cluster)
        ratio = best.makespan / (fast.makespan or 1)
        print(f"{ratio:.3f} of the fast mode's {fast.makespan:g} steps ({default_order(problem)} order)")
    Path(arguments.svg).write_text(gantt({f"{name} order": results[name] for name in dict.fromkeys(("row", chosen))}), encoding="utf-8")
    print(f"Gantt chart: {arguments.svg}")
    return 0


def _problem(arguments: argparse.Namespace, family: str) -> Any:
    from fa4.problem import normalise_window
    from fa4.schedule import TileProblem

    lengths = arguments.lengths or (arguments.seqlen,)
    seqlen_k = arguments.seqlen_k
    return TileProblem(
        lengths=tuple((length, length if seqlen_k is None else seqlen_k) for length in lengths),
        batch=len(lengths) if arguments.lengths else arguments.batch,
        heads=arguments.heads,
        heads_kv=arguments.heads if arguments.heads_kv is None else arguments.heads_kv,
        head_dims=(arguments.head_dim, arguments.head_dim),
        # Two tiles of 128 queries per block, as FlashAttention-4 has them.
        tile=arguments.tile or ((256, 128) if family == "blackwell" and not arguments.backward else (128, 256 if arguments.pairs else 128)),
        window=normalise_window(arguments.window, arguments.causal),
        backward=arguments.backward,
    )


def _title(arguments: argparse.Namespace, problem: Any) -> str:
    words = ["backward" if problem.backward else "forward"]
    words += ["deterministic"] if arguments.deterministic else []
    words.append(
        f"{problem.batch} {'sequence' if problem.batch == 1 else 'sequences'} of " + ",".join(f"{q}x{k}" for q, k in problem.lengths)
    )
    words.append(f"{problem.heads}/{problem.heads_kv} heads of {problem.head_dims[0]}")
    left, right = problem.window
    words.append("full" if (left, right) == (None, None) else "causal" if (left, right) == (None, 0) else f"window {left},{right}")
    return ", ".join(words)


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _pair(text: str) -> tuple[int, int]:
    queries, keys = _lengths(text)
    return queries, keys
