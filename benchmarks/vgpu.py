"""Speed of the virtual GPU: warp instructions of the Ampere forward kernel per second of CPU time.

    python benchmarks/vgpu.py [--seqlen 512] [--head-dim 64] [--repeats 5]

One process, one core. CPU time, because other work on the machine would count otherwise; the wall clock is printed beside it. Parsing and
generating code are in the first run only; the median is over the others.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from importlib import import_module
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is imported

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--schedule", default="round_robin")
    arguments = parser.parse_args()

    import numpy as np

    from fa4.testing import AttentionShape, make_inputs
    from fa4.vgpu import Gpu

    sys.path.insert(0, str(ROOT / "tests" / "vgpu"))
    attention = import_module("ampere_forward").attention
    shape = AttentionShape(1, arguments.seqlen, arguments.seqlen, 1, 1, arguments.head_dim)
    inputs = make_inputs(shape)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}, {shape}")
    rates = []
    for repeat in range(arguments.repeats + 1):
        gpu = Gpu("sm_80", schedule=arguments.schedule)
        start = time.process_time()
        attention(gpu, inputs.q, inputs.k, inputs.v)
        seconds = time.process_time() - start
        report = gpu.report()
        if repeat:
            rates.append(report.instructions / seconds)
        print(f"run {repeat}: {report.instructions} warp instructions, {seconds:.2f} s of CPU, {report.seconds:.2f} s on the clock")
    print(f"median: {statistics.median(rates):,.0f} warp instructions per second of CPU time")


if __name__ == "__main__":
    main()
