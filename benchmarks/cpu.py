"""The CPU backend against torch's scaled_dot_product_attention, and its peak memory.

    python benchmarks/cpu.py            # speed and memory, about half an hour on 2 cores
    python benchmarks/cpu.py --quick    # fewer shapes
    python benchmarks/cpu.py speed      # or: memory
    python benchmarks/cpu.py speed --cpu-time    # one thread, CPU time: for a machine that others use too

A case has a process of its own, in which the contenders take turns in random order: between two processes the same call differs by
15%, within one by 1%. A line shows each one's median and their ratio torch / fa4 (above 1: fa4 is faster), the median over several
processes. Memory is the peak above inputs and outputs, in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import fa4
from fa4.cpu import torch_flash
from fa4.cpu.backward import attention_backward
from fa4.cpu.forward import attention_forward
from fa4.problem import AttentionOptions
from fa4.testing.memory import measure_peak_memory


@dataclass(frozen=True)
class Case:
    """One shape and mask; ``window`` is a left bound, 0 for none; ``softcap`` keeps a request off torch's kernel."""

    seqlen: int
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = False
    backward: bool = False
    batch: int = 1
    heads: int = 8
    heads_kv: int = 8
    window: int = 0
    softcap: float = 0.0

    def __str__(self) -> str:
        mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        heads = f"H{self.heads}" if self.heads == self.heads_kv else f"H{self.heads}/{self.heads_kv}"
        direction = "forward+backward" if self.backward else "forward"
        cap = " softcap" if self.softcap else ""
        return f"{direction:16} B{self.batch} S{self.seqlen} {heads} D{self.head_dim} {self.dtype} {mask}{cap}"

    def inputs(self) -> list[Tensor]:
        """q, k, v, dout, drawn in place so that no freed copy hides memory."""
        heads = (self.heads, self.heads_kv, self.heads_kv, self.heads)
        dtype = getattr(torch, self.dtype)
        return [torch.empty(self.batch, self.seqlen, h, self.head_dim, dtype=dtype).normal_() for h in heads]

    def options(self) -> AttentionOptions:
        """The call's numbers as the backend takes them."""
        return AttentionOptions(self.head_dim**-0.5, self.window or None, 0 if self.causal or self.window else None, self.softcap)


