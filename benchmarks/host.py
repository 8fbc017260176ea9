"""What a call costs on the host: everything but the launch itself, which a function that does nothing takes.

    python benchmarks/host.py

No GPU is needed. CUDA tensors here lie in host memory (tests/runtime/host_cuda.py); torch's CPU allocator stands for its CUDA one, whose
cached path costs about as much. The compiled host code, tvm-ffi and torch's dispatcher are real. Causal forward, head dim 64, bfloat16,
contiguous q, k, v, kernel compiled and loaded before the clock starts. A figure is the median of the rounds, each of them the mean of
many calls; CPU time of the one thread, because other work on the machine would count otherwise.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jit import cpu_name
from torch import Tensor

import fa4
from fa4 import ops
from fa4.compiler.artifact import Artifact
from fa4.compiler.load import load_function
from fa4.problem import AttentionOptions
from fa4.runtime import cuda, device

ROOT = Path(__file__).parents[1]
SHAPE, LSE_SHAPE = (2, 512, 8, 64), (2, 8, 512)
OPTIONS = AttentionOptions(SHAPE[3] ** -0.5, None, 0)

sys.path.insert(0, str(ROOT / "tests" / "runtime"))
on_cuda: Callable[[Tensor], Tensor] = import_module("host_cuda").on_cuda


def do_nothing(_name: str) -> int | None:
    """For every function of the CUDA runtime one of libc that takes a pointer, does nothing, and returns 0."""
    return ctypes.cast(ctypes.CDLL(None).pthread_mutexattr_destroy, ctypes.c_void_p).value if _name.startswith("_cu") else None


def load(artifact: Artifact, index: int) -> Callable[..., Any]:
    """Host code whose launches do nothing."""
    return load_function(artifact, do_nothing, index)


def install() -> None:
    """One device of compute capability 8.0, and results out of memory that is allocated beforehand, each after a real allocation."""
    torch.cuda._lazy_init = lambda: None
    vars(device).update(
        capability=lambda _index: (8, 0), current_stream=lambda _index: 0, on_device=lambda _index: nullcontext(), load=load
    )
    pools: dict[tuple[int, ...], Iterator[Tensor]] = {
        shape: itertools.cycle([on_cuda(torch.empty(shape, dtype=dtype)) for _ in range(4)])
        for shape, dtype in ((SHAPE, torch.bfloat16), (LSE_SHAPE, torch.float32))
    }
    allocate, host = Tensor.new_empty, torch.empty(1, dtype=torch.bfloat16)

    def new_empty(_self: Tensor, shape: tuple[int, ...], **options: Any) -> Tensor:
        allocate(host, shape, **options)
        return next(pools[shape])

    Tensor.new_empty = new_empty  # type: ignore[method-assign, assignment]


def microseconds(calls: dict[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, float]:
    """Medians over rounds of the mean time of a call. Contenders take turns, so that a slow spell of the machine hits them all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(repeats):
                call()
            times[name].append((time.process_time() - start) / repeats)
    return {name: statistics.median(found[1:]) * 1e6 for name, found in times.items()}  # the first round warms up


def contenders() -> dict[str, Callable[[], object]]:
    """What is timed: from the whole call down to its parts."""
    q, k, v = (on_cuda(torch.randn(SHAPE).to(torch.bfloat16)) for _ in range(3))
    arguments = (None, None, 0, 0.0, False, "cuda", None)
    operator = ops.attention_forward
    out, lse = cuda.attention_forward(q, k, v, OPTIONS, None)
    ((_, function),) = cuda._functions.values()
    return {
        "fa4.attention": lambda: fa4.attention(q, k, v, causal=True),
        "the op (torch.ops.fa4.attention_forward)": lambda: operator(q, k, v, *arguments),
        "below the op (fa4.runtime.cuda)": lambda: cuda.attention_forward(q, k, v, OPTIONS, None),
        "  of it: host code, tvm-ffi, arguments": lambda: function(q, k, v, out, lse, 0.125, None, None, None, 0),
        "  of it: results": lambda: (q.new_empty(SHAPE), q.new_empty(LSE_SHAPE, dtype=torch.float32)),
    }


def dispatch_on_cpu() -> dict[str, Callable[[], object]]:
    """Torch's dispatcher alone, on CPU tensors: an op of the same schema whose implementation returns at once."""
    schema = str(torch.ops.fa4.attention_forward.default._schema).partition("(")[2]
    library = torch.library.Library("fa4_benchmark", "DEF")
    library.define(f"nothing({schema}")
    q = torch.randn(SHAPE).to(torch.bfloat16)
    leaf = q.clone().requires_grad_()
    results = torch.empty(SHAPE), torch.empty(LSE_SHAPE)
    library.impl("nothing", lambda *_: results, "CPU")
    torch.library.register_autograd("fa4_benchmark::nothing", lambda *_: None, lib=library)
    operator, arguments = torch.ops.fa4_benchmark.nothing.default, (None, None, 0, 0.0, False, "cpu", None)

    def recording(_keep: torch.library.Library = library) -> object:
        with torch.enable_grad():
            return operator(leaf, q, q, *arguments)

    return {
        "an op that does nothing, on CPU tensors": lambda: operator(q, q, q, *arguments),
        "the same, recording a gradient": recording,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=1000)
    arguments = parser.parse_args()
    if torch.backends.cuda.is_built():
        raise SystemExit("this needs a CPU build of torch: tvm-ffi asks a CUDA build for streams, and that needs a driver")
    install()
    print(f"{cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}")
    print(f"fa4 {fa4.__version__}, torch {torch.__version__}, apache-tvm-ffi {version('apache-tvm-ffi')}")
    print(f"microseconds of CPU time a call, medians of {arguments.rounds} rounds of {arguments.calls} calls, no gradient wanted\n")
    with torch.no_grad():
        for name, value in microseconds(contenders() | dispatch_on_cpu(), arguments.rounds, arguments.calls).items():
            print(f"{name:44} {value:6.2f}")


if __name__ == "__main__":
    main()
