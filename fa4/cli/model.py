"""``fa4 model``: predicted cycles of an attention, without a GPU."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa4._table import format_table
from fa4.errors import ArgumentError

if TYPE_CHECKING:
    from fa4.perfmodel.prediction import Prediction
    from fa4.perfmodel.recording import Recording, Request

PEERS = ("flash-attn-4",)
_STALLS = 12
_MOST_MACHINES = 1000


def add_command(commands: Any) -> None:
    """Add ``fa4 model``."""
    parser = commands.add_parser("model", help="predict cycles and TFLOPS of an attention, without a GPU")
    parser.add_argument("--arch", default="sm_100a", help="architecture (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, metavar="D", help="head dim of q and k (default: %(default)s)")
    parser.add_argument("--head-dim-v", type=int, default=0, metavar="DV", help="head dim of v (default: as q)")
    parser.add_argument("--seqlen", type=int, default=8192, metavar="S", help="queries and keys (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=16, metavar="H", help="query heads (default: %(default)s)")
    parser.add_argument("--heads-kv", type=int, default=0, metavar="H", help="key heads (default: as queries)")
    parser.add_argument("--batch", type=int, default=4, metavar="B", help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--causal", action="store_true", help="causal mask")
    parser.add_argument("--direction", choices=("forward", "backward"), default="forward", help="default: %(default)s")
    parser.add_argument("--deterministic", action="store_true", help="the deterministic kernel")
    parser.add_argument("--one-cta", action="store_true", help="no CTA pairs")
    parser.add_argument("--machines", type=int, default=9, metavar="N", help="size of the ensemble (default: %(default)s)")
    parser.add_argument("--order", choices=("sass", "ptx"), default="sass", help="of instructions: as ptxas chose, or a list schedule")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--vs", choices=PEERS, help="compare with another library's kernel, compiled in the same run")
    other.add_argument("--peer", choices=PEERS, help="another library's kernel alone")
    other.add_argument("--measure", action="store_true", help="measure numbers of the model on this machine's GPU")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="write a timeline in clocks for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def request_of(arguments: argparse.Namespace) -> Request:
    """The request.

    Raises:
        ArgumentError: a number out of range.
    """
    from fa4.perfmodel.recording import Request

    for name in ("head_dim", "seqlen", "heads", "batch", "machines"):
        if getattr(arguments, name) < 1:
            raise ArgumentError(f"--{name.replace('_', '-')}", getattr(arguments, name), "must be at least 1", "pass a positive number")
    if arguments.machines > _MOST_MACHINES:
        raise ArgumentError("--machines", arguments.machines, f"must be at most {_MOST_MACHINES}", "9 to 45 tell enough")
    return Request(
        arch=arguments.arch,
        head_dim=arguments.head_dim,
        head_dim_v=arguments.head_dim_v,
        seqlen=arguments.seqlen,
        heads=arguments.heads,
        heads_kv=arguments.heads_kv,
        batch=arguments.batch,
        causal=arguments.causal,
        backward=arguments.direction == "backward",
        deterministic=arguments.deterministic,
        pairs=not arguments.one_cta,
        dtype=arguments.dtype,
    )


def run(arguments: argparse.Namespace) -> int:
    """Print predictions, with --vs a comparison; or with --measure what a GPU says of the model's numbers."""
    if arguments.measure:
        return _measure(arguments)
    from fa4.perfmodel.compare import ratio, verdict
    from fa4.perfmodel.machine import ensemble, preset
    from fa4.perfmodel.peer import record_peer
    from fa4.perfmodel.prediction import predict
    from fa4.perfmodel.recording import record

    request = request_of(arguments)
    machines = ensemble(preset(request.arch), arguments.machines)
    recordings = [record_peer(request)] if arguments.peer else [record(request)]
    recordings += [record_peer(request)] if arguments.vs else []
    found = [predict(request, recording, machines, arguments.order) for recording in recordings]
    data: dict[str, Any] = {"request": asdict(request), "order": arguments.order, **found[0].data()}
    if arguments.vs:
        speed = ratio(found[0].tflops, found[1].tflops)
        data |= {"vs": found[1].data(), "ratio": {**vars(speed), "verdict": verdict(speed)}}
    if arguments.timeline:
        _timeline(arguments, recordings[0])
    if arguments.json:
        print(json.dumps(data))
    else:
        print("\n\n".join(_text(prediction) for prediction in found))
        if arguments.vs:
            print(f"\n{found[0].name} / {found[1].name}: {speed}, {verdict(speed)}")
        if arguments.timeline:
            print(f"\ntimeline: {arguments.timeline}, open it in ui.perfetto.dev; 1 us is one clock")
    return 0


def _measure(arguments: argparse.Namespace) -> int:
    from fa4.perfmodel.machine import preset
    from fa4.perfmodel.measure import measure, numbers, rows, text

    arch, timings = measure()
    table = rows(preset(arch), numbers({name: timing.clocks for name, timing in timings.items()}))
    if arguments.json:
        print(json.dumps({"arch": arch, "numbers": table, "timings": {name: vars(timing) for name, timing in timings.items()}}))
    else:
        clock = sorted(timing.clocks / timing.seconds for timing in timings.values())[len(timings) // 2]
        print(f"{text(table)}\n\n{arch}; its clock by CUDA events: {clock / 1e9:.3f} GHz")
    return 0


def _timeline(arguments: argparse.Namespace, recording: Recording) -> None:
    from fa4.perfmodel.machine import preset
    from fa4.perfmodel.prediction import orders
    from fa4.perfmodel.simulation import replay
    from fa4.perfmodel.timeline import write_timeline

    (trace, _), schedule = recording.traces[0], orders(recording, arguments.order)[0]
    number = next(iter(trace.clusters()))
    report = replay(trace, schedule, preset(trace.arch), clusters=[number] * recording.resident, resident=recording.resident, timeline=True)
    write_timeline(arguments.timeline, report, schedule)


def _text(prediction: Prediction) -> str:
    from fa4.perfmodel.compare import Interval

    report, cost = prediction.report, prediction.costs[0]
    limiter, share = report.limiter
    rows = {
        "TFLOPS": str(Interval.of(prediction.tflops)),
        "cycles": str(Interval.of(prediction.cycles)),
        "main loop": f"{prediction.steady:.0%} of the tensor cores' peak",
        "busiest": f"{limiter}, {share:.0%} of the time",
        "one tile": f"{cost.start:.0f} clocks + {cost.step:.0f} a step" + (f", {cost.turn:.0f} for each tile after" if cost.turn else ""),
        "spills": f"{report.spills} local loads and stores in a warp of one tile",
        "order": f"{report.schedule}, {report.unaligned} warps not aligned",
        "toolchain": prediction.recording.toolchain,
    }
    width = max(map(len, rows))
    lines = [f"{prediction.name}, {len(prediction.tflops)} machines (median, 10% to 90%)"]
    lines += [f"{name:<{width}}  {value}" for name, value in rows.items()]
    busy = sorted(report.busy.items(), key=lambda item: -item[1])[:10]
    lines += ["", "busy in one tile: " + ", ".join(f"{name} {share:.0%}" for name, share in busy)]
    stalls = [[s.place.rpartition("/")[2] or "-", s.reason, f"{s.clocks:.0f}", s.text] for s in report.by_line()[:_STALLS]]
    lines += ["", format_table(["source line", "stalls for", "clocks, all warps", "instruction"], stalls, left=(0, 1, 3))]
    return "\n".join(lines)
