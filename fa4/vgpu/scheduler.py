"""Which warp or engine goes next. All choices come from the seed, so that every run can be repeated."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple, get_args

from fa4.vgpu.engine import RUNNING, Engine
from fa4.vgpu.errors import LaunchError
from fa4.vgpu.state import Cta, Warp

Schedule = Literal["round_robin", "random", "priority"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)

_FAIR = 16
"""Every so many picks of a CTA take the next warp in turn, however far behind others are: none is starved by one that spins."""

_ENGINE_TURN = 256
"""Every so many picks of a cluster an engine takes its turn, however many warps can run: one may spin on what the engine does."""

_PATIENCE = 20_000
"""Steps in a row after which strict priorities are drawn again: a warp may spin on what does not count as a look, such as shared memory."""

_SPINS = 16
"""Looks in vain at an mbarrier, or any at global memory, after which a warp falls behind those that do not wait."""

_IMPATIENCE = 1 / 8
"""How often, in the random schedules, a try_wait that must wait ends in vain, as a time limit may make it on hardware; or a request to
cancel a launch, for the sake of another kernel."""


class Pick(NamedTuple):
    """Warps [first, last) of a CTA, all about to execute ``block``."""

    cta: Cta
    first: int
    last: int
    block: int


class ClusterSchedule:
    """The order inside one cluster. It draws from a generator of its own, so that it is the same whatever other clusters do.

    Of several clusters, ``Scheduler`` says which goes next. To look at what would go next changes nothing.
    """

    def __init__(self, schedule: str, seed: int, cluster: int, ctas: Sequence[Cta]) -> None:
        self.schedule, self.random, self.ctas = schedule, random.Random(f"{seed}/{cluster}"), ctas
        self.busy: dict[Engine, None] = {}  # those that have something to do, the one that waits longest first
        self.turn = 0
        self.priorities: dict[Hashable, float] = {}
        self.order: list[tuple[float, Cta, Warp]] = []  # of their warps, the highest priority first
        self.current: Hashable = None
        self.streak = 0

    def in_turn(self) -> Pick | Engine | None:
        """CTA after CTA, the warps that are furthest behind; None where nothing can run."""
        turn = self.turn + 1
        if turn % _ENGINE_TURN == 0 and self.busy:
            self.turn = turn
            return next(iter(self.busy))
        ctas = self.ctas
        for i in range(len(ctas)):
            cta = ctas[(turn + i) % len(ctas)]
            running = [warp for warp in cta.warps if warp.state == RUNNING]
            if running:
                self.turn = turn
                cta.picks += 1
                fair, rest = divmod(cta.picks, _FAIR)
                warp = min(running, key=_block) if rest else running[fair % len(running)]
                return _together(cta, warp, len(cta.warps))
        if not self.busy:
            return None
        self.turn = turn
        return next(iter(self.busy))

    def runnable(self) -> list[tuple[Cta, Warp] | Engine]:
        """Whatever can go next."""
        warps: list[tuple[Cta, Warp] | Engine] = [(cta, warp) for cta in self.ctas for warp in cta.warps if warp.state == RUNNING]
        return [*warps, *self.busy]

    def any(self, runnable: Sequence[tuple[Cta, Warp] | Engine]) -> Pick | Engine:
        """One of those, a warp alone or with some of its neighbours."""
        chosen = self.random.choice(runnable)
        if isinstance(chosen, Engine):
            return chosen
        cta, warp = chosen
        reach = self.random.randrange(len(cta.warps) + 1)
        return _together(cta, warp, reach if self.random.random() < 0.5 else 0)

    def highest(self) -> tuple[float, tuple[Cta, Warp] | Engine | None]:
        """The warp or engine of highest priority, with its priority."""
        if not self.order:
            warps = [(self._drawn((cta.index, warp.index)), cta, warp) for cta in self.ctas for warp in cta.warps]
            self.order = sorted(warps, key=lambda entry: -entry[0])
        chosen: tuple[Cta, Warp] | Engine | None = None
        highest = -math.inf
        for priority, cta, warp in self.order:
            if warp.state == RUNNING:
                highest, chosen = priority, (cta, warp)
                break
        for engine in self.busy:
            priority = self._drawn((engine.cta.index, engine.name))
            if priority > highest:
                highest, chosen = priority, engine
        return highest, chosen

    def take(self, chosen: tuple[Cta, Warp] | Engine) -> Pick | Engine:
        """What ``highest`` found goes next."""
        key = (chosen.cta.index, chosen.name) if isinstance(chosen, Engine) else (chosen[0].index, chosen[1].index)
        self.streak = self.streak + 1 if key == self.current else 0
        self.current = key
        if not isinstance(chosen, Engine) and chosen[1].spins > _SPINS:
            chosen[1].spins = 0
            # Below 0, where no other draws, and deeper each time: so those that wait for each other take turns. If it drew among the others
            # until it was below them all, the lowest of several that wait would sink towards 0, and hardly any draw be lower.
            self.priorities[key] = min(self.priorities[key], 0.0) - self.random.random()
            self.order = []
        if self.streak > _PATIENCE:
            self.priorities.clear()
            self.order = []
            self.streak = 0
        return chosen if isinstance(chosen, Engine) else _together(*chosen, 0)

    def _drawn(self, key: Hashable) -> float:
        """The priority of a warp or an engine."""
        found = self.priorities.get(key)
        if found is None:
            found = self.priorities[key] = self.random.random()
        return found


class Scheduler:
    """Picks warps among those that can run, and engines among those that have something to do.

    round_robin: cluster after cluster, and CTA after CTA; in each the warps that are furthest behind, together where they are at the same
    block; engines when no warp of their cluster can run: fastest. random: any warp, alone or with some of its neighbours, or any engine.
    priority: strictly the warp or engine of highest random priority, alone, until it has to wait: the order that shows missing waits best.
    """

    def __init__(self, schedule: str, seed: int) -> None:
        if schedule not in SCHEDULES:
            raise LaunchError(f"schedule={schedule!r}: must be one of {', '.join(SCHEDULES)}")
        self.schedule, self.seed, self.random = schedule, seed, random.Random(seed)
        self.turn = 0

    def pick(self, clusters: Sequence[ClusterSchedule]) -> Pick | Engine | None:
        """The next warps or engine; None where nothing can run."""
        if self.schedule == "round_robin":
            self.turn += 1
            for i in range(len(clusters)):
                pick = clusters[(self.turn + i) % len(clusters)].in_turn()
                if pick is not None:
                    return pick
            return None
        if self.schedule == "priority":
            highest, chosen, owner = -math.inf, None, None
            for cluster in clusters:
                priority, found = cluster.highest()
                if priority > highest:
                    highest, chosen, owner = priority, found, cluster
            return None if chosen is None or owner is None else owner.take(chosen)
        everything = [(cluster, cluster.runnable()) for cluster in clusters]
        count = sum(len(runnable) for _, runnable in everything)
        number = self.random.randrange(count) if count else 0
        for cluster, runnable in everything:
            if number < len(runnable):
                return cluster.any(runnable)
            number -= len(runnable)
        return None

    def gives_up(self, cluster: ClusterSchedule) -> bool:
        """Whether a ``try_wait`` returns in vain instead of waiting, as a time limit may make it, or a request for a cluster fails."""
        return self.schedule != "round_robin" and cluster.random.random() < _IMPATIENCE

    def place(self, cluster: ClusterSchedule, count: int) -> int:
        """Which of ``count`` operations an engine that may choose does first."""
        return cluster.random.randrange(count)


def _block(warp: Warp) -> int:
    return warp.block


def _together(cta: Cta, warp: Warp, reach: int) -> Pick:
    """``warp`` with up to ``reach`` neighbours on each side that are at the same block with all their lanes."""
    block = warp.block
    first, last = warp.index, warp.index + 1
    if warp.full and reach:
        warps, low, high = cta.warps, max(0, first - reach), min(len(cta.warps), last + reach)
        while first > low and (other := warps[first - 1]).block == block and other.full and other.state == RUNNING:
            first -= 1
        while last < high and (other := warps[last]).block == block and other.full and other.state == RUNNING:
            last += 1
    return Pick(cta, first, last, block)
