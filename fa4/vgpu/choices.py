"""From a failing run to the fewest choices of the schedule that make it fail.

A schedule is written down as what it does differently from the plainest one: run a warp until it must wait, then the first that can run,
and an engine only when no warp can, so that asynchronous operations are as late as they may be. Each difference is a ``Choice``: at its
n-th step an agent gives way to another, a wait ends in vain, or an engine does not do its oldest operation first. Delta debugging
(Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002) then leaves out all that the failure does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fa4.vgpu.capture import Capture
from fa4.vgpu.engine import RUNNING, Engine
from fa4.vgpu.errors import LaunchError, VgpuError
from fa4.vgpu.program import Program
from fa4.vgpu.report import StepLimit
from fa4.vgpu.scheduler import ClusterSchedule, Pick, Scheduler
from fa4.vgpu.state import Cta, Warp

Agent = tuple[int, Hashable]
"""A warp or an engine: the number of its CTA in the grid, and the warp's number or the engine's name in a tuple."""


_PATIENCE = 1000
"""Steps in a row after which a warp counts as one that looks in vain at what others do."""


class Choice(NamedTuple):
    """What happens when ``agent`` has done ``step`` steps: "switch" to another, "give up" a wait, or "place" of an operation."""

    agent: Agent | None
    step: int
    what: str
    to: Any

    def __str__(self) -> str:
        who = "at the start" if self.agent is None else f"after step {self.step} of {_name(self.agent)}"
        if self.what == "switch":
            return f"{who}: {_name(self.to)} goes on"
        return (
            f"{who}: a wait or a request ends in vain" if self.what == "give up" else f"{who}: operation {self.to} in its queue comes first"
        )


def _name(agent: Agent) -> str:
    cta, who = agent
    return f"engine {who[0]} of CTA {cta}" if isinstance(who, tuple) else f"warp {who} of CTA {cta}"


class _Plain(Scheduler):
    """The plainest schedule, which keeps count of what each agent did."""

    def __init__(self, schedule: str = "priority", seed: int = 0) -> None:
        super().__init__(schedule, seed)
        self.now: Agent | None = None
        self.steps: dict[Agent | None, int] = {}
        self.alone = 0

    def plain(self, ctas: Sequence[Cta], busy: Sequence[Engine]) -> tuple[Cta, Warp] | Engine | None:
        """What the plainest schedule runs next."""
        ready = [(cta, warp) for cta in ctas for warp in cta.warps if warp.state == RUNNING]
        at = next((i for i, (cta, warp) in enumerate(ready) if (cta.index, warp.index) == self.now), None)
        if at is None:
            return ready[0] if ready else next(iter(busy), None)
        if self.alone < _PATIENCE:
            return ready[at]
        turn = (at + 1) % (len(ready) + bool(busy))
        return ready[turn] if turn < len(ready) else next(iter(busy))

    def went(self, agent: Agent) -> None:
        """An agent does a step."""
        self.alone = self.alone + 1 if agent == self.now else 0
        self.now = agent
        self.steps[agent] = self.steps.get(agent, 0) + 1

    @property
    def here(self) -> tuple[Agent | None, int]:
        """The agent that did the last step, and how many it has done."""
        return self.now, self.steps.get(self.now, 0)


def _everything(clusters: Sequence[ClusterSchedule]) -> tuple[list[Cta], list[Engine]]:
    """The CTAs of all clusters, and their engines that have something to do."""
    return [cta for cluster in clusters for cta in cluster.ctas], [engine for cluster in clusters for engine in cluster.busy]


def _agent(chosen: tuple[Cta, Warp] | Engine) -> Agent:
    if isinstance(chosen, Engine):
        return chosen.cta.index, (chosen.name,)
    return chosen[0].index, chosen[1].index


class Recorder(_Plain):
    """Another schedule, warp by warp, whose choices are written down."""

    def __init__(self, schedule: str, seed: int) -> None:
        super().__init__(schedule, seed)
        self.choices: list[Choice] = []
        self.together: list[tuple[Cta, Warp]] = []

    def pick(self, clusters: Sequence[ClusterSchedule]) -> Pick | Engine | None:
        """The next step of the schedule."""
        ctas, busy = _everything(clusters)
        if not self.together:
            chosen = super().pick(clusters)
            if not isinstance(chosen, Pick):
                if chosen is not None:
                    self._note(chosen, ctas, busy)
                return chosen
            self.together = [(chosen.cta, warp) for warp in chosen.cta.warps[chosen.first : chosen.last]]
        cta, warp = self.together.pop(0)
        self._note((cta, warp), ctas, busy)
        return Pick(cta, warp.index, warp.index + 1, warp.block)

    def _note(self, chosen: tuple[Cta, Warp] | Engine, ctas: Sequence[Cta], busy: Sequence[Engine]) -> None:
        agent = _agent(chosen)
        plain = self.plain(ctas, busy)
        if plain is None or _agent(plain) != agent:
            self.choices.append(Choice(*self.here, "switch", agent))
        self.went(agent)

    def gives_up(self, cluster: ClusterSchedule) -> bool:
        """As in the schedule."""
        vain = super().gives_up(cluster)
        if vain:
            self.choices.append(Choice(*self.here, "give up", None))
        return vain

    def place(self, cluster: ClusterSchedule, count: int) -> int:
        """As in the schedule."""
        place = super().place(cluster, count)
        if place:
            self.choices.append(Choice(*self.here, "place", place))
        return place


class Replay(_Plain):
    """The plainest schedule but for some choices; those that are not possible when their time comes are left out."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        super().__init__()
        self.places: dict[tuple[Agent | None, int], str] = {}
        self.choices = {(choice.agent, choice.step, choice.what): choice.to for choice in choices}

    def pick(self, clusters: Sequence[ClusterSchedule]) -> Pick | Engine | None:
        """The next step."""
        ctas, busy = _everything(clusters)
        to = self.choices.get((*self.here, "switch"))
        chosen = None if to is None else _find(to, ctas, busy)
        if chosen is not None:
            self.places[self.here] = self._place(ctas)
        chosen = chosen or self.plain(ctas, busy)
        if chosen is None:
            return None
        self.went(_agent(chosen))
        return chosen if isinstance(chosen, Engine) else Pick(chosen[0], chosen[1].index, chosen[1].index + 1, chosen[1].block)

    def _place(self, ctas: Sequence[Cta]) -> str:
        """Where the warp that did the last step stands."""
        index, who = self.now or (-1, -1)
        for cta in ctas:
            for warp in cta.warps if cta.index == index else ():
                if warp.index == who and warp.state == RUNNING:
                    block = cta.launch.kernel.blocks[warp.block]
                    op = block.ops[0] if block.ops else block.end
                    return "" if op is None else f" at PTX line {op.line}: {op.text}" + (f" ({op.source})" if op.source else "")
        return ""

    def gives_up(self, cluster: ClusterSchedule) -> bool:
        """As chosen."""
        return (*self.here, "give up") in self.choices

    def place(self, cluster: ClusterSchedule, count: int) -> int:
        """As chosen."""
        return int(self.choices.get((*self.here, "place"), 0)) % count


