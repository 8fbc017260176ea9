"""Timelines as files for ui.perfetto.dev and chrome://tracing (Trace Event Format)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class TraceSpan(NamedTuple):
    """Something that took from ``start`` to ``end`` on a track of a process; a unit of time is shown as a microsecond."""

    process: int
    track: str
    name: str
    start: float
    end: float
    args: Mapping[str, Any] | None = None


def trace_events(spans: Sequence[TraceSpan], processes: Mapping[int, str], tracks: Sequence[tuple[int, str]] = ()) -> dict[str, Any]:
    """The content of a file. ``processes`` have names; tracks come in the order of ``tracks``, then of the spans."""
    numbers = {key: i for i, key in enumerate(dict.fromkeys([*tracks, *((s.process, s.track) for s in spans)]))}
    names = [
        {"ph": "M", "pid": process, "tid": tid, "name": "thread_name", "args": {"name": track}} for (process, track), tid in numbers.items()
    ]
    names += [{"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}} for process, name in processes.items()]
    events = []
    for s in spans:
        event = {"ph": "X", "pid": s.process, "tid": numbers[s.process, s.track], "name": s.name, "ts": s.start, "dur": s.end - s.start}
        events.append(event if s.args is None else {**event, "args": s.args})
    return {"traceEvents": names + events}
