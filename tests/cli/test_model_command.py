"""``fa4 model``."""

from __future__ import annotations

import json

import pytest

from fa4.cli import main


@pytest.mark.compile
@pytest.mark.vgpu
def test_prediction_and_timeline(tmp_path, capsys):
    path = tmp_path / "timeline.json"
    command = f"model --arch sm_100a --head-dim 64 --seqlen 256 --heads 1 --batch 1 --machines 2 --json --timeline {path}"
    assert main(command.split()) == 0
    data = json.loads(capsys.readouterr().out)
    assert 0 < data["tflops_low"] <= data["tflops"] <= data["tflops_high"] < 2250
    flop = 4 * 256 * 256 * 64
    assert data["tflops_low"] < flop / (data["cycles"] / 1.856e9) / 1e12 < data["tflops_high"] * 1.01
    assert (data["schedule"], data["unaligned"], data["spills"], data["machines"]) == ("sass", 0, 0, 2)
    assert any("softmax.py:" in stall["place"] for stall in data["stalls"])
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"warp 0", "warp 12", "tensor core", "TMA loads"} <= names
    waits = [e for e in events if e.get("name", "").startswith("wait at softmax.py")]
    assert waits
    assert all(e["dur"] >= 0 for e in waits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seqlen 0", "--seqlen=0: must be at least 1"),
        ("--machines 2000", "must be at most 1000"),
        ("--arch sm_70", "has no machine model"),
        ("--direction backward --arch sm_80", "backward"),
    ],
)
def test_bad_input(options, message, capsys):
    assert main(["model", *options.split()]) == 2
    assert message in capsys.readouterr().err
