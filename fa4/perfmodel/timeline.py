"""A replay as a timeline for ui.perfetto.dev (Trace Event Format): a track for each warp and engine, a clock being a microsecond there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fa4.perfmodel.report import Report
from fa4.perfmodel.schedule import Schedule
from fa4.vgpu.trace_format import TraceSpan, trace_events


def timeline(report: Report, schedule: Schedule) -> dict[str, Any]:
    """The events of a report made with ``timeline=True``; between its waits a warp is shown as running."""
    spans: list[TraceSpan] = []
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
                spans.append(TraceSpan(span.sm, span.track, "run", start, span.start))
            running[span.sm, span.track] = span.end
        spans.append(TraceSpan(span.sm, span.track, name, span.start, max(span.start, span.end), args))
    spans += [TraceSpan(0, "tensor core", f"{flop / 1e6:.3g} MFLOP", start, end) for start, end, flop in report.products]
    return {**trace_events(spans, {sm: f"SM {sm}" for sm in range(report.sms)}), "otherData": {"unit": "1 us is one clock"}}


def write_timeline(path: str | Path, report: Report, schedule: Schedule) -> None:
    """Write the file that ui.perfetto.dev opens."""
    Path(path).write_text(json.dumps(timeline(report, schedule)))
