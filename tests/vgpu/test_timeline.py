"""The timeline of a small kernel, by hand."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from ptx_text import kernel, run

from fa4.vgpu import Gpu, Program
from fa4.vgpu.timeline import Event, Timeline, picture, text, trace_json

# Warp 0 computes exponentials and hands over; warp 1 waits for it, then stores.
BODY = """
setp.ge.u32 %p1, %r0, 32;
@%p1 bra OTHER;
ex2.approx.f32 %r1, 0f3F800000;
ex2.approx.f32 %r2, %r1;
bar.arrive 1, 64;
bra.uni END;
OTHER:
bar.sync 1, 64;
st.global.u32 [%d12], %r0;
END:
"""


def recorded(cta=0, agents=("producer", "consumer")):
    timeline = Timeline(Program.parse(kernel(BODY)).kernel("k"), agents, cta)
    gpu = Gpu()
    gpu.observer = timeline
    run(BODY, threads=64, gpu=gpu)
    return timeline


def test_who_did_what_in_which_order():
    timeline = recorded()
    assert timeline.rows == ["producer", "consumer"]
    whats = {row: [event.what for event in timeline.events if event.agent == row] for row in timeline.rows}
    assert "exponentials" in whats["producer"]
    assert "exponentials" not in whats["consumer"]
    for row in timeline.rows:
        mine = [event for event in timeline.events if event.agent == row]
        assert all(a.end <= b.start for a, b in pairwise(mine))
        assert all(event.start < event.end for event in mine)
    last = max(event.end for event in timeline.events if event.agent == "producer" and event.what == "exponentials")
    assert max(event.end for event in timeline.events if event.agent == "consumer") > last


def test_other_ctas_and_unnamed_warps_are_left_out():
    assert recorded(cta=1).events == []
    assert recorded(agents=("producer", "")).rows == ["producer"]


def test_forms():
    events = [Event("a", 0, 10, "products"), Event("b", 5, 20, "copies")]
    spans = [event for event in json.loads(trace_json(events, ["a", "b"]))["traceEvents"] if event["ph"] == "X"]
    assert [(s["tid"], s["ts"], s["dur"], s["name"]) for s in spans] == [(0, 0, 10, "products"), (1, 5, 15, "copies")]
    lines = text(events, ["a", "b"], columns=20).splitlines()
    assert lines[0].split("|")[1] == "M" * 10 + " " * 10
    assert lines[1].split("|")[1] == " " * 5 + "C" * 15
    assert picture(events, ["a", "b"]).count("<rect") == 1 + 2 + 6  # paper, events, legend


def test_a_span_is_cut_out():
    timeline = recorded()
    timeline.events = [Event("producer", 0, 10, "products"), Event("consumer", 30, 40, "products")]
    assert timeline.between(5, 20) == [Event("producer", 5, 10, "products")]
    with pytest.raises(ValueError, match="empty"):
        text(timeline.between(50, 60), timeline.rows)