def run_fa4(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    """The call under test."""
    window = (case.window, 0) if case.window else (None, None)
    return fa4.attention(q, k, v, causal=case.causal, window_size=window, softcap=case.softcap)


def run_torch(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    """The torch call for the same work; a window needs a mask."""
    mask = None
    if case.window:
        distance = torch.arange(case.seqlen)[:, None] - torch.arange(case.seqlen)
        mask = (distance >= 0) & (distance <= case.window)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=case.causal and mask is None,
        enable_gqa=case.heads != case.heads_kv,
    )
    return out.transpose(1, 2)


CONTENDERS = {"fa4": run_fa4, "torch": run_torch}


def measure_seconds(case: Case, clock: Callable[[], float], seconds: float = 3.0) -> list[float]:
    """Median time of a call of each contender, over at least 4 turns and about ``seconds`` or 400 turns."""
    q, k, v, dout = case.inputs()
    leaves = (q.requires_grad_(case.backward), k.requires_grad_(case.backward), v.requires_grad_(case.backward))
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    start = time.perf_counter()
    for turn in range(401):
        if turn > 4 and time.perf_counter() - start > seconds:
            break
        for name in random.sample(list(CONTENDERS), len(CONTENDERS)):
            before = clock()
            out = CONTENDERS[name](*leaves, case)
            if case.backward:
                torch.autograd.grad(out, leaves, dout)
            times[name].append(clock() - before)
            del out
    return [statistics.median(each[1:]) for each in times.values()]  # the first turn warms up


def measure_bytes(case: Case) -> tuple[int, int, str]:
    """Peak above inputs and outputs of the forward and of the backward, and which path each took."""
    q, k, v, dout = case.inputs()
    options = case.options()
    with measure_peak_memory() as forward:
        out, lse = attention_forward(q, k, v, options)
    with measure_peak_memory() as backward:
        gradients = attention_backward(dout, None, q, k, v, out, lse, options, needed=(True, True, True))
    outputs = (out.nbytes + lse.nbytes, sum(x.nbytes for x in gradients if x is not None))
    path = "torch" if torch_flash.fits_forward(q, k, v, options) else "tiles"
    return forward.extra_bytes - outputs[0], backward.extra_bytes - outputs[1], path


def in_process(task: str, case: Case, *flags: str) -> list[float]:
    """Run one measurement in a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--task", task, "--case", json.dumps(asdict(case)), *flags]
    result: list[float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def speed(quick: bool, rounds: int, *flags: str) -> None:
    lengths, windows = ((1024,), (2048,)) if quick else ((512, 1024, 2048, 4096), (2048, 4096))
    cases = [
        Case(s, d, dtype, causal, backward)
        for backward in (False, True)
        for dtype in ("float32", "bfloat16", "float16")
        for d in (64, 128)
        for causal in (False, True)
        for s in (lengths if dtype != "float16" else (1024,))
    ]
    cases += [Case(1024, 128, dtype, True, b, heads_kv=2) for dtype in ("float32", "bfloat16") for b in (False, True)]
    cases += [Case(s, 64, dtype, True, b, window=256) for dtype in ("float32", "bfloat16") for b in (False, True) for s in windows]
    print(f"{'case':62} {'fa4 ms':>9} {'torch ms':>9} {'torch/fa4':>9}")
    for case in cases:
        pairs = [in_process("speed", case, *flags) for _ in range(rounds)]
        ours, theirs = (statistics.median(p[i] for p in pairs) * 1e3 for i in (0, 1))
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"{case!s:62} {ours:9.2f} {theirs:9.2f} {ratio:9.2f}", flush=True)


def memory(quick: bool) -> None:
    lengths = (4096, 8192) if quick else (4096, 8192, 16384, 32768)
    print(f"\n{'peak above inputs and outputs, MB':62} {'forward':>9} {'backward':>9} {'path':>9}")
    for base in (Case(0, causal=True), Case(0, dtype="bfloat16", causal=True), Case(0, causal=True, softcap=30.0)):
        peaks: list[tuple[float, ...]] = []
        for seqlen in lengths:
            case = Case(**{**asdict(base), "seqlen": seqlen, "heads": 2, "heads_kv": 2})
            forward, backward, path = in_process("memory", case)
            peaks.append((forward / 2**20, backward / 2**20))
            print(f"{case!s:62} {peaks[-1][0]:9.1f} {peaks[-1][1]:9.1f} {path:>9}", flush=True)
        inputs = 4 * 2 * 64 * (2 if base.dtype == "bfloat16" else 4) / 2**20  # q, k, v, dout per position, MB; as much again comes out
        for name, i in (("forward", 0), ("backward", 1)):
            total = [p[i] + 2 * inputs * s for p, s in zip(peaks, lengths, strict=True)]
            verdict = "linear" if total[-1] <= 2 * total[-2] and max(p[i] for p in peaks) <= 64 else "NOT within the limit"
            print(f"  {name}: N = {lengths[-1]} takes {total[-1] / total[-2]:.2f} times the memory of N = {lengths[-2]}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", nargs="?", choices=["speed", "memory"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--task", choices=["speed", "memory"], help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cpu_time:
        torch.set_num_threads(1)
    if arguments.task:
        clock = time.process_time if arguments.cpu_time else time.perf_counter
        case = Case(**json.loads(arguments.case))
        print(json.dumps(measure_bytes(case) if arguments.task == "memory" else measure_seconds(case, clock)))
        return
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}")
    if arguments.what != "memory":
        speed(arguments.quick, arguments.rounds, *(["--cpu-time"] if arguments.cpu_time else []))
    if arguments.what != "speed":
        memory(arguments.quick)


if __name__ == "__main__":
    main()
