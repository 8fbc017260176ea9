"""``fa4 vgpu``: what a kernel spends its work on, and how well the virtual GPU notices mistakes of synchronisation in it."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa4._table import format_table
from fa4.errors import ArgumentError

if TYPE_CHECKING:
    from fa4.compiler.artifact import Artifact
    from fa4.vgpu.capture import Capture
    from fa4.vgpu.mutate import Mutation, Verdict

_OUTCOMES = ("caught", "equivalent", "survived", "not executed")


def add_command(commands: Any) -> None:
    """Add ``fa4 vgpu mutate`` and ``fa4 vgpu report``."""
    parser = commands.add_parser("vgpu", help="what the virtual GPU can tell about a kernel")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    mutate = actions.add_parser("mutate", help="remove or alter one synchronising instruction at a time: are the mistakes noticed?")
    _add_launch_options(mutate)
    mutate.add_argument("--schedules", type=int, default=3, help="tried before a mutant counts as survived (default: %(default)s)")
    mutate.add_argument("--most", type=float, default=5.0, help="percent of survivors that are no failure (default: %(default)s)")
    mutate.add_argument("--resume", type=Path, metavar="FILE", help="keep verdicts there, a line of JSON each, and go on where it ends")
    mutate.set_defaults(run=run)
    report = actions.add_parser(
        "report", help="waits, instructions, bank conflicts, bytes and products, by role of the warps and by source line"
    )
    _add_launch_options(report)
    report.add_argument(
        "--roles", type=_roles, metavar="NAME:WARPS,...", help="names of the CTA's warps, in order, for example softmax:8,mma:1"
    )
    report.add_argument("--lines", type=int, default=10, help="rows of each part (default: %(default)s)")
    report.add_argument("--json", action="store_true", help="print JSON, with all rows")
    report.set_defaults(run=run_report)


def _add_launch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default="sm_80", help="architecture (default: %(default)s)")
    parser.add_argument("--head-dim", type=_dims, default=(64, 64), metavar="D[,DV]", help="default: 64")
    parser.add_argument("--lengths", type=_lengths, default=(150, 200), metavar="SQ,SK", help="sequence lengths (default: 150,200)")
    parser.add_argument("--heads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--causal", action="store_true", help="causal attention")
    parser.add_argument("--ctas", type=int, help="launch a persistent kernel with so many CTAs, each of which then has more pieces of work")
    parser.add_argument("--peer", choices=["flash-attn-4"], help="kernels of another project, which must be installed")
    parser.add_argument("--direction", choices=["forward", "backward"], default="forward", help="default: %(default)s")
    parser.add_argument("--deterministic", action="store_true", help="a backward that adds in a fixed order")
    parser.add_argument(
        "--config",
        nargs="+",
        type=_setting,
        default=[],
        metavar="NAME=VALUE",
        help="change what is tuned, for example cta_pair=true stages=4",
    )
    parser.add_argument("--pairs", action="store_true", help="let the peer's forward use CTA pairs, as its backward does")


def _roles(text: str) -> list[str]:
    names: list[str] = []
    for part in text.split(","):
        name, _, warps = part.rpartition(":")
        if not name or not warps.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME:WARPS,...; for example softmax:8,mma:1")
        names += [name] * int(warps)
    return names


def _lengths(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not SQ,SK; for example 150,200")
    return int(parts[0]), int(parts[1])


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE; for example cta_pair=true")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _dims(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not D or D,DV; for example 192,128")
    return int(parts[0]), int(parts[-1])


def run(arguments: argparse.Namespace) -> int:
    """A row for each kind of change, then the mutants that were executed and not caught. Exit status 1 where too many survive."""
    from fa4.vgpu.mutate import Mutation, schedules

    capture = _capture(arguments)
    mutation = Mutation(capture, schedules(arguments.schedules))
    print(f"{capture.kernel}\ngrid {capture.grid}, {arguments.schedules} schedules, checks {mutation.checks!r}", flush=True)
    verdicts = list(judged(mutation, arguments.resume))
    print(table(verdicts))
    for verdict in verdicts:
        if verdict.outcome in ("equivalent", "survived"):
            mutant = verdict.mutant
            where = f" ({mutant.source})" if mutant.source else ""
            print(f"{verdict.outcome}: {mutant.kind} {mutant.change} at PTX line {mutant.line}: {mutant.text}{where}\n  {verdict.how}")
    executed = sum(verdict.outcome != "not executed" for verdict in verdicts)
    survived = sum(verdict.outcome == "survived" for verdict in verdicts)
    print(f"{survived} of {executed} executed mutants survived ({100 * survived / max(executed, 1):.1f}%)")
    return 1 if survived > arguments.most / 100 * executed else 0


def run_report(arguments: argparse.Namespace) -> int:
    """A ``fa4.vgpu.ProfileReport`` of the launch, in the plainest schedule."""
    from fa4.vgpu import Profile, Program

    capture = _capture(arguments)
    profile = Profile(arguments.roles)
    capture.replay(Program.parse(capture.ptx), profile)
    (report,) = profile.reports
    print(json.dumps(report.data()) if arguments.json else report.text(arguments.lines))
    return 0


def judged(mutation: Mutation, file: Path | None) -> Iterator[Verdict]:
    """All mutants, in order; verdicts that stand in ``file`` for the same launch are taken from there, others are added to it."""
    from fa4.vgpu.mutate import Verdict

    capture = mutation.capture
    launch = sha256(repr((capture.ptx, capture.grid, mutation.schedules, mutation.checks)).encode()).hexdigest()[:16]
    known = {}
    if file is not None and file.exists():
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if row.pop("launch") == launch:
                known[row.pop("mutant")] = row
    for mutant in mutation.mutants():
        if mutant.key in known:
            yield Verdict(mutant, **known[mutant.key])
            continue
        verdict = mutation.judge(mutant)
        if file is not None:
            with file.open("a") as out:
                row = {"mutant": mutant.key, "outcome": verdict.outcome, "schedules": verdict.schedules, "how": verdict.how}
                out.write(json.dumps({"launch": launch, **row}) + "\n")
        yield verdict


def table(verdicts: list[Verdict]) -> str:
    """Outcomes by kind and change; of the caught ones, how many each schedule found first."""
    counts = Counter((v.mutant.kind, _change(v), v.outcome) for v in verdicts)
    first = Counter((v.mutant.kind, _change(v)) for v in verdicts if v.schedules == 1 and v.outcome == "caught")
    changes = dict.fromkeys((kind, change) for kind, change, _ in sorted(counts))
    rows = [[f"{kind}, {change}", *(str(counts[kind, change, o]) for o in _OUTCOMES), str(first[kind, change])] for kind, change in changes]
    rows.append(["all", *(str(sum(v.outcome == o for v in verdicts)) for o in _OUTCOMES), str(sum(first.values()))])
    return format_table(["change", *_OUTCOMES, "in one schedule"], rows)


def _change(verdict: Verdict) -> str:
    return "id" if verdict.mutant.change.startswith("id ") else verdict.mutant.change


def _capture(arguments: argparse.Namespace) -> Capture:
    """The launch that the arguments ask for."""
    capture = _of_peer(arguments) if arguments.peer else _own(arguments)
    if arguments.ctas is None:
        return capture
    together = (capture.cluster or (1,))[0]
    ctas = -(-arguments.ctas // together) * together
    return replace(capture, grid=(min(ctas, capture.grid[0]), *capture.grid[1:]))


def _own(arguments: argparse.Namespace) -> Capture:
    """The launch of this project's main kernel, in the forward with scores so large that references move and O is rescaled."""
    import torch

    from fa4 import tuning
    from fa4.arch import get_arch
    from fa4.compiler import get
    from fa4.problem import AttentionOptions, AttentionProblem, normalise_window
    from fa4.runtime import backward, forward, virtual
    from fa4.testing import AttentionShape, make_inputs, torch_attention
    from fa4.vgpu import Gpu

    (seqlen_q, seqlen_k), heads, dims = arguments.lengths, arguments.heads, arguments.head_dim
    inputs = make_inputs(AttentionShape(1, seqlen_q, seqlen_k, heads, heads, *dims), torch.bfloat16)
    gpu = Gpu(arguments.arch)
    captures: list[Capture] = []
    bounds = normalise_window((None, None), arguments.causal)
    problem = AttentionProblem.of(arguments.direction, torch.bfloat16, dims, bounds, 0.0, arguments.deterministic)
    config = _changed(tuning.config(problem, get_arch(arguments.arch)), dict(arguments.config))

    def find(task: AttentionProblem, tuned: Any, arch: str) -> Artifact:
        """The main kernel as asked for, with a line table; those around it as tuned."""
        return get(problem, config, arch, line_info=True) if task.direction == arguments.direction else get(task, tuned, arch)

    def execute(artifact: Artifact, *operands: Any, **updated: Any) -> None:
        gpu.captures = captures if artifact.problem["direction"] == arguments.direction else None
        virtual.run(gpu, artifact, *operands, **updated)

    if arguments.direction == "forward":
        forward.attention_forward(inputs.q, inputs.k, inputs.v, AttentionOptions(1.0, *bounds), gpu.arch, execute, find)
    else:
        options = AttentionOptions(dims[0] ** -0.5, *bounds, deterministic=arguments.deterministic)
        out, lse = torch_attention(inputs.q, inputs.k, inputs.v, causal=arguments.causal)
        saved = backward.Saved(inputs.q, inputs.k, inputs.v, out, lse, inputs.dout, None)
        backward.attention_backward(saved, options, gpu.arch, execute, find)
    (capture,) = captures
    return capture


def _changed(config: Any, settings: dict[str, Any]) -> Any:
    """A configuration with other values; ``exp2`` is how many of 16 pairs of exponentials are emulated.

    Raises:
        ArgumentError: it has no such setting, or refuses the value.
    """
    from fa4.config import Exp2Policy

    names = [field.name for field in fields(config)]
    for name, value in settings.items():
        if name not in names:
            raise ArgumentError("config", name, f"a {type(config).__name__} has no such setting", f"choose from {', '.join(names)}")
        if name == "exp2":
            settings[name] = Exp2Policy(value)
    return replace(config, **settings)


def _of_peer(arguments: argparse.Namespace) -> Capture:
    """The launch of the peer's main kernel."""
    from fa4.testing.witness import Witness, captured

    backward = arguments.direction == "backward"
    mask, heads = "causal" if arguments.causal else "full", (arguments.heads, arguments.heads)
    pairs, fixed = arguments.pairs or backward, arguments.deterministic
    case = Witness(arguments.head_dim, mask, heads, (arguments.lengths,), backward, deterministic=fixed, pairs=pairs)
    name = f"FlashAttention{arguments.direction.capitalize()}Sm"
    return next(capture for capture in captured(arguments.arch, case) if name in capture.kernel)
