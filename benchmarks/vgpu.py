"""Speed and memory of the virtual GPU: warp instructions per second of CPU time, and the greatest resident set of the process.

    python benchmarks/vgpu.py [--seqlen 512] [--head-dim 64] [--heads 1] [--repeats 5] [--checks basic] [--execution grouped]
        [--peer-python /path/to/python [--backward]]

One process, one core. CPU time, because other work on the machine would count otherwise; the wall clock is printed beside it. Parsing and
generating code are in the first run only; the median is over the others. The kernel is the Ampere forward; with ``--peer-python``, an
interpreter that has flash-attn-4 and what this project needs, flash-attn-4's sm_100a forward, or with ``--backward`` forward and backward
with what comes before and after it. The memory is that of the whole process: interpreter, torch, the compiler, tensors and the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is imported

ROOT = Path(__file__).parents[1]

PEER = """
import json, resource, sys, time
import torch
from fa4.vgpu import attach, torch_cuda
from fa4.testing import AttentionShape, make_inputs
from flash_attn.cute import flash_attn_func
torch.set_num_threads(1)
seqlen, head_dim, heads, repeats, backward, options = json.loads(sys.argv[1])
inputs = make_inputs(AttentionShape(1, seqlen, seqlen, heads, heads, head_dim))
for _ in range(repeats + 1):
    with attach("sm_100a", unwritten="nan", line_info=False, **options) as gpu, torch_cuda():
        start = time.process_time()
        q, k, v = (x.detach().clone().requires_grad_(backward) for x in (inputs.q, inputs.k, inputs.v))
        out = flash_attn_func(q, k, v)
        if backward:
            (out[0] if isinstance(out, tuple) else out).backward(inputs.dout)
        seconds = time.process_time() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([gpu.report().instructions, seconds, gpu.report().seconds, memory]), flush=True)
"""

Run = tuple[int, float, float, int]


def ours(arguments: argparse.Namespace) -> Iterator[Run]:
    """Of each run: warp instructions, CPU seconds, wall-clock seconds, and the greatest resident set so far in KiB."""
    from fa4.testing import AttentionShape, make_inputs
    from fa4.vgpu import Gpu

    sys.path.insert(0, str(ROOT / "tests"))
    attention = import_module("forward_call").attention
    heads = arguments.heads
    inputs = make_inputs(AttentionShape(1, arguments.seqlen, arguments.seqlen, heads, heads, arguments.head_dim))
    for _ in range(arguments.repeats + 1):
        gpu = Gpu("sm_80", **options_of(arguments))
        start = time.process_time()
        attention(gpu, inputs.q, inputs.k, inputs.v)
        seconds = time.process_time() - start
        yield gpu.report().instructions, seconds, gpu.report().seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """How the machine runs."""
    return {name: getattr(arguments, name) for name in ("schedule", "checks", "execution")}


def peers(arguments: argparse.Namespace) -> Iterator[Run]:
    """The same of flash-attn-4; its first run compiles the kernel too."""
    shape = [arguments.seqlen, arguments.head_dim, arguments.heads]
    request = json.dumps([*shape, arguments.repeats, arguments.backward, options_of(arguments)])
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [arguments.peer_python, "-W", "ignore", "-c", PEER, request]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("["):
                instructions, seconds, clock, memory = json.loads(line)
                yield instructions, seconds, clock, memory
    if process.returncode:
        raise SystemExit(f"{arguments.peer_python} failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--schedule", default="round_robin")
    parser.add_argument("--checks", default="basic", help="basic, hazards or isa (default: %(default)s)")
    parser.add_argument("--execution", default="grouped", help="grouped or plain (default: %(default)s)")
    parser.add_argument("--peer-python", help="interpreter that has flash-attn-4: measure its sm_100a forward")
    parser.add_argument("--backward", action="store_true", help="flash-attn-4's forward and backward")
    arguments = parser.parse_args()
    if arguments.backward and not arguments.peer_python:
        parser.error("--backward needs --peer-python")

    import numpy as np

    kernel = "flash-attn-4, sm_100a" if arguments.peer_python else "fa4, sm_80"
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    what = f"forward{' and backward' * arguments.backward}"
    print(f"{kernel}: {what}, {arguments.seqlen} x {arguments.seqlen}, D {arguments.head_dim}, heads {arguments.heads}")
    print(", ".join(f"{name} {value}" for name, value in options_of(arguments).items()))
    rates, most = [], 0
    for number, (instructions, seconds, clock, memory) in enumerate((peers if arguments.peer_python else ours)(arguments)):
        most = max(most, memory)
        if number:
            rates.append(instructions / seconds)
        print(f"run {number}: {instructions} warp instructions, {seconds:.2f} s of CPU, {clock:.2f} s on the clock", flush=True)
    if rates:
        print(f"median: {statistics.median(rates):,.0f} warp instructions per second of CPU time")
    print(f"memory: {most / 1024:,.0f} MiB at most")


if __name__ == "__main__":
    main()