def _find(agent: Agent, ctas: Sequence[Cta], busy: Sequence[Engine]) -> tuple[Cta, Warp] | Engine | None:
    """An agent, if it can go on."""
    index, who = agent
    for cta in ctas:
        if cta.index == index and isinstance(who, int) and cta.warps[who].state == RUNNING:
            return cta, cta.warps[who]
    return next((engine for engine in busy if (engine.cta.index, (engine.name,)) == agent), None)


@dataclass(frozen=True)
class Minimal:
    """The fewest choices that still make a launch fail: none of them can be left out.

    ``places`` say where an agent stands that is interrupted, "" where it waits; ``recorded`` is how many choices the failing run made.
    """

    capture: Capture
    choices: tuple[Choice, ...]
    places: tuple[str, ...]
    error: VgpuError
    recorded: int
    runs: int

    def replay(self, **options: Any) -> None:
        """Run it again, with options of ``Gpu``.

        Raises:
            VgpuError: the failure.
        """
        self.capture.replay(Program.parse(self.capture.ptx), scheduler=Replay(self.choices), **options)

    def __str__(self) -> str:
        head = f"{type(self.error).__name__}: {self.error.message.splitlines()[0]}"
        if not self.choices:
            return f"{head}\nin the plainest schedule ({self.runs} runs)"
        needed = f"{len(self.choices)} of {self.recorded} choices are needed ({self.runs} runs):"
        return "\n".join([head, needed, *(f"  {c}{place}" for c, place in zip(self.choices, self.places, strict=True))])


def minimise(capture: Capture, schedule: str = "priority", seed: int = 0, most: int = 500, **options: Any) -> Minimal:
    """The fewest choices with which a launch fails as it does in a schedule: with an error of the same class.

    ``options`` are those of ``Gpu`` in the failing run, such as ``checks``; at most ``most`` runs are made, after which more choices than
    needed may be left.

    Raises:
        LaunchError: the launch does not fail in this schedule, or only while warps go on together.
    """
    program = Program.parse(capture.ptx)
    recorder = Recorder(schedule, seed)
    limit = StepLimit(1 << 62)
    failure = _failure(capture, program, recorder, limit, options)
    if failure is None:
        raise LaunchError(f"minimise: {capture.kernel} does not fail in schedule={schedule!r}, seed={seed}")
    steps = 30 * (limit.done + 1000)
    runs = 0

    def fails(choices: Sequence[Choice]) -> VgpuError | None:
        nonlocal runs
        runs += 1
        found = _failure(capture, program, Replay(choices), StepLimit(steps), options)
        return found if type(found) is type(failure) else None

    choices = list(recorder.choices)
    error = fails([])
    if error is not None:
        return Minimal(capture, (), (), error, len(choices), runs)
    error = fails(choices)
    if error is None:
        raise LaunchError(f"minimise: the choices of schedule={schedule!r}, seed={seed} do not show the failure again")
    kept = _reduced(choices, lambda part: runs < most and fails(part) is not None)
    last = Replay(kept)
    error = _failure(capture, program, last, StepLimit(steps), options) or error
    places = tuple(last.places.get((choice.agent, choice.step), "") for choice in kept)
    return Minimal(capture, tuple(kept), places, error, len(choices), runs)


def _failure(capture: Capture, program: Program, scheduler: Scheduler, limit: StepLimit, options: Mapping[str, Any]) -> VgpuError | None:
    try:
        capture.replay(program, limit, scheduler, **options)
    except VgpuError as error:
        return error
    return None


def _reduced(choices: list[Choice], fails: Callable[[list[Choice]], bool]) -> list[Choice]:
    """Delta debugging: a part that fails, of which no choice can be left out."""
    parts = 2
    while len(choices) > 1:
        size = -(-len(choices) // parts)
        chunks = [choices[i : i + size] for i in range(0, len(choices), size)]
        for i, chunk in enumerate(chunks):
            if len(chunks) > 2 and fails(chunk):
                choices, parts = chunk, 2
                break
            rest = [choice for j, other in enumerate(chunks) if j != i for choice in other]
            if fails(rest):
                choices, parts = rest, max(parts - 1, 2)
                break
        else:
            if parts >= len(choices):
                break
            parts = min(2 * parts, len(choices))
    return choices
