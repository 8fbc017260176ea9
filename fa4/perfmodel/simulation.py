"""Replay of a trace on a model of an SM, event by event: who issues when, what is busy, who waits for whom.

Warp w of a CTA issues in sub-partition w mod 4, in order, one instruction a clock and sub-partition, to pipes that hold it for a while. Of
several that could issue it is the one that has waited longest. mbarriers and the other barriers are simulated again in simulated time;
asynchronous engines compete for the one port of shared memory. A cluster runs on as many SMs as it has CTAs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any

from fa4.errors import ModelError
from fa4.perfmodel.actions import NEVER, Actions
from fa4.perfmodel.bind import bind
from fa4.perfmodel.machine import Machine
from fa4.perfmodel.report import Report, Span, summarise
from fa4.perfmodel.schedule import PIPES, Schedule
from fa4.perfmodel.trace import CtaTrace, Trace
from fa4.perfmodel.units import Gathering, Mbarrier, Port, Product, Semaphore, TensorCore

SUB_PARTITIONS = 4


class Sm:
    """One SM: the state of its sub-partitions, ports and engines."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.issue = [0.0] * SUB_PARTITIONS
        self.pipes = [[0.0] * len(PIPES) for _ in range(SUB_PARTITIONS)]
        self.busy = [[0.0] * len(PIPES) for _ in range(SUB_PARTITIONS)]
        self.issued = [0] * SUB_PARTITIONS
        self.port = Port()
        self.loads, self.stores, self.remote, self.copies = Port(), Port(), Port(), Port()
        self.local = 0.0


class Cta:
    """A CTA on an SM."""

    def __init__(self, sm: Sm, trace: CtaTrace) -> None:
        self.sm, self.trace = sm, trace
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, Gathering] = {}
        self.peers: list[Cta] = [self]
        self.gathering = Gathering()
        self.live = len(trace.warps)
        self.tail = 0.0


class Warp:
    """A warp: where it is in its steps, when its scoreboards are done, and what it has on its way."""

    __slots__ = (
        "async_groups",
        "bulk_groups",
        "bulk_open",
        "cluster_phase",
        "code",
        "copy_groups",
        "copy_open",
        "cta",
        "events",
        "index",
        "next_event",
        "part",
        "pc",
        "scoreboard",
        "stored",
    )

    def __init__(self, cta: Cta, index: int, slots: int) -> None:
        self.cta, self.index, self.part = cta, index, index % SUB_PARTITIONS
        self.code: Sequence[Any] = ()
        self.events: Sequence[Any] = ()
        self.pc = self.next_event = 0
        self.scoreboard = [0.0] * slots
        self.bulk_open: list[float] = [0.0, 0.0]
        self.bulk_groups: list[tuple[float, float]] = []
        self.copy_open = 0.0
        self.copy_groups: list[float] = []
        self.async_groups: list[Any] = []
        self.stored = 0.0
        self.cluster_phase = 0


@dataclass
class _Log:
    """What is written down for the report."""

    timeline: bool
    spans: list[Span] = field(default_factory=list)
    products: list[tuple[float, float, float]] = field(default_factory=list)
    stalls: dict[tuple[int, str], float] = field(default_factory=dict)
    ends: list[tuple[int, float]] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)


