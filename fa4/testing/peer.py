"""flash-attn-4 on the virtual GPU: a program, since importing flash-attn-4 changes the DSL's frontend for the whole process.

    python -m fa4.testing.peer [--checks CHECKS] [--captures FOLDER] ARCH SCHEDULE SEED [SEED ...]

Reads a ``Witness`` as JSON from each line of standard input, and prints an ``Answer`` for each, then for each again with the next seed of
the schedule. Launches are written to the folder, numbered (``fa4.vgpu.capture``).
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fa4.testing.check import compare_results, run_attention
from fa4.testing.inputs import AttentionInputs, AttentionShape, make_inputs
from fa4.testing.witness import MASKS, Answer, Witness, witness
from fa4.vgpu import Gpu, attach, torch_cuda


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer all requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checks")
    parser.add_argument("--captures", type=Path)
    parser.add_argument("arch")
    parser.add_argument("schedule")
    parser.add_argument("seeds", type=int, nargs="+")
    given = parser.parse_args(arguments)
    gc.set_threshold(50_000, 20, 20)  # most of what an import or a compile makes stays; else a fifth of the time is search for garbage
    cases = [witness(json.loads(line)) for line in sys.stdin]
    for seed in given.seeds:
        for case in cases:
            options = {"schedule": given.schedule, "seed": seed, "resident": 16, "line_info": given.captures is not None}
            options |= {"checks": given.checks, "unwritten": "nan"}  # a tile has more rows than the tensor
            with attach(given.arch, **cast(Any, options)) as gpu, torch_cuda():
                gpu.captures = None if given.captures is None else []
                print(json.dumps(asdict(_answer(gpu, case))), flush=True)
            for number, capture in enumerate(gpu.captures or ()):
                capture.save(given.captures / f"{number}.npz")


def _answer(gpu: Gpu, case: Witness) -> Answer:
    try:
        results = _packed(case) if case.packed else _dense(case)
        answer = replace(results, witness=case)
    except Exception as error:  # whatever the peer's host code raises is its answer to this request
        answer = Answer(case, failure=f"{type(error).__name__}: {error}")
    report = gpu.report()
    return replace(
        answer,
        kernels=tuple(launch.kernel for launch in gpu.reports),
        instructions=report.instructions,
        seconds=report.seconds,
        opcodes=tuple(report.by_opcode),
    )


def _interface(case: Witness) -> Any:
    interface = import_module("flash_attn.cute.interface")
    interface.utils._fa_disable_2cta_enabled = not case.pairs  # what FA_DISABLE_2CTA sets
    return interface


def _inputs(case: Witness, number: int) -> AttentionInputs:
    lengths = case.lengths[number]
    return make_inputs(AttentionShape(1, *lengths, *case.heads, *case.dims), torch.bfloat16, seed=case.seed + number)


def _dense(case: Witness) -> Answer:
    attention = _interface(case).flash_attn_func

    def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = attention(q, k, v, return_lse=True, num_splits=case.splits, deterministic=case.deterministic, **options)[:2]
        return out, lse

    inputs = _inputs(case, 0)
    options = MASKS[case.mask]
    actual = run_attention(run, inputs, backward=case.backward, **options)
    return Answer(case, tuple(compare_results(actual, inputs, **options)), digests=_digests(actual))


def _packed(case: Witness) -> Answer:
    """Sequences one after the other, each compared by itself."""
    attention = _interface(case).flash_attn_varlen_func
    inputs = [_inputs(case, i) for i in range(len(case.lengths))]
    q, k, v, dout = (torch.cat([getattr(one, name)[0] for one in inputs]) for name in ("q", "k", "v", "dout"))
    ends = [torch.tensor([0, *lengths]).cumsum(0) for lengths in zip(*case.lengths, strict=True)]
    cu_q, cu_k = (x.to(torch.int32) for x in ends)

    def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        longest = {f"max_seqlen_{name}": max(lengths) for name, lengths in zip("qk", zip(*case.lengths, strict=True), strict=True)}
        options |= {"num_splits": case.splits, "deterministic": case.deterministic}
        out, lse = attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, **longest, **options)[:2]
        return out, lse

    options = MASKS[case.mask]
    actual = run_attention(run, AttentionInputs(q, k, v, dout, dout), backward=case.backward, **options)
    results = []
    for i, one in enumerate(inputs):
        rows, columns = (slice(int(end[i]), int(end[i + 1])) for end in ends)
        mine = {name: x[columns if name in ("dk", "dv") else rows][None] for name, x in actual.items() if name != "lse"}
        mine["lse"] = actual["lse"][None, :, rows]
        results += compare_results(mine, one, **options)
    return Answer(case, tuple(results), digests=_digests(actual))


def _digests(results: dict[str, Tensor]) -> tuple[tuple[str, str], ...]:
    """A hash of the bits of each result."""
    return tuple(
        (name, hashlib.sha256(x.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()) for name, x in results.items()
    )


if __name__ == "__main__":
    main()
