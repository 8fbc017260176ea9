"""A replay as a timeline for ui.perfetto.dev (Trace Event Format): a track for each warp and engine, a clock being a microsecond there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fa4.perfmodel.report import Report
from fa4.perfmodel.schedule import Schedule


def timeline(report: Report, schedule: Schedule) -> dict[str, Any]:
    """The events of a report made with ``timeline=True``; between its waits a warp is shown as running."""
    tracks: dict[tuple[int, str], int] = {}
    events: list[dict[str, Any]] = []

    def add(sm: int, track: str, name: str, span: tuple[float, float], args: dict[str, Any]) -> None:
        tid = tracks.setdefault((sm, track), len(tracks))
        events.append({"ph": "X", "pid": sm, "tid": tid, "name": name, "ts": span[0], "dur": max(span[1] - span[0], 0.0), "args": args})

    running: dict[tuple[int, str], float] = {}
    for span in sorted(report.spans, key=lambda s: s.start):
        args: dict[str, Any] = {}
        name = span.name
        if span.step >= 0:
            step = schedule.table[span.step]
            args = {"instruction": step.text, "source": step.place}
            name = f"wait at {step.place.rpartition('/')[2] or step.text}"
        if span.track.startswith("warp"):
            start = running.get((span.sm, span.track), 0.0)
            if span.start > start:
                add(span.sm, span.track, "run", (start, span.start), {})
            running[span.sm, span.track] = span.end
        add(span.sm, span.track, name, (span.start, span.end), args)
    for start, end, flop in report.products:
        add(0, "tensor core", f"{flop / 1e6:.3g} MFLOP", (start, end), {})
    names = [{"ph": "M", "pid": sm, "tid": tid, "name": "thread_name", "args": {"name": track}} for (sm, track), tid in tracks.items()]
    names += [{"ph": "M", "pid": sm, "name": "process_name", "args": {"name": f"SM {sm}"}} for sm in range(report.sms)]
    return {"traceEvents": names + events, "otherData": {"unit": "1 us is one clock"}}


def write_timeline(path: str | Path, report: Report, schedule: Schedule) -> None:
    """Write the file that ui.perfetto.dev opens."""
    Path(path).write_text(json.dumps(timeline(report, schedule)))