class Simulation:
    """One run. ``replay`` is the way to use it."""

    def __init__(self, trace: Trace, schedule: Schedule, machine: Machine, seed: int, timeline: bool) -> None:
        self.trace, self.schedule, self.machine = trace, schedule, machine
        self.random = Random(seed)
        self.heap: list[tuple[float, int, Any]] = []
        self.count = 0
        self.log = _Log(timeline)
        self.jitter = machine.jitter.value
        self.actions = Actions(self)
        self.bound = bind(schedule, machine, self.actions)
        self.sms: list[Sm] = []
        self.now = 0.0
        self.waiting: list[tuple[CtaTrace, ...]] = []
        self.launch = machine.launch.value
        self.cores: dict[tuple[int, int], TensorCore] = {}
        self.semaphores: dict[int, Semaphore] = {}
        kinds = (e for cta in trace.ctas for w in cta.warps for e in w.events if e.kind == "mma")
        self.uses_pairs = any(e.data[0] == 2 for e in kinds)
        self.pair_width = 2 if self.uses_pairs else 1
        self.flop = 0.0

    # Time

    def at(self, time: float, action: Callable[[float], None]) -> None:
        """Do something at a time."""
        self.count += 1
        heappush(self.heap, (time, self.count, action))

    def shaken(self, clocks: float) -> float:
        """A latency with jitter."""
        return clocks * (1.0 + self.jitter * (2.0 * self.random.random() - 1.0))

    def resume(self, warp: Warp, time: float) -> None:
        """Let a warp that waited go on."""
        self.count += 1
        heappush(self.heap, (time, self.count, warp))

    def core(self, sm: Sm, part: int = 0) -> TensorCore:
        """The tensor core of an SM (of the first of a pair), or of one of its sub-partitions."""
        key = sm.index, part
        if key not in self.cores:
            self.cores[key] = TensorCore(self.at, self._product)
        return self.cores[key]

    def _product(self, start: float, end: float, product: Product) -> None:
        self.log.products.append((start, end, product.flop))

    # CTAs

    def begin(self, clusters: Sequence[tuple[CtaTrace, ...]], resident: int, side_by_side: int) -> None:
        """Put the first clusters on the SMs; the others follow as those end."""
        width = self.trace.cluster_ctas
        self.sms = [Sm(i) for i in range(width * side_by_side)]
        self.waiting = list(clusters)
        if {cluster[0].cluster for cluster in clusters} == set(self.trace.clusters()):  # else whom they wait for may be missing
            events = (e for cluster in clusters for cta in cluster for warp in cta.warps for e in warp.events)
            self.semaphores = {e.data[0]: Semaphore() for e in events if e.kind == "signal"}
        for i in range(min(resident * side_by_side, len(clusters))):
            first = i % side_by_side * width
            self.start_cluster(0.0, self.sms[first : first + width])

    def start_cluster(self, time: float, sms: Sequence[Sm]) -> None:
        """The next cluster takes the place of one that ended."""
        if not self.waiting:
            return
        traces = self.waiting.pop(0)
        ctas = [Cta(sm, trace) for sm, trace in zip(sms, traces, strict=True)]
        shared = Gathering()
        for cta in ctas:
            cta.peers, cta.gathering = ctas, shared
            for index in range(len(cta.trace.warps)):
                warp = Warp(cta, index, self.schedule.slots)
                found = self.schedule.warps[cta.trace.index, index]
                warp.code = [self.bound[s] for s in found.steps]
                warp.events = found.events
                self.flop += self.schedule.flop(cta.trace.index, index)
                self.resume(warp, time + self.launch)

    def end_warp(self, warp: Warp, time: float) -> None:
        """A warp has no more to do."""
        cta = warp.cta
        cta.live -= 1
        self.actions.left(cta, time)
        cta.tail = max(cta.tail, time, warp.stored, warp.bulk_open[1], *(group[1] for group in warp.bulk_groups))
        if cta.live == 0 and all(peer.live == 0 for peer in cta.peers):
            self.log.ends.append((cta.trace.cluster, max(peer.tail for peer in cta.peers)))
            sms = [peer.sm for peer in cta.peers]
            self.at(time, lambda now: self.start_cluster(now, sms))

    # The loop

    def run(self) -> None:
        """Until nothing happens any more.

        Raises:
            ModelError: warps wait for what never comes.
        """
        heap = self.heap
        while heap:
            time, _, item = heappop(heap)
            if item.__class__ is Warp:
                self._issue(item, time)
            else:
                self.now = time
                item(time)
        stuck = [(w.cta.trace.index, w.index, *rest[2:]) for w, rest in self.actions.parked.items()]
        if stuck:
            rule = "warps wait for what never happens in simulated time: the trace is of another kernel, or incomplete"
            raise ModelError("trace", stuck[:16], rule, "record whole clusters, and pass the trace with its own code")

    def _issue(self, warp: Warp, time: float) -> None:
        """Issue instructions of a warp as long as it is the next that can."""
        heap, code, sm, part = self.heap, warp.code, warp.cta.sm, warp.part
        pipes, busy, scoreboard, issue = sm.pipes[part], sm.busy[part], warp.scoreboard, sm.issue
        stalls, last = self.log.stalls, len(code)
        pc = warp.pc
        issued = 0
        while True:
            if pc == last:
                warp.pc = pc
                sm.issued[part] += issued
                self.end_warp(warp, time)
                return
            step = code[pc]
            pipe, hold, stall, waits, sets, frees, latency, act, number = step
            ready = time
            for slot in waits:
                done = scoreboard[slot]
                if done > ready:
                    ready = done
            if pipe:
                if ready > time:
                    key = number, "result"
                    stalls[key] = stalls.get(key, 0.0) + ready - time
                free = pipes[pipe]
                if issue[part] > free:
                    free = issue[part]
                if free > ready:
                    key = number, "pipe"
                    stalls[key] = stalls.get(key, 0.0) + free - ready
                    ready = free
            if ready > time:
                time = ready
                if heap and heap[0][0] <= time:
                    break
            elif heap and heap[0][0] < time:
                break
            if pipe:
                issue[part] = time + 1.0
                pipes[pipe] = time + hold
                busy[pipe] += hold
                issued += 1
            pc += 1
            done = time + latency
            if act is not None:
                warp.pc = pc
                self.now = time
                done = act(warp, time, step, done)
                if done == NEVER:
                    sm.issued[part] += issued
                    return
                if done < 0.0:  # the warp itself goes on only then
                    time = -done
                    done = time
                    stall = 0.0
            for slot in sets:
                scoreboard[slot] = done
            for slot in frees:
                if scoreboard[slot] < time + 8.0:
                    scoreboard[slot] = time + 8.0
            time += stall
        warp.pc = pc
        sm.issued[part] += issued
        self.count += 1
        heappush(heap, (time, self.count, warp))


