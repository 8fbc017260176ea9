"""What a replay found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fa4.perfmodel.schedule import PIPES

if TYPE_CHECKING:
    from fa4.perfmodel.simulation import Simulation


class Span(NamedTuple):
    """Something that took from ``start`` to ``end``, in clocks, on a track of an SM; ``step`` is the number of the step, or -1."""

    sm: int
    track: str
    name: str
    start: float
    end: float
    step: int


class Stall(NamedTuple):
    """Clocks that warps waited at an instruction: for a "result", a "pipe", or at a "wait" for others. ``place`` is its source line."""

    place: str
    text: str
    reason: str
    clocks: float


@dataclass(frozen=True)
class Report:
    """One replay.

    Attributes:
        cycles: from the launch until nothing happens any more: the end of the last CTA, its stores included.
        flop: of tensor cores, all SMs together.
        sms: SMs simulated.
        busy: share of ``cycles`` for each pipe, port and engine, 0 to 1, mean over SMs and sub-partitions.
        products: (start, end, FLOP) of every product of a tensor core, by end.
        stalls: longest first, summed over warps.
        ends: (cluster, end of its last store), as they ended.
        turns: clocks from a warp's turn at a semaphore in global memory until it lets the next one go on, for each turn.
        schedule: kind of the schedule; ``unaligned`` of its warps, ``spills`` a warp.
        spans: for a timeline; empty without.
    """

    cycles: float
    flop: float
    sms: int
    busy: dict[str, float]
    products: tuple[tuple[float, float, float], ...]
    stalls: tuple[Stall, ...]
    ends: tuple[tuple[int, float], ...]
    schedule: str
    unaligned: int
    spills: int
    turns: tuple[float, ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def flop_per_cycle(self) -> float:
        """Of one SM, over all."""
        return self.flop / self.cycles / self.sms if self.cycles else 0.0

    def steady(self, begin: float = 0.3, end: float = 0.8) -> float:
        """FLOP per clock and SM while the work of the tensor cores goes from one share of all to another: the main loop."""
        total, done = self.flop, 0.0
        first: tuple[float, float] | None = None
        last: tuple[float, float] | None = None
        for _, stop, flop in self.products:
            done += flop
            if first is None and done >= begin * total:
                first = stop, done
            if last is None and done >= end * total:
                last = stop, done
        if first is None or last is None or last[0] <= first[0]:
            return 0.0
        return (last[1] - first[1]) / (last[0] - first[0]) / self.sms

    @property
    def limiter(self) -> tuple[str, float]:
        """What is busy for the greatest share of the time."""
        name = max(self.busy, key=self.busy.__getitem__)
        return name, self.busy[name]

    def by_line(self) -> list[Stall]:
        """Stalls summed over the instructions of a source line, by reason, longest first; ``text`` is the instruction with most of them."""
        found: dict[tuple[str, str], list[Stall]] = {}
        for stall in self.stalls:
            found.setdefault((stall.place or stall.text, stall.reason), []).append(stall)
        rows = [Stall(group[0].place, group[0].text, group[0].reason, sum(s.clocks for s in group)) for group in found.values()]
        return sorted(rows, key=lambda s: -s.clocks)

    def data(self) -> dict[str, Any]:
        """Everything but products, turns and spans as JSON-able data."""
        data = asdict(self)
        del data["products"], data["spans"], data["turns"]
        return {**data, "stalls": [s._asdict() for s in self.by_line()], "steady_flop_per_cycle": self.steady(), "limiter": self.limiter[0]}


def summarise(simulation: Simulation) -> Report:
    """The report of a run."""
    log, sms = simulation.log, simulation.sms
    products = tuple(sorted(log.products, key=lambda p: p[1]))
    ports = (port.free for sm in sms for port in (sm.port, sm.loads, sm.stores, sm.remote, sm.copies))
    cycles = max([simulation.now, *(end for _, end in log.ends), *ports])
    total = max(cycles, 1e-9) * len(sms)
    busy = {}
    for i, name in enumerate(PIPES):
        if name != "none":
            busy[name] = sum(sum(part[i] for part in sm.busy) for sm in sms) / (4 * total)
    busy["issue"] = sum(sum(sm.issued) for sm in sms) / (4 * total)
    busy["shared memory"] = sum(sm.port.busy for sm in sms) / total
    busy["local memory"] = sum(sm.local for sm in sms) / total
    busy["TMA loads"] = sum(sm.loads.busy for sm in sms) / total
    busy["TMA stores"] = sum(sm.stores.busy for sm in sms) / total
    shares: dict[str, float] = {}
    for (_, part), core in simulation.cores.items():
        name = "tcgen05" if part == 0 else "wgmma"
        weight = simulation.pair_width if part == 0 else 0.25
        shares[name] = shares.get(name, 0.0) + core.busy * weight / total
    busy |= shares
    table = simulation.schedule.table
    stalls = []
    for (number, reason), clocks in log.stalls.items():
        step = table[number] if number >= 0 else None
        stalls.append(Stall(step.place if step else "", step.text if step else "barrier", reason, clocks))
    stalls.sort(key=lambda s: -s.clocks)
    return Report(
        cycles=cycles,
        flop=sum(p[2] for p in products) + simulation.flop,
        sms=len(sms),
        busy={name: share for name, share in busy.items() if share > 0},
        products=products,
        stalls=tuple(stalls),
        ends=tuple(log.ends),
        schedule=simulation.schedule.kind,
        unaligned=len(simulation.schedule.unaligned),
        spills=simulation.schedule.spills,
        turns=tuple(log.turns),
        spans=tuple(log.spans),
    )
