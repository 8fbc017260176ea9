"""``fa4 compile``: fill the compile cache ahead of time, for any architecture, without a GPU."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fa4.cli.demo import positive
from fa4.errors import ArgumentError, Fa4Error

if TYPE_CHECKING:
    from fa4.compiler.pool import Event, Item


def add_command(commands: Any) -> None:
    """Add ``fa4 compile``."""
    parser = commands.add_parser("compile", help="compile kernels into the cache ahead of time, for any architecture")
    parser.add_argument("--arch", required=True, type=_names, help="architectures, for example sm_80,sm_90a")
    parser.add_argument("--head-dim", required=True, type=_numbers, help="head dims of q and k, for example 64,128")
    parser.add_argument("--head-dim-v", type=_numbers, help="head dims of v (default: as q)")
    parser.add_argument("--dtype", type=_names, default=["bfloat16"], help="element types (default: bfloat16)")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, help="only causal, or only not (default: both)")
    parser.add_argument("--direction", type=_names, default=["forward"], help="forward, backward or both, with a comma (default: forward)")
    parser.add_argument("--deterministic", action="store_true", help="deterministic backward kernels")
    parser.add_argument("--jobs", type=positive, help="worker processes (default: one per core, as memory allows)")
    parser.set_defaults(run=run)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _numbers(text: str) -> list[int]:
    return [positive(number) for number in _names(text)]


def run(arguments: argparse.Namespace) -> int:
    """Compile what is asked for; exit status 1 where something failed."""
    from fa4._settings import current
    from fa4.compiler.pool import compile_all

    if not current().cache:
        raise ArgumentError("FA4_CACHE", "0", "the compile cache is turned off, so compiled kernels would be lost", "unset it")
    items, failed = _items(arguments)
    start = time.perf_counter()
    compiled = 0
    with _progress(len(items)) as report:
        for event in compile_all(items, arguments.jobs):
            report(event)
            compiled += event.error is None
            if event.error is not None:
                failed.append(f"{describe(event.item)}: {event.error}")
    print(f"{compiled} kernels compiled in {time.perf_counter() - start:.1f} s, {len(failed)} failed")
    for message in failed:
        print(message, file=sys.stderr)
    return 1 if failed else 0


def describe(item: Item) -> str:
    """One item in words."""
    problem = item.problem
    dims = f"{problem.head_dim}" + (f",{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")
    flags = "".join(f" {flag}" for flag in ("causal", "deterministic") if getattr(problem, flag))
    return f"{problem.direction} {problem.dtype} head dim {dims}{flags} {item.arch}"


def _items(arguments: argparse.Namespace) -> tuple[list[Item], list[str]]:
    """What to compile, and messages about what is asked for but not served."""
    from fa4 import dispatch, tuning
    from fa4.arch import get_arch
    from fa4.compiler.pool import Item
    from fa4.problem import AttentionProblem

    causal = [False, True] if arguments.causal is None else [arguments.causal]
    items, refused = [], []
    choices = (arguments.direction, arguments.dtype, arguments.head_dim, arguments.head_dim_v or [None], causal, arguments.arch)
    for direction, dtype, head_dim, head_dim_v, is_causal, arch in itertools.product(*choices):
        problem = AttentionProblem(direction, dtype, head_dim, head_dim_v or head_dim, causal=is_causal)
        if direction == "backward":
            problem = replace(problem, deterministic=arguments.deterministic)
        try:
            support = dispatch.kernel_support(problem, arch)
            if not support:
                refused.append(f"{describe(Item(problem, None, arch))}: {support.reason}")
                continue
            items += [Item(each, config, arch) for each, config in tuning.kernels(problem, get_arch(arch))]
        except Fa4Error as error:
            refused.append(f"{describe(Item(problem, None, arch))}: {error}")
    return list(dict.fromkeys(items)), refused  # requests share what goes before and after their main kernels


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Event], None]]:
    """What to do with each event: a progress bar on a terminal with rich (the cli extra), a line elsewhere."""
    if sys.stderr.isatty() and total:
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            pass
        else:
            with Progress(console=Console(stderr=True)) as bar:
                task = bar.add_task("compiling", total=total)

                def show(event: Event) -> None:
                    bar.update(task, completed=event.done, description=describe(event.item))

                yield show
            return
    yield lambda event: print(
        f"[{event.done}/{event.total}] {describe(event.item)}: {'failed' if event.error else f'{event.seconds:.1f} s'}", flush=True
    )