def replay(
    trace: Trace,
    schedule: Schedule,
    machine: Machine,
    seed: int = 0,
    *,
    clusters: Sequence[int] | None = None,
    resident: int = 1,
    side_by_side: int = 1,
    timeline: bool = False,
) -> Report:
    """Run recorded clusters one after the other, ``resident`` at a time, on the SMs of as many clusters as are ``side_by_side``.

    ``clusters``: their numbers, in order; a number may come again; None: all that were recorded. Where it is all, they wait for each
    other's semaphores in global memory, which begin at 0; else a look at one costs a round trip. With ``timeline`` the report has what
    happened when.

    Raises:
        ModelError: the machine lacks a unit that the kernel uses, or the schedule is not that of the trace.
    """
    recorded = trace.clusters()
    wanted = list(recorded) if clusters is None else list(clusters)
    if not wanted or not set(wanted) <= set(recorded):
        raise ModelError("clusters", wanted[:4], f"must be among the {len(recorded)} that were recorded", "record more of them")
    chosen = [recorded[number] for number in wanted]
    missing = [(c.index, w) for cluster in chosen for c in cluster for w in range(len(c.warps)) if (c.index, w) not in schedule.warps]
    if missing:
        raise ModelError("schedule", missing[:4], "has no order for these (CTA, warp) of the trace", "make it from the same trace")
    simulation = Simulation(trace, schedule, machine, seed, timeline)
    simulation.begin(chosen, resident, side_by_side)
    simulation.run()
    return summarise(simulation)
