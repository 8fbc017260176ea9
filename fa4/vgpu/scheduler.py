"""Which warp or engine goes next. All choices come from the seed, so that every run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from fa4.vgpu.engine import RUNNING, Engine
from fa4.vgpu.errors import LaunchError
from fa4.vgpu.state import Cta, Warp

Schedule = Literal["round_robin", "random", "priority"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)

_FAIR = 16
"""Every so many picks of a CTA take the next warp in turn, however far behind others are: none is starved by one that spins."""

_ENGINE_TURN = 256
"""Every so many picks an engine takes its turn, however many warps can run: one may spin on what the engine does."""

_PATIENCE = 20_000
"""Steps in a row after which strict priorities are drawn again: a warp that spins on global memory must not wait for ever."""

_IM_PATIENCE = 1 / 8

_SPINS = 16
"""Looks in vain at an mbarrier, or any at global memory, after which a warp gets another priority."""


class Pick(NamedTuple):
    """Warps [first, last) of a CTA, all about to execute ``block``."""

    cta: Cta
    first: int
    last: int
    block: int


class Scheduler:
    """Picks warps among those that can run, and engines among those that have something to do.

    round_robin: CTA after CTA; in each the warps that are furthest behind, together where they are at the same block; engines when no
    warp can run: fastest. random: any warp, alone or with some of its neighbours, or any engine. priority: strictly the warp or engine
    of highest random priority, alone, until it has to wait: the order that shows missing waits best.
    """

    def __init__(self, schedule: str, seed: int) -> None:
        if schedule not in SCHEDULES:
            raise LaunchError(f"schedule={schedule!r}: must be one of {', '.join(SCHEDULES)}")
        self.schedule, self.random = schedule, random.Random(seed)
        self.turn = 0
        self.priorities: dict[Hashable, float] = {}
        self.ctas: Sequence[Cta] = ()
        self.order: list[tuple[float, Cta, Warp]] = []  # of their warps, the highest priority first
        self.current: Hashable = None
        self.streak = 0

    def pick(self, ctas: Sequence[Cta], busy: Mapping[Engine, None]) -> Pick | Engine | None:
        """The next warps or engine; None where nothing can run."""
        if self.schedule == "round_robin":
            return self._round_robin(ctas, busy)
        if self.schedule == "priority":
            return self._priority(ctas, busy)
        runnable: list[tuple[Cta, Warp] | Engine] = [(cta, warp) for cta in ctas for warp in cta.warps if warp.state == RUNNING]
        runnable += busy
        if not runnable:
            return None
        chosen = self.random.choice(runnable)
        if isinstance(chosen, Engine):
            return chosen
        cta, warp = chosen
        reach = self.random.randrange(len(cta.warps) + 1)
        return _together(cta, warp, reach if self.random.random() < 0.5 else 0)

    def gives_up(self) -> bool:
        """Whether a ``try_wait`` returns in vain instead of waiting, as a time limit may make it on hardware."""
        return self.schedule != "round_robin" and self.random.random() < _IM_PATIENCE

    def place(self, count: int) -> int:
        """Which of ``count`` operations an engine that may choose does first."""
        return self.random.randrange(count)

    def _round_robin(self, ctas: Sequence[Cta], busy: Mapping[Engine, None]) -> Pick | Engine | None:
        self.turn += 1
        if self.turn % _ENGINE_TURN == 0 and busy:
            return next(iter(busy))
        for i in range(len(ctas)):
            cta = ctas[(self.turn + i) % len(ctas)]
            running = [warp for warp in cta.warps if warp.state == RUNNING]
            if running:
                cta.picks += 1
                turn, rest = divmod(cta.picks, _FAIR)
                warp = min(running, key=_block) if rest else running[turn % len(running)]
                return _together(cta, warp, len(cta.warps))
        return next(iter(busy), None)

    def _priority(self, ctas: Sequence[Cta], busy: Mapping[Engine, None]) -> Pick | Engine | None:
        if ctas is not self.ctas or not self.order:
            self.ctas = ctas
            warps = [(self._drawn((cta.index, warp.index)), cta, warp) for cta in ctas for warp in cta.warps]
            self.order = sorted(warps, key=lambda entry: -entry[0])
        chosen: tuple[Cta, Warp] | Engine | None = None
        key: Hashable = None
        highest = -1.0
        for priority, cta, warp in self.order:
            if warp.state == RUNNING:
                highest, chosen, key = priority, (cta, warp), (cta.index, warp.index)
                break
        for engine in busy:
            priority = self._drawn(name := (engine.cta.index, engine.name))
            if priority > highest:
                highest, chosen, key = priority, engine, name
        if chosen is None:
            return None
        self.streak = self.streak + 1 if key == self.current else 0
        self.current = key
        if not isinstance(chosen, Engine) and chosen[1].spins > _SPINS:
            chosen[1].spins = 0
            del self.priorities[key]
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
