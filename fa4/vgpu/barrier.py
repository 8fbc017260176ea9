"""Named barriers of a CTA (PTX ISA 9.7.13.1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.clocks import joined
from fa4.vgpu.engine import WAITING, Wait, wake
from fa4.vgpu.errors import BarrierError, DivergenceError, UnsupportedInstructionError
from fa4.vgpu.memory import FaultError
from fa4.vgpu.program import Register
from fa4.vgpu.state import Cta, Gang

Array = npt.NDArray[Any]
BARRIERS = 16


@dataclass
class Barrier:
    """One phase: threads that arrived, how many are expected (None: all of the CTA that have not exited), who waits, and the reduction."""

    expected: int | None = None
    arrived: int = 0
    waiting: list[int] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    reduction: str = ""
    clock: Array | None = None
    sites: dict[int, int] = field(default_factory=dict)
    results: list[tuple[int, Register]] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)


def execute(gang: Gang, kind: str, aligned: bool, number: Array, threads: Array | None, mask: Array | None, reduction: Any) -> None:
    """The warps of a gang reach bar.sync, arrive or red; ``reduction`` is (function, result register, predicate)."""
    cta = gang.cta
    for i in range(gang.warps):
        warp = cta.warps[gang.first + i]
        here = slice(32 * i, 32 * i + 32)
        active = ~warp.exited
        lanes = active if mask is None else mask[here]
        if not lanes.any():
            continue
        if (lanes != active).any():
            _divergence(gang, here, lanes, active, aligned)
        first = 32 * i + int(lanes.argmax())
        index = _uniform(number, here, lanes, gang.n, "barrier")
        count = None if threads is None else _uniform(threads, here, lanes, gang.n, "number of threads")
        if not 0 <= index < BARRIERS:
            _fault(gang, first, f"barrier {index} does not exist: there are {BARRIERS}")
        if count is not None and (count % 32 or not 0 < count <= 32 * cta.warp_count):
            _fault(gang, first, f"{count} threads at barrier {index}: must be a multiple of 32, up to the CTA's {32 * cta.warp_count}")
        barrier = cta.barriers.setdefault(index, Barrier())
        if barrier.arrivals and barrier.expected != count:
            _fault(
                gang, first, f"barrier {index} is used with {count} threads, but warps {barrier.arrivals} used it with {barrier.expected}"
            )
        barrier.expected = count
        barrier.arrived += 32
        barrier.arrivals.append(warp.index)
        if cta.hazards is not None:
            barrier.sites[warp.index] = gang.site
            barrier.clock = joined(barrier.clock, cta.hazards.arrive(cta.hazards.warp(cta, warp.index)))
        if kind != "arrive":
            barrier.waiting.append(warp.index)
            warp.state, warp.wait = WAITING, Wait(bool, partial(describe, cta, index))
        if reduction is not None:
            name, target, value = reduction
            barrier.reduction = name
            barrier.results.append((warp.index, target))
            barrier.values.append(np.broadcast_to(value, gang.n)[here][lanes])
        if barrier.expected is not None and barrier.arrived > barrier.expected:
            _fault(
                gang, first, f"barrier {index} expects {barrier.expected} threads, and {barrier.arrived} arrived: warps {barrier.arrivals}"
            )
        release(cta, index)


def release(cta: Cta, index: int) -> None:
    """Let the waiting warps go where all expected threads have arrived."""
    barrier = cta.barriers[index]
    expected = 32 * cta.live if barrier.expected is None else barrier.expected
    if barrier.arrived < expected or not barrier.arrivals:
        return
    if barrier.values:
        values = np.concatenate(barrier.values)
        value: Any = {"popc": values.sum(dtype=np.uint32), "and": values.all(), "or": values.any()}[barrier.reduction]
        for warp_index, target in barrier.results:
            rows = cta.predicates if target.bits == 1 else cta.rows[target.bits]
            rows[target.index, 32 * warp_index : 32 * warp_index + 32][~cta.warps[warp_index].exited] = value
    if cta.hazards is not None and len(set(barrier.sites.values())) > 1:
        cta.hazards.sites.mixed.update(barrier.sites.values())
    for warp_index in barrier.waiting:
        wake(cta.warps[warp_index], None)
        if cta.hazards is not None and barrier.clock is not None:
            cta.hazards.follow(cta.hazards.warp(cta, warp_index), barrier.clock, barrier.sites[warp_index])
    cta.launch.progress += 1
    del cta.barriers[index]


def describe(cta: Cta, index: int) -> str:
    """What a barrier has and what it lacks, for the table of a deadlock."""
    barrier = cta.barriers[index]
    expected = 32 * cta.live if barrier.expected is None else barrier.expected
    return f"barrier {index}: {barrier.arrived} of {expected} threads arrived, warps {barrier.arrivals}"


def _uniform(values: Array, here: slice, lanes: Array, n: int, what: str) -> int:
    chosen = np.broadcast_to(values, n)[here][lanes]
    if (chosen != chosen[0]).any():
        raise FaultError(BarrierError, f"the {what} differs between lanes of a warp")
    return int(chosen[0])


def _divergence(gang: Gang, here: slice, lanes: Array, active: Array, aligned: bool) -> None:
    faulty = np.zeros(gang.n, bool)
    faulty[here] = lanes
    missing = np.flatnonzero(active & ~lanes).tolist()
    if aligned:
        raise FaultError(DivergenceError, f"lanes {missing} of the warp do not execute this barrier together with the others", faulty)
    raise FaultError(UnsupportedInstructionError, f"a barrier that lanes {missing} of the warp do not reach with the others", faulty)


def _fault(gang: Gang, lane: int, message: str) -> None:
    faulty = np.zeros(gang.n, bool)
    faulty[lane] = True
    raise FaultError(BarrierError, message, faulty)
