"""The predicted time of an attention, with an interval over an ensemble of machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fa4.arch import get_arch
from fa4.config import padded_head_dim
from fa4.errors import ModelError
from fa4.perfmodel.compare import Interval
from fa4.perfmodel.extrapolate import Sample, TileCost, attention_flop, fit, problem_cycles
from fa4.perfmodel.list_schedule import ptx_schedule
from fa4.perfmodel.machine import Machine
from fa4.perfmodel.machine_schedule import sass_schedule
from fa4.perfmodel.recording import Recording, Request, clusters_of
from fa4.perfmodel.report import Report
from fa4.perfmodel.schedule import Schedule as WarpOrder
from fa4.perfmodel.simulation import replay
from fa4.perfmodel.trace import Trace
from fa4.schedule import Schedule, TileProblem

Source = Literal["sass", "ptx"]


@dataclass(frozen=True)
class Prediction:
    """Of one kernel.

    ``cycles`` and ``tflops`` have a value for each machine, in the order of the ensemble; ``costs`` as well. ``report`` is the replay
    of the longest tile on the first machine, ``steady`` the share of the tensor cores' peak that a step reaches.
    """

    name: str
    request: Request
    cycles: tuple[float, ...]
    tflops: tuple[float, ...]
    costs: tuple[TileCost, ...]
    report: Report
    steady: float
    recording: Recording
    machines: tuple[Machine, ...]

    def at(self, **sizes: int) -> Prediction:
        """Of another ``seqlen``, ``batch``, ``heads`` or ``heads_kv``, which change neither kernel nor cost of a tile."""
        request = replace(self.request, **sizes)  # type: ignore[arg-type]  # sizes are integers
        cycles, tflops = _extrapolated(request, self.recording, self.costs, self.machines)
        return replace(self, request=request, cycles=cycles, tflops=tflops)

    def data(self) -> dict[str, Any]:
        """What ``fa4 model --json`` prints for a kernel."""
        tflops, cycles = Interval.of(self.tflops), Interval.of(self.cycles)
        report = self.report.data()
        limiter, share = self.report.limiter
        return {
            "kernel": self.name,
            "toolchain": self.recording.toolchain,
            "machines": len(self.tflops),
            "tflops": tflops.median,
            "tflops_low": tflops.low,
            "tflops_high": tflops.high,
            "cycles": cycles.median,
            "cycles_low": cycles.low,
            "cycles_high": cycles.high,
            "steady": self.steady,
            "limiter": limiter,
            "limiter_share": share,
            "tile_cost": vars(self.costs[0]),
            **{name: report[name] for name in ("busy", "schedule", "unaligned", "spills")},
            "stalls": report["stalls"][:40],
        }


def tile_problem(request: Request, recording: Recording) -> TileProblem:
    """The tiles of a request, as the recorded kernel cuts it."""
    return TileProblem(
        ((request.seqlen, request.seqlen),),
        batch=request.batch,
        heads=request.heads // recording.pack,
        heads_kv=request.heads_kv or request.heads,
        head_dims=request.head_dims,
        tile=recording.tile,
        window=(None, 0 if request.causal else None),
        backward=request.backward,
    )


def step_flop(request: Request, tile: tuple[int, int]) -> float:
    """FLOP that the tensor cores do for one pair of blocks."""
    d, dv = map(padded_head_dim, request.head_dims)
    return 2.0 * tile[0] * tile[1] * (3 * d + 2 * dv if request.backward else d + dv)


def orders(recording: Recording, source: Source = "sass") -> list[WarpOrder]:
    """The order of instructions in each trace.

    Raises:
        ModelError, InspectionError: as from ``sass_schedule``.
    """
    return [sass_schedule(trace) if source == "sass" else ptx_schedule(trace) for trace, _ in recording.traces]


def predict(request: Request, recording: Recording, machines: Sequence[Machine], source: Source = "sass") -> Prediction:
    """Replay a recording on every machine, and extrapolate to the request.

    Raises:
        ModelError: traces, machine code and machines do not fit together.
    """
    if not machines:
        raise ModelError("machines", 0, "an ensemble has at least one", "use fa4.perfmodel.ensemble")
    per_step = recording.pack * step_flop(request, recording.tile)
    warps = orders(recording, source)
    costs = []
    first: Report | None = None
    for seed, machine in enumerate(machines):
        samples: list[Sample] = []
        turns: list[float] = []
        for (trace, tiles), order in zip(recording.traces, warps, strict=True):
            for number in clusters_of(trace, request.causal):
                report = _alone(trace, order, machine, number, (recording.resident, seed))
                samples.append(Sample(report.flop / recording.resident / per_step, tiles, report.cycles))
                turns += report.turns
                if seed == 0 and tiles == 1 and (first is None or report.flop > first.flop):
                    first = report
        noticed = machine.global_latency.value  # half a round trip until the next look sees it, half until the warp knows
        costs.append(replace(fit(samples), wait=sum(turns) / len(turns) + noticed if turns else 0.0))
    assert first is not None
    cycles, tflops = _extrapolated(request, recording, costs, machines)
    return Prediction(
        name=recording.name,
        request=request,
        cycles=cycles,
        tflops=tflops,
        costs=tuple(costs),
        report=first,
        steady=per_step * recording.resident / recording.cluster / costs[0].step / peak_flop(machines[0]),
        recording=recording,
        machines=tuple(machines),
    )


def _extrapolated(
    request: Request, recording: Recording, costs: Sequence[TileCost], machines: Sequence[Machine]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Cycles and TFLOPS on every machine."""
    problem = tile_problem(request, recording)
    schedule = Schedule.of(problem, recording.order, get_arch(request.arch))
    each, flop = recording.resident / recording.cluster, recording.pack * attention_flop(problem)
    cycles = tuple(problem_cycles(c, schedule, m, each, request.deterministic) for c, m in zip(costs, machines, strict=True))
    return cycles, tuple(flop / c * m.clock.value / 1e12 for c, m in zip(cycles, machines, strict=True))


def peak_flop(machine: Machine) -> float:
    """FLOP per clock and SM of the tensor cores."""
    best = next((p for p in (machine.tcgen05, machine.wgmma, machine.mma) if p is not None), None)
    if best is None:
        raise ModelError("machine", machine.arch, "has no tensor core", "use a preset")
    return best.value


def _alone(trace: Trace, order: WarpOrder, machine: Machine, cluster: int, how: tuple[int, int]) -> Report:
    resident, seed = how
    return replay(trace, order, machine, seed, clusters=[cluster] * resident, resident=resident)
