"""Speed of the virtual GPU: warp instructions per second of CPU time, of the Ampere forward kernel and of flash-attn-4's Blackwell forward.

    python benchmarks/vgpu.py [--seqlen 512] [--head-dim 64] [--repeats 5] [--checks basic] [--peer-python /path/to/python]

One process, one core. CPU time, because other work on the machine would count otherwise; the wall clock is printed beside it. Parsing and
generating code are in the first run only; the median is over the others. With ``--peer-python``, an interpreter that has flash-attn-4 and
what this project needs, the kernel is flash-attn-4's sm_100a forward, one head.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is imported

ROOT = Path(__file__).parents[1]

PEER = """
import json, sys, time
import torch
from fa4.vgpu import attach, torch_cuda
from fa4.testing import AttentionShape, make_inputs
from flash_attn.cute import flash_attn_func
torch.set_num_threads(1)
seqlen, head_dim, repeats, schedule, checks = json.loads(sys.argv[1])
inputs = make_inputs(AttentionShape(1, seqlen, seqlen, 1, 1, head_dim))
for _ in range(repeats + 1):
    with attach("sm_100a", schedule=schedule, checks=checks, unwritten="nan", line_info=False) as gpu, torch_cuda():
        start = time.process_time()
        flash_attn_func(inputs.q, inputs.k, inputs.v)
        seconds = time.process_time() - start
    print(json.dumps([gpu.report().instructions, seconds, gpu.report().seconds]), flush=True)
"""

Run = tuple[int, float, float]


def ours(arguments: argparse.Namespace) -> Iterator[Run]:
    """Warp instructions, CPU seconds and wall-clock seconds of each run."""
    from fa4.testing import AttentionShape, make_inputs
    from fa4.vgpu import Gpu

    sys.path.insert(0, str(ROOT / "tests"))
    attention = import_module("forward_call").attention
    inputs = make_inputs(AttentionShape(1, arguments.seqlen, arguments.seqlen, 1, 1, arguments.head_dim))
    for _ in range(arguments.repeats + 1):
        gpu = Gpu("sm_80", schedule=arguments.schedule, checks=arguments.checks)
        start = time.process_time()
        attention(gpu, inputs.q, inputs.k, inputs.v)
        yield gpu.report().instructions, time.process_time() - start, gpu.report().seconds


def peers(arguments: argparse.Namespace) -> Iterator[Run]:
    """The same of flash-attn-4; its first run compiles the kernel too."""
    request = json.dumps([arguments.seqlen, arguments.head_dim, arguments.repeats, arguments.schedule, arguments.checks])
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [arguments.peer_python, "-W", "ignore", "-c", PEER, request]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("["):
                instructions, seconds, clock = json.loads(line)
                yield instructions, seconds, clock
    if process.returncode:
        raise SystemExit(f"{arguments.peer_python} failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--schedule", default="round_robin")
    parser.add_argument("--checks", default="basic", help="basic, hazards or isa (default: %(default)s)")
    parser.add_argument("--peer-python", help="interpreter that has flash-attn-4: measure its sm_100a forward")
    arguments = parser.parse_args()

    import numpy as np

    kernel = "flash-attn-4, sm_100a" if arguments.peer_python else "fa4, sm_80"
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    print(f"{kernel}: forward, {arguments.seqlen} x {arguments.seqlen}, D {arguments.head_dim}, one head")
    print(f"schedule {arguments.schedule}, checks {arguments.checks}")
    rates = []
    for number, (instructions, seconds, clock) in enumerate((peers if arguments.peer_python else ours)(arguments)):
        if number:
            rates.append(instructions / seconds)
        print(f"run {number}: {instructions} warp instructions, {seconds:.2f} s of CPU, {clock:.2f} s on the clock", flush=True)
    print(f"median: {statistics.median(rates):,.0f} warp instructions per second of CPU time")


if __name__ == "__main__":
    main()
