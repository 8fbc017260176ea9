"""Recording flash-attn-4: a program, since importing flash-attn-4 changes the DSL's frontend for the whole process.

    python -m fa4.perfmodel.peer REQUEST FOLDER

REQUEST is a ``Request`` as JSON. Writes a trace for each problem into FOLDER, and prints what else a ``Recording`` has as one line of JSON.
``record_peer`` runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import fa4
from fa4.errors import Fa4Error, UnsupportedError
from fa4.perfmodel.recording import Recording, Request, lengths
from fa4.perfmodel.trace import Recorder, Trace
from fa4.testing.witness import PEER, VERSION, require_peer

_BLACKWELL = ("sm_100a", "sm_103a")
_ROWS, _KEYS = 128, 128
"""Of a tile of the tensor core on Blackwell; a CTA of the forward has two tiles of queries, except at head dim 256."""
_PROBE = 1536
"""Queries that tiles of 64, 128, 192 and 256 all divide."""


def record_peer(request: Request) -> Recording:
    """flash-attn-4's kernel for a request, recorded in a process of its own.

    Raises:
        BackendError: flash-attn-4 is not installed.
        UnsupportedError: the model does not record its kernels for this architecture.
        Fa4Error: it failed.
    """
    require_peer()
    if request.arch not in _BLACKWELL and (request.arch != "sm_90a" or request.backward):
        rule = f"of {PEER} kernels for {' and '.join(_BLACKWELL)} are recorded, and the forward for sm_90a"
        raise UnsupportedError("arch", request.arch, rule, "use sm_100a")
    path = os.pathsep.join(filter(None, [str(Path(fa4.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="fa4-model-") as folder:
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "fa4.perfmodel.peer", json.dumps(asdict(request)), folder],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
        line = next((line for line in result.stdout.splitlines() if line.startswith("{")), None)
        if result.returncode or line is None:
            reason = (result.stderr or result.stdout).strip().splitlines()[-1:] or ["no output"]
            raise Fa4Error(f"{PEER} could not be recorded: {reason[0]}")
        data = json.loads(line)
        traces = tuple((Trace.load(Path(folder, name)), tiles) for name, tiles in data["traces"])
    return Recording(**{**data, "traces": traces, "tile": tuple(data["tile"])})


def main(text: str, folder: str) -> None:
    """Record everything that a request needs."""
    from fa4.vgpu import attach, torch_cuda

    request = Request(**json.loads(text))
    blackwell = request.arch in _BLACKWELL
    pairs = blackwell and request.pairs and _uses_pairs(request)
    cluster = 2 if pairs else 1
    persistent = blackwell and not (request.causal or request.backward)
    traces: list[tuple[str, int]] = []
    sms = cluster if persistent else None
    with attach(request.arch, unwritten="nan", resident=16, line_info=False, sms=sms) as gpu, torch_cuda():
        rows, keys = _tile(request, cluster) if blackwell else _hopper_tile(_call(gpu, request, (_PROBE, 128)))
        for seqlen_q, seqlen_k, tiles in lengths(rows, keys, request.causal, persistent, request.backward):
            trace = _call(gpu, request, (seqlen_q, seqlen_k))
            name = f"{len(traces)}.trace"
            trace.save(Path(folder, name))
            traces.append((name, tiles))
    if trace.cluster_ctas != cluster:
        raise UnsupportedError("pairs", request.pairs, f"{PEER} used clusters of {trace.cluster_ctas} CTAs, not {cluster}", "report it")
    data = {
        "name": f"{PEER} {VERSION} {'backward' if request.backward else 'forward'}, {'CTA pairs' if pairs else 'one CTA'}",
        "traces": traces,
        "tile": (rows, keys),
        "order": "persistent" if persistent else "spt" if request.backward else "lpt" if request.causal else "single",
        "cluster": cluster,
        "toolchain": _toolchain(),
    }
    print(json.dumps(data), flush=True)


def _call(gpu: Any, request: Request, seqlens: tuple[int, int]) -> Trace:
    """The main kernel of a call with one sequence and one head."""
    import torch

    interface = import_module("flash_attn.cute.interface")
    interface.utils._fa_disable_2cta_enabled = not request.pairs  # what FA_DISABLE_2CTA sets
    gpu.observer = recorder = Recorder(arch=request.arch)
    generator = torch.Generator().manual_seed(0)
    shapes = zip((seqlens[0], *seqlens[1:], *seqlens[1:]), (request.head_dims[0], *request.head_dims), strict=True)
    dtype = getattr(torch, request.dtype)
    q, k, v = (torch.randn(1, n, 1, d, generator=generator).to(dtype).requires_grad_(request.backward) for n, d in shapes)
    out = interface.flash_attn_func(q, k, v, causal=request.causal, deterministic=request.deterministic)
    out = out[0] if isinstance(out, tuple) else out
    if request.backward:
        out.backward(torch.randn(out.shape, generator=generator).to(dtype))
    return _main_kernel(recorder.traces, request.backward)


def _hopper_tile(trace: Trace) -> tuple[int, int]:
    """Queries and keys of a tile, from a call with ``_PROBE`` queries: those of a CTA, and the columns of the first product."""
    first = next(event for warp in trace.ctas[0].warps for event in warp.events if event.kind == "wgmma")
    return _PROBE // (trace.grid[0] * trace.grid[1] * trace.grid[2]), first.data[0]


def _uses_pairs(request: Request) -> bool:
    """Where flash-attn-4 uses CTA pairs for dense batches: in the backward from D 128 on, in the forward without a mask."""
    return request.head_dim >= 128 and (request.backward or not request.causal)


def _tile(request: Request, cluster: int) -> tuple[int, int]:
    """Queries and keys of a step of a CTA or a pair."""
    if request.backward:
        return _ROWS, _KEYS * cluster
    return _ROWS * cluster * (1 if request.head_dim == 256 else 2), _KEYS


def _main_kernel(traces: list[Trace], backward: bool) -> Trace:
    """Of the kernels of a call the one with the products."""
    word = "BackwardSm" if backward else "ForwardSm"
    found = [t for t in traces if word in t.kernel] or [t for t in traces if ("bwd_sm" if backward else "fwd_sm") in t.kernel]
    return found[-1]


def _toolchain() -> str:
    import cutlass

    return f"nvidia-cutlass-dsl {metadata.version('nvidia-cutlass-dsl')} cu{cutlass.CUDA_VERSION.major}"


if __name__ == "__main__":
    main(*sys.argv[1:])
