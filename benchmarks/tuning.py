"""This project's Blackwell kernels against flash-attn-4 by the performance model, from which fa4/tuning.py has its rows.

    python benchmarks/tuning.py [--only NAME ...] [--machines 16] [--lengths 1024 4096 16384] [--json FILE]

Both kernels are compiled by one toolchain in one run, and replayed on one ensemble of machines; a cell is the ratio of predicted speeds,
median with 10% and 90% quantiles. "tuned" is what a call gets against what flash-attn-4 chooses; "one CTA" and "pair" are both so.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fa4 import tuning
from fa4.arch import get_arch
from fa4.errors import Fa4Error
from fa4.perfmodel import Machine, Prediction, Request, ensemble, predict, preset, ratio, record, verdict
from fa4.perfmodel.peer import record_peer
from fa4.problem import AttentionProblem

ARCH = "sm_100a"
HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
KINDS = ("tuned", "one CTA", "pair")


@dataclass(frozen=True)
class Case:
    """A row of the table: ``request`` at any length, and which kernels are compared (see ``KINDS``)."""

    request: Request
    kind: str

    def __str__(self) -> str:
        """As --only names it."""
        r = self.request
        dims = f"D {r.head_dim}" if r.head_dim == r.head_dim_v else f"D {r.head_dim} Dv {r.head_dim_v}"
        words = "backward" if r.backward else "forward", dims, "causal" if r.causal else "full", self.kind
        return " ".join(words)


def cases() -> list[Case]:
    """All rows: both passes, head dims, masks and kinds."""
    found = []
    for backward in (False, True):
        for d, dv in HEAD_DIMS:
            for causal in (False, True):
                request = Request(ARCH, d, dv, causal=causal, backward=backward)
                found += [Case(replace(request, pairs=kind != "one CTA"), kind) for kind in KINDS]
    return found


def config_of(request: Request) -> Any:
    """The configuration that a call of this request gets."""
    bounds = None, 0 if request.causal else None
    direction: Any = "backward" if request.backward else "forward"
    problem = AttentionProblem.of(direction, request.dtype, request.head_dims, bounds, 0.0, request.deterministic)
    return tuning.config(problem, get_arch(request.arch), tuning.Queries.of(request.seqlen, 1))


class Predictions:
    """Of kernels on one ensemble, each made once."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.machines = machines
        self._found: dict[Any, Prediction | Fa4Error] = {}

    def own(self, case: Case) -> Prediction:
        """Of this project's kernel.

        Raises:
            Fa4Error: there is none of this kind.
        """
        config = config_of(case.request)
        if case.kind != "tuned":
            config = tuning.with_pair(config, case.kind == "pair", *case.request.head_dims)
        return self._get((replace(case.request, pairs=True), config), lambda request: record(request, config))

    def peer(self, request: Request) -> Prediction:
        """Of flash-attn-4's.

        Raises:
            Fa4Error: it has none.
        """
        return self._get((request, "peer"), record_peer)

    def _get(self, key: Any, recorded: Any) -> Prediction:
        if key not in self._found:
            try:
                self._found[key] = predict(key[0], recorded(key[0]), self.machines)
            except Fa4Error as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, Fa4Error):
            raise found
        return found


def row(case: Case, predictions: Predictions, lengths: Sequence[int], tokens: int) -> dict[str, Any]:
    """What the table says of a case: ratios by length, and of both kernels what limits them."""
    own, peer = predictions.own(case), predictions.peer(case.request)
    data: dict[str, Any] = {"case": str(case)}
    for seqlen in lengths:
        sizes = {"seqlen": seqlen, "batch": max(tokens // seqlen, 1)}
        a, b = own.at(**sizes), peer.at(**sizes)
        speed = ratio(a.tflops, b.tflops)
        data[str(seqlen)] = {**vars(speed), "verdict": verdict(speed), "tflops": sorted(a.tflops)[len(a.tflops) // 2]}
    for name, found in (("fa4", own), ("flash-attn-4", peer)):
        report, (limiter, share) = found.report, found.report.limiter
        data[name] = {
            "cluster": found.recording.cluster,
            "step": found.costs[0].step,
            "main loop": found.steady,
            "busiest": f"{limiter} {share:.0%}",
            "spills": report.spills,
            "unaligned": report.unaligned,
        }
    return data


def deterministic(case: Case, predictions: Predictions, lengths: Sequence[int], tokens: int) -> dict[str, Any]:
    """Speed of this project's deterministic backward relative to the fast one."""
    slow = Case(replace(case.request, deterministic=True), case.kind)
    data: dict[str, Any] = {"case": f"{case}, deterministic / fast"}
    for seqlen in lengths:
        sizes = {"seqlen": seqlen, "batch": max(tokens // seqlen, 1)}
        speed = ratio(predictions.own(slow).at(**sizes).tflops, predictions.own(case).at(**sizes).tflops)
        data[str(seqlen)] = {**vars(speed), "verdict": verdict(speed)}
    return data


def text(data: dict[str, Any], lengths: Sequence[int]) -> str:
    """A line of the table."""
    cells = [f"{v['median']:.2f} ({v['low']:.2f} to {v['high']:.2f})" for v in (data[str(seqlen)] for seqlen in lengths)]
    kernels = [
        f"{name}: {k['cluster']} CTA, {k['step']:.0f} clocks a step, {k['main loop']:.0%}, {k['busiest']}, {k['spills']} spills"
        for name, k in ((n, data[n]) for n in ("fa4", "flash-attn-4") if n in data)
    ]
    return " | ".join([data["case"], *cells, *kernels])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name has all of these words, for example: forward 'D 128' full")
    parser.add_argument("--machines", type=int, default=16, help="size of the ensemble (default: %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096, 16384], help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=32768, help="of a batch (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write every value")
    arguments = parser.parse_args()
    predictions = Predictions(ensemble(preset(ARCH), arguments.machines))
    how = arguments.lengths, arguments.tokens
    rows = []
    for case in cases():
        if not all(word in str(case) for word in arguments.only):
            continue
        start = time.perf_counter()
        try:
            found = [row(case, predictions, *how)]
            if case.request.backward:
                found.append(deterministic(case, predictions, *how))
        except Fa4Error as error:
            print(f"{case}: {str(error).splitlines()[0][:140]}", flush=True)
            continue
        rows += found
        for data in found:
            print(text(data, arguments.lengths), f"[{time.perf_counter() - start:.0f} s]", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
