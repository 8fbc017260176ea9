"""``fa4 vgpu``: what the virtual GPU can tell about the project's own kernels."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa4._table import format_table

if TYPE_CHECKING:
    from fa4.vgpu.capture import Capture
    from fa4.vgpu.mutate import Verdict

_OUTCOMES = ("caught", "equivalent", "survived", "not executed")


def add_command(commands: Any) -> None:
    """Add ``fa4 vgpu mutate``."""
    parser = commands.add_parser("vgpu", help="what the virtual GPU can tell about a kernel")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    mutate = actions.add_parser("mutate", help="remove or alter one synchronising instruction at a time: are the mistakes noticed?")
    mutate.add_argument("--arch", default="sm_80", help="architecture (default: %(default)s)")
    mutate.add_argument("--head-dim", type=int, default=64, help="default: %(default)s")
    mutate.add_argument("--lengths", type=_lengths, default=(150, 200), metavar="SQ,SK", help="sequence lengths (default: 150,200)")
    mutate.add_argument("--causal", action="store_true", help="causal attention")
    mutate.add_argument("--schedules", type=int, default=3, help="tried before a mutant counts as survived (default: %(default)s)")
    mutate.add_argument("--json", type=Path, metavar="FILE", help="write every verdict as JSON")
    mutate.set_defaults(run=run)


def _lengths(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not SQ,SK; for example 150,200")
    return int(parts[0]), int(parts[1])


def run(arguments: argparse.Namespace) -> int:
    """A row for each kind of change, then the mutants that were executed and not caught. Exit status 1 where more than 5% survive."""
    from fa4.vgpu.mutate import Mutation, schedules

    capture = _forward(arguments)
    mutation = Mutation(capture, schedules(arguments.schedules))
    print(f"{capture.kernel}\ngrid {capture.grid}, {arguments.schedules} schedules, checks {mutation.checks!r}", flush=True)
    verdicts = [mutation.judge(mutant) for mutant in mutation.mutants()]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1) + "\n")
    print(table(verdicts))
    for verdict in verdicts:
        if verdict.outcome in ("equivalent", "survived"):
            mutant = verdict.mutant
            where = f" ({mutant.source})" if mutant.source else ""
            print(f"{verdict.outcome}: {mutant.kind} {mutant.change} at PTX line {mutant.line}: {mutant.text}{where}\n  {verdict.how}")
    executed = sum(verdict.outcome != "not executed" for verdict in verdicts)
    survived = sum(verdict.outcome == "survived" for verdict in verdicts)
    print(f"{survived} of {executed} executed mutants survived")
    return 1 if survived > 0.05 * executed else 0


def table(verdicts: list[Verdict]) -> str:
    """Outcomes by kind and change; of the caught ones, how many each schedule found first."""
    counts = Counter((v.mutant.kind, v.mutant.change if "id" not in v.mutant.change else "id", v.outcome) for v in verdicts)
    first = Counter((v.mutant.kind, v.mutant.change if "id" not in v.mutant.change else "id") for v in verdicts if v.schedules == 1)
    changes = dict.fromkeys((kind, change) for kind, change, _ in sorted(counts))
    rows = [[f"{kind}, {change}", *(str(counts[kind, change, o]) for o in _OUTCOMES), str(first[kind, change])] for kind, change in changes]
    rows.append(["all", *(str(sum(v.outcome == o for v in verdicts)) for o in _OUTCOMES), str(sum(first.values()))])
    return format_table(["change", *_OUTCOMES, "in one schedule"], rows)


def _forward(arguments: argparse.Namespace) -> Capture:
    """The launch of the forward kernel."""
    import torch

    from fa4.problem import AttentionOptions, normalise_window
    from fa4.runtime import virtual
    from fa4.testing import AttentionShape, make_inputs
    from fa4.vgpu import Gpu

    seqlen_q, seqlen_k = arguments.lengths
    inputs = make_inputs(AttentionShape(1, seqlen_q, seqlen_k, 1, 1, arguments.head_dim), torch.bfloat16)
    gpu = Gpu(arguments.arch)
    gpu.captures = []
    options = AttentionOptions(arguments.head_dim**-0.5, *normalise_window((None, None), arguments.causal))
    virtual.attention_forward(inputs.q, inputs.k, inputs.v, options, gpu)
    (capture,) = gpu.captures
    return capture
