"""A kernel on small problems, from which the time of a large one follows; the traces are recorded here for this project's kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from fa4.errors import UnsupportedError
from fa4.perfmodel.trace import Recorder, Trace
from fa4.schedule import Order

STEPS = (8, 16)
"""Key blocks of the two tiles whose difference is the cost of a step."""

TILES = 3
"""Tiles of one CTA from which the cost of going on to the next one follows."""

_BACKWARD_TILE = 128
"""Queries, and keys of a CTA."""

MASKED_TILES = 6
"""Query tiles of the triangle from which the costs of a causal problem follow; the first, the fourth and the last are replayed."""


@dataclass(frozen=True)
class Request:
    """What is asked: an attention on an architecture. ``pairs``: CTA pairs where a kernel has them."""

    arch: str
    head_dim: int = 128
    head_dim_v: int = 0
    seqlen: int = 8192
    heads: int = 16
    heads_kv: int = 0
    batch: int = 4
    causal: bool = False
    backward: bool = False
    deterministic: bool = False
    pairs: bool = True
    dtype: str = "bfloat16"

    @property
    def head_dims(self) -> tuple[int, int]:
        """(D, Dv)."""
        return self.head_dim, self.head_dim_v or self.head_dim


@dataclass(frozen=True)
class Recording:
    """Traces of one kernel.

    ``traces`` come with the number of tiles of each CTA. ``tile`` has the queries and keys of a step of a CTA or cluster of ``cluster``
    CTAs, ``order`` is that of ``fa4.schedule``; ``resident`` CTAs share an SM. A tile serves ``pack`` query heads at a time.
    ``toolchain`` says what compiled it.
    """

    name: str
    traces: tuple[tuple[Trace, int], ...]
    tile: tuple[int, int]
    order: Order
    cluster: int = 1
    resident: int = 1
    pack: int = 1
    toolchain: str = ""


def lengths(rows: int, keys: int, causal: bool, stays: bool, backward: bool = False) -> list[tuple[int, int, int]]:
    """(Sq, Sk, tiles of a CTA) of the problems to record; ``rows`` and ``keys`` are of a tile and its steps.

    Where a CTA ``stays`` for several tiles, one does all of a problem: those of one tile, under a causal mask the last of a longer call,
    and that of several.
    """
    if causal and not stays:
        unit = max(rows, keys)
        return [(MASKED_TILES * unit, MASKED_TILES * unit, 1)]
    if backward:
        return [(steps * rows, keys, 1) for steps in STEPS]
    found = [(rows, steps * keys, 1) for steps in STEPS]
    return found + [(TILES * rows, STEPS[0] * keys, TILES)] * stays


def record(request: Request, config: Any = None) -> Recording:
    """This project's kernel for a request, on the virtual GPU; ``config`` in place of the tuned one.

    The tuned one has CTA pairs where tuning says so, and never where the request forbids them.

    Raises:
        UnsupportedError: there is none, or it is of a kind that is not recorded here.
        CompileError, VgpuError: as from compiling and running it.
    """
    from fa4 import dispatch, tuning
    from fa4.arch import get_arch
    from fa4.compiler import get
    from fa4.config import STAY, AmpereForwardConfig, BlackwellBackwardConfig, BlackwellForwardConfig
    from fa4.problem import AttentionProblem

    arch = get_arch(request.arch)
    direction: Any = "backward" if request.backward else "forward"
    bounds = None, 0 if request.causal else None
    problem = AttentionProblem.of(direction, request.dtype, request.head_dims, bounds, 0.0, request.deterministic)
    support = dispatch.kernel_support(problem, request.arch)
    if not support:
        raise UnsupportedError("direction", direction, support.reason, "`fa4 doctor` lists the kernels there are")
    group = request.heads // (request.heads_kv or request.heads)
    if config is None:
        config = tuning.config(problem, arch, tuning.Queries.of(request.seqlen, group))
        config = config if request.pairs else tuning.with_pair(config, False, *request.head_dims)
    order: Order = "lpt" if request.causal else "single"
    if isinstance(config, BlackwellForwardConfig):
        cluster, pack, resident = config.cluster, config.pack_heads, 1
        rows, keys = config.q_tiles * config.positions * cluster, config.tile_n
        order = cast(Order, config.order)
        config = replace(config, ctas=cluster)
    elif isinstance(config, BlackwellBackwardConfig):
        cluster, pack, resident = config.cluster, 1, 1
        rows, keys = _BACKWARD_TILE, _BACKWARD_TILE * cluster
        order = cast(Order, config.order)
    elif isinstance(config, AmpereForwardConfig):
        rows, keys, cluster, pack, resident = config.tile_m, config.tile_n, 1, 1, 0
    else:
        raise UnsupportedError(
            "direction", direction, f"the model does not record kernels of {type(config).__name__}", "use another direction"
        )
    artifact = get(problem, config, request.arch, line_info=True)
    traces = []
    for seqlen_q, seqlen_k, tiles in lengths(rows, keys, request.causal, order in STAY, request.backward):
        traces.append((_run(request, artifact, (seqlen_q, seqlen_k, pack), cluster), tiles))
    tools = artifact.toolchain
    return Recording(
        name=f"fa4 {direction}",
        traces=tuple(traces),
        tile=(rows, keys),
        order=order,
        cluster=cluster,
        pack=pack,
        resident=resident or _blocks_per_sm(artifact, request.arch),
        toolchain=f"nvidia-cutlass-dsl {tools.dsl} {tools.flavour}",
    )


def _run(request: Request, artifact: Any, sizes: tuple[int, int, int], resident: int) -> Trace:
    """The trace of one call of a kernel: one sequence, one key head; ``sizes`` are Sq, Sk and query heads.

    ``resident`` CTAs are there at a time: those of one cluster, so that in the dynamic order it does all tiles.
    """
    import torch

    from fa4.compiler import get
    from fa4.problem import AttentionOptions, AttentionProblem
    from fa4.runtime import backward, virtual
    from fa4.vgpu import Gpu

    (seqlen_q, seqlen_k, heads), (d, dv) = sizes, request.head_dims
    dtype = getattr(torch, request.dtype)
    generator = torch.Generator().manual_seed(0)
    shapes = (seqlen_q, heads, d), (seqlen_k, 1, d), (seqlen_k, 1, dv), (seqlen_q, heads, dv), (seqlen_q, heads, dv)
    q, k, v, out, dout = (torch.randn(1, *shape, generator=generator).to(dtype) for shape in shapes)
    lse = torch.full((1, heads, seqlen_q), math.log(seqlen_k))
    gpu = Gpu(request.arch, resident=resident)
    gpu.observer = recorder = Recorder(arch=request.arch)
    if not request.backward:
        virtual.run(gpu, artifact, (q, k, v), (out, lse), (d**-0.5, None, None, None))
        return recorder.traces[-1]

    def find(problem: AttentionProblem, tuned: Any, arch: str) -> Any:
        """The artifact of this recording in place of the tuned main kernel."""
        return artifact if problem.direction == "backward" else get(problem, tuned, arch)

    options = AttentionOptions(d**-0.5, None, 0 if request.causal else None, deterministic=request.deterministic)
    backward.attention_backward(backward.Saved(q, k, v, out, lse, dout, None), options, request.arch, partial(virtual.run, gpu), find)
    return next(trace for trace in recorder.traces if trace.kernel == artifact.kernels[0].name)


def _blocks_per_sm(artifact: Any, arch: str) -> int:
    from fa4.arch import get_arch
    from fa4.inspection.resources import resources

    return resources(artifact.kernels[0], get_arch(arch)).blocks_per_sm or 1


def clusters_of(trace: Trace, causal: bool) -> Sequence[int]:
    """Which clusters of a trace are replayed, each alone."""
    numbers = list(trace.clusters())
    return [numbers[0], numbers[len(numbers) // 2], numbers[-1]] if causal and len(numbers) > 3 else numbers
