"""``fa4 schedule``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fa4.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")


def shown():
    """(command, output) of every example of the page."""
    return re.findall(r"```text\n\$ fa4 (schedule[^\n]*)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("command", "output"), shown(), ids=lambda text: text.splitlines()[0][:40])
def test_page_shows_what_the_command_prints(command, output, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    assert capsys.readouterr().out == output
    assert (tmp_path / "fa4-schedule.svg").read_text().startswith("<svg")


def test_page_has_examples():
    assert next(command for command, _ in shown()) == "schedule --arch sm_100a --seqlen 8192 --heads 16 --batch 4 --causal"
    assert len(shown()) == 3


def test_packed_batch_and_options(tmp_path, capsys):
    svg = tmp_path / "a.svg"
    options = "--lengths 300,9,4000 --heads 4 --heads-kv 2 --window 128,0 --tile 64,64 --arch sm_80"
    assert main(["schedule", *options.split(), "--svg", str(svg)]) == 0
    out = capsys.readouterr().out
    assert "forward, 3 sequences of 300x300,9x9,4000x4000, 4/2 heads of 128, window 128,0; sm_80, 108 SMs" in out
    assert "lpt (default)" in out
    assert svg.exists()


def test_pairs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["schedule", "--backward", "--deterministic", "--pairs", "--seqlen", "2048", "--heads", "8", "--batch", "2"]) == 0
    out = capsys.readouterr().out
    assert "74 pairs of SMs" in out
    assert "128 tiles of 128 x 256" in out
    assert "of the fast mode's" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--deterministic", "add --backward"),
        ("--pairs", "add --backward"),
        ("--arch sm_100", "write 'sm_100a'"),
        ("--heads 3 --heads-kv 2", "heads=3: must be a multiple of heads_kv=2"),
        ("--batch -1", "batch=-1"),
        ("--seqlen 2147483648 --batch 4", "not simulated"),
        ("--svg missing/a.svg", "its folder does not exist"),
    ],
)
def test_refusals(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["schedule", *options.split()]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", ["--tile 128", "--tile 1,2,3", "--lengths 1,x", "--window 3"])
def test_malformed_options(options, capsys):
    with pytest.raises(SystemExit):
        main(["schedule", *options.split()])
    assert options.split()[0] in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit):
        main(["schedule", "--help"])
    assert "Gantt" in capsys.readouterr().out
