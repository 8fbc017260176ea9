"""The performance model against published figures: flash-attn-4's kernels, recorded and replayed, by python benchmarks/model.py.

Nothing here was fitted to these figures. They are of B200 at its own clocks, B 4, S 8192, H 16, D 128, bf16; boxes differ by 7 to 17% among
themselves (flash-attention issues and pull requests), so ratios say more than TFLOPS.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

from fa4.perfmodel import Prediction, Request, ensemble, predict, preset, ratio, verdict
from fa4.perfmodel.compare import Interval
from fa4.perfmodel.peer import record_peer


@dataclass(frozen=True)
class Anchor:
    """A kernel with what was published of it, in TFLOPS; ``source`` says where."""

    request: Request
    published: float
    source: str


ARCH = "sm_100a"
FA4 = "FlashAttention-4 (arXiv 2603.05451)"
ANCHORS = {
    "forward, one CTA": Anchor(Request(ARCH, pairs=False), 1535, "flash-attention PR #2280; PR #2461 has 1542"),
    "forward, pair": Anchor(Request(ARCH), 1608, f"{FA4}: peak 1605 to 1613"),
    "forward, causal": Anchor(Request(ARCH, causal=True), 1418, "flash-attention PR #2280"),
    "backward, one CTA": Anchor(Request(ARCH, backward=True, pairs=False), 1248, "flash-attention PR #2280"),
    "backward, pair": Anchor(Request(ARCH, backward=True), 1360, "flash-attention PR #2280"),
    "backward, one CTA, causal": Anchor(Request(ARCH, backward=True, causal=True, pairs=False), 1118, "flash-attention PR #2280"),
    "backward, pair, causal": Anchor(Request(ARCH, backward=True, causal=True), 1209, "flash-attention PR #2280"),
}
PAIRS = [
    ("forward, pair", "forward, one CTA", 0.83, "flash-attention PR #2461, compiler of CUDA 12.9"),
    ("forward, causal", "forward, one CTA", 0.92, "flash-attention PR #2280"),
    ("backward, pair", "backward, one CTA", 1.09, "flash-attention PR #2280"),
    ("backward, pair, causal", "backward, one CTA, causal", 1.08, "flash-attention PR #2280"),
    ("backward, one CTA", "forward, one CTA", 0.81, "flash-attention PR #2280"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=24, help="size of the ensemble (default: %(default)s)")
    parser.add_argument("--order", choices=("sass", "ptx"), default="sass", help="of instructions (default: %(default)s)")
    parser.add_argument("--only", nargs="*", default=list(ANCHORS), help="names of anchors")
    parser.add_argument("--json", type=Path, help="write every value")
    arguments = parser.parse_args()
    machines = ensemble(preset(ARCH), arguments.machines)
    found: dict[str, Prediction] = {}
    for name in arguments.only:
        anchor, start = ANCHORS[name], time.perf_counter()
        prediction = found[name] = predict(anchor.request, record_peer(anchor.request), machines, arguments.order)
        share = Interval.of([value / anchor.published for value in prediction.tflops])
        limiter, busy = prediction.report.limiter
        print(
            f"{name:<28} preset {prediction.tflops[0]:.0f}, ensemble {Interval.of(prediction.tflops)}, published {anchor.published:.0f}: "
            f"ratio {prediction.tflops[0] / anchor.published:.3f}, {share}; main loop {prediction.steady:.3f}, {limiter} {busy:.2f}, "
            f"spills {prediction.report.spills}, unaligned {prediction.report.unaligned}, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    for first, second, published, _ in PAIRS:
        if first in found and second in found:
            a, b = found[first].tflops, found[second].tflops
            speed = ratio(a, b)
            right = sum((x / y > 1) == (published > 1) for x, y in zip(a, b, strict=True))
            print(
                f"{first} / {second}: preset {a[0] / b[0]:.3f}, ensemble {speed}, {verdict(speed)}; published {published}, "
                f"sign right on {right} of {len(a)}"
            )
    if arguments.json:
        data = {name: {"tflops": p.tflops, "cycles": p.cycles, **p.data()} for name, p in found.items()}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
