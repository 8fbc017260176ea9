"""Who did what while who waited: the basic blocks that warps execute, in instruction time.

Instruction time is the number of instructions that the CTA has issued, where warps that execute a block together count once. It tells
order and overlap in one schedule of the virtual GPU, not durations on a GPU: products and copies, which run beside the warps, take none.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fa4.vgpu.program import Kernel, Program
from fa4.vgpu.trace_format import TraceSpan, trace_events

if TYPE_CHECKING:
    from fa4.vgpu.machine import Launch
    from fa4.vgpu.observe import Values

# What a block is about: of these kinds, by how opcodes begin, the one it has most of; of equals the first.
KINDS = {
    "tcgen05.mma": "products",
    "cp.async.bulk": "copies",
    "ex2.": "exponentials",
    "tcgen05.ld": "reads tensor memory",
    "tcgen05.st": "writes tensor memory",
    "mbarrier.try_wait": "waits",
}
OTHER = "other"
COLOURS = {
    "products": "#0072b2",
    "copies": "#009e73",
    "exponentials": "#d55e00",
    "reads tensor memory": "#56b4e9",
    "writes tensor memory": "#e69f00",
    "waits": "#dddddd",
    OTHER: "#999999",
}
LETTERS = {"products": "M", "copies": "C", "exponentials": "E", "reads tensor memory": "r", "writes tensor memory": "w", OTHER: "."}

_WIDTH, _ROW, _LEFT = 900, 26, 90


@dataclass(frozen=True)
class Event:
    """From instruction time ``start`` up to ``end`` an agent, the warps of a role, was at ``what``."""

    agent: str
    start: int
    end: int
    what: str


class Timeline:
    """An observer of a ``Gpu`` that records what the warps of one CTA do; ``agents`` names the agent of each warp, "" to leave it out."""

    blocks_only = True

    def __init__(self, kernel: Kernel, agents: Sequence[str], cta: int = 0) -> None:
        self.agents, self.cta = agents, cta
        self.events: list[Event] = []
        self._whats = [_what(opcodes) for opcodes in _opcodes(kernel)]
        self._sizes = [len(opcodes) for opcodes in _opcodes(kernel)]
        self._now = 0
        self._last: tuple[int, int] = (-1, -1)  # warp and block of the step before
        self._open: dict[str, int] = {}  # where an agent's newest event is

    def block(self, cta: int, warp: int, block: int, lanes: int) -> None:
        """A warp begins a basic block."""
        if cta != self.cta:
            return
        if self._last != (warp - 1, block):  # else it does so together with the warp before
            self._now += self._sizes[block]
        self._last = warp, block
        agent, what = self.agents[warp], self._whats[block]
        if agent and what != "waits":
            self._add(Event(agent, self._now - self._sizes[block], self._now, what))

    def launch(self, launch: Launch, program: Program) -> None:
        """A kernel begins."""

    def event(self, cta: int, warp: int, op: int, lanes: int, values: Values) -> None:
        """Not of interest here, nor asked for."""

    def _add(self, event: Event) -> None:
        """Add an event, or make the agent's newest one longer where it was at the same and nobody else came between."""
        newest = self._open.get(event.agent)
        if newest is not None:
            before = self.events[newest]
            if before.end >= event.start and before.what == event.what:
                self.events[newest] = replace(before, end=max(before.end, event.end))
                return
        self._open[event.agent] = len(self.events)
        self.events.append(event)

    @property
    def rows(self) -> list[str]:
        """The agents that did anything, in the order of their warps."""
        present = {event.agent for event in self.events}
        return [agent for agent in dict.fromkeys(self.agents) if agent in present]

    def between(self, start: int, end: int) -> list[Event]:
        """Events that overlap a span of time, cut to it."""
        inside = (e for e in self.events if e.end > start and e.start < end)
        return [replace(e, start=max(e.start, start), end=min(e.end, end)) for e in inside]


def trace_json(events: Iterable[Event], rows: Sequence[str]) -> str:
    """For ui.perfetto.dev and chrome://tracing: a track for each agent; a microsecond stands for an instruction."""
    spans = [TraceSpan(0, e.agent, e.what, e.start, e.end) for e in events if e.agent in rows]
    return json.dumps(trace_events(spans, {}, [(0, row) for row in rows]))


def text(events: Sequence[Event], rows: Sequence[str], columns: int = 100) -> str:
    """A line for each agent; a column shows what took most of its part of the time, blank for nothing.

    Raises:
        ValueError: there are no events.
    """
    begin, end = _span(events)
    lines = []
    for row in rows:
        cells = [Counter[str]() for _ in range(columns)]
        for e in events:
            if e.agent == row:
                first, last = ((t - begin) * columns // (end - begin) for t in (e.start, e.end - 1))
                for column in range(first, last + 1):
                    cells[column][LETTERS[e.what]] += min(e.end - e.start, (end - begin) // columns + 1)
        lines.append(f"{row:<12}|{''.join(c.most_common(1)[0][0] if c else ' ' for c in cells)}|")
    legend = ", ".join(f"{letter} {what}" for what, letter in LETTERS.items())
    return "\n".join([*lines, f"{'':<13}{begin} to {end} instructions; {legend}"])


def picture(events: Sequence[Event], rows: Sequence[str]) -> str:
    """An SVG: a row for each agent, time to the right.

    Raises:
        ValueError: there are no events.
    """
    begin, end = _span(events)
    scale = _WIDTH / (end - begin)
    height = _ROW * (len(rows) + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 10} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_LEFT + _WIDTH + 10}" height="{height}" fill="white"/>',
    ]
    for i, row in enumerate(rows):
        lines.append(f'<text x="{_LEFT - 6}" y="{_ROW * i + 17}" text-anchor="end">{row}</text>')
        for e in events:
            if e.agent == row:
                x, width = _LEFT + (e.start - begin) * scale, (e.end - e.start) * scale
                lines.append(f'<rect x="{x:.1f}" y="{_ROW * i + 3}" width="{width:.1f}" height="{_ROW - 6}" fill="{COLOURS[e.what]}"/>')
    at = _LEFT
    for what in LETTERS:
        lines.append(f'<rect x="{at}" y="{height - 40}" width="12" height="12" fill="{COLOURS[what]}"/>')
        lines.append(f'<text x="{at + 16}" y="{height - 30}">{what}</text>')
        at += 40 + 7 * len(what)
    lines.append(f'<text x="{_LEFT}" y="{height - 10}">instructions {begin} to {end}, as the CTA issues them</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _span(events: Sequence[Event]) -> tuple[int, int]:
    if not events:
        raise ValueError("a timeline of no events is empty")
    return min(e.start for e in events), max(e.end for e in events)


def _opcodes(kernel: Kernel) -> list[list[str]]:
    """Those of each block."""
    return [[op.opcode for op in (*block.ops, block.end) if op is not None] for block in kernel.blocks]


def _what(opcodes: Iterable[str]) -> str:
    found = Counter(what for opcode in opcodes for begin, what in KINDS.items() if opcode.startswith(begin))
    return max(KINDS.values(), key=lambda what: found[what]) if found else OTHER
