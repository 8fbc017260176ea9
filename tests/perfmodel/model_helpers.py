"""Traces and schedules by hand, so that what the model must say is known in closed form."""

from __future__ import annotations

from fa4.perfmodel.machine import preset
from fa4.perfmodel.schedule import Schedule, Step, WarpSchedule
from fa4.perfmodel.simulation import replay
from fa4.perfmodel.trace import CtaTrace, Event, Trace, WarpTrace

MACHINE = preset("sm_100a").changed(jitter=0, launch=0)


def event(kind, *data):
    return Event(kind, 0, data)


def made(*warps, cluster=1):
    """(trace, schedule) of a cluster whose CTAs execute the same; a warp is a list of steps and events, an event being its own step."""
    table, streams, scheduled = [], [], {}
    for warp in warps:
        steps, events = [], []
        for item in warp:
            if isinstance(item, Event):
                events.append(item)
            table.append(Step("other", events=1) if isinstance(item, Event) else item)
            steps.append(len(table) - 1)
        streams.append(WarpTrace((0,), tuple(events)))
        scheduled[len(streams) - 1] = WarpSchedule(tuple(steps), tuple(events))
    ctas = tuple(CtaTrace(i, 0, i, tuple(streams)) for i in range(cluster))
    trace = Trace("sm_100a", "k", "", (cluster, 1, 1), (32 * len(warps), 1, 1), (cluster, 1, 1), 0, ctas)
    return trace, Schedule("test", tuple(table), {(c, w): s for c in range(cluster) for w, s in scheduled.items()}, 8)


def run(*warps, machine=MACHINE, **options):
    return replay(*made(*warps), machine, **options)


MMA = ("mma", 1, 128, 128, 16, 2)
"""M = N = 128, K = 16, bf16; whether A is in tensor memory comes next."""
