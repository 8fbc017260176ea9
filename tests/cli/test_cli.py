from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fa4
from fa4.cli import demo, main


def fa4_command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    command = Path(sys.executable).with_name("fa4")
    return subprocess.run([str(command), *arguments], capture_output=True, text=True, check=False, cwd=cwd)


def test_help_names_every_command():
    result = fa4_command("--help")
    assert result.returncode == 0
    for command in ("demo", "support", "inspect", "compile", "cache", "doctor"):
        assert command in result.stdout


def test_help_is_light(capsys, monkeypatch):
    """The parser needs neither torch nor cutlass."""
    code = "import sys, fa4.cli; fa4.cli.build_parser(); print('torch' in sys.modules, 'cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False"] * 2


def test_demo(capsys):
    assert main(["demo", "--seqlen", "96", "--long-seqlen", "512"]) == 0
    output = capsys.readouterr().out
    rows = [line for line in output.splitlines() if re.search(r"float\d+\)", line)]
    assert len(rows) == 3 * 5
    for row in rows:
        error, _ulp, bound = row.split()[-4:-1]
        assert 0 < float(error) <= float(bound)
    for part in ("bfloat16", "GFLOP/s", "peak memory", "What to try next", "fa4.attention"):
        assert part in output
    cold, cached = re.search(r"compile time ([\d.]+) s, .* from the cache (\d+) ms", output).groups()
    assert float(cold) * 1e3 > int(cached), "the cache holds what was compiled a moment before"
    for part in ("GPU kernel for sm_80", "registers per thread", "spills per thread", "one trip of its main loop is", "MUFU"):
        assert part in output


def test_demo_without_nvdisasm_says_what_to_install(compile_cache, capsys, monkeypatch):
    monkeypatch.setattr("fa4.inspection.nvdisasm.find", lambda: None)
    monkeypatch.setattr(demo, "empty_cache", contextlib.nullcontext)  # other tests compile the kernel too
    with fa4.settings(cache=True, cache_dir=compile_cache):
        demo.print_kernel()
    output = capsys.readouterr().out
    assert "registers per thread" in output
    assert "pip install 'fa4[inspect]'" in output


def test_demo_takes_a_text(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "print_kernel", lambda: None)
    text = tmp_path / "story.txt"
    text.write_text("once upon a time " * 3)
    assert main(["demo", "--text", str(text), "--seqlen", "70", "--long-seqlen", "256"]) == 0
    assert "story.txt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--text", "nowhere.txt"], "nowhere.txt"),
        (["demo", "--seqlen", "0"], "--seqlen"),
        (["demo", "--seqlen", "many"], "--seqlen"),
        (["dmo"], "invalid choice: 'dmo'"),
        ([], "COMMAND"),
    ],
    ids=str,
)
def test_bad_arguments_give_one_clear_message(arguments, message):
    result = fa4_command(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_empty_text(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    result = fa4_command("demo", "--text", str(empty))
    assert result.returncode == 2
    assert "is empty" in result.stderr


def test_support(capsys):
    from fa4.support_table import FEATURES

    assert main(["support"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["feature", "cpu", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"]
    assert len(lines) == 2 + len(FEATURES)


def test_closed_pipe_is_quiet():
    script = f"{Path(sys.executable).with_name('fa4')} support | head -1"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert result.stderr == ""


@pytest.mark.vgpu
def test_verify(capsys, monkeypatch):
    from fa4.cli import verify

    monkeypatch.setattr(verify, "_LENGTHS", [(1, 17), (65, 40)])
    monkeypatch.setattr(verify, "_MASKS", {"causal": {"causal": True}})
    assert main(["verify", "--schedule", "priority", "--seed", "2"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert [line.split()[3] for line in lines if line.startswith("D 64, causal")] == ["out", "lse"]
    assert lines[-1] == "all 2 results within their bound"
    assert main(["verify", "--schedule", "priority", "--seed", "2", "--processes", "2"]) == 0
    assert capsys.readouterr().out == text
    assert main(["verify", "--processes", "0"]) == 2
    assert "processes=0: must be a whole number, at least 1" in capsys.readouterr().err


@pytest.mark.vgpu
def test_verify_catches_a_wrong_kernel(capsys, monkeypatch):
    import fa4
    from fa4.cli import verify

    right = fa4.attention
    monkeypatch.setattr(verify, "_LENGTHS", [(65, 40)])
    monkeypatch.setattr(verify, "_MASKS", {"causal": {"causal": True}})
    monkeypatch.setattr(fa4, "attention", lambda q, k, v, **options: right(q, k, v, **options, softmax_scale=0.2))
    assert main(["verify"]) == 1
    output = capsys.readouterr().out
    assert "WRONG" in output
    assert "2 of 2 results leave their bound" in output


@pytest.mark.vgpu
@pytest.mark.compile
def test_verify_gradients_and_their_bits(capsys, monkeypatch):
    from fa4.cli import verify

    monkeypatch.setattr(verify, "_LENGTHS", [(65, 40)])
    monkeypatch.setattr(verify, "_BITS_LENGTHS", (40, 300))
    monkeypatch.setattr(verify, "_HEADS", (1, 1))
    monkeypatch.setattr(verify, "_MASKS", {"causal": {"causal": True}})
    assert main(["verify", "--arch", "sm_100a", "--direction", "backward", "--deterministic", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines if line.startswith("D 64, causal ")] == ["out", "lse", "dq", "dk", "dv"]
    assert lines[-2] == "all 5 results within their bound"
    assert lines[-1] == "D 64, causal, lengths (40, 300): 2 runs gave the same bits in out, lse, dq, dk, dv"


@pytest.mark.vgpu
def test_verify_catches_bits_that_change(capsys, monkeypatch):
    """Its fault: a result that depends on the seed."""
    import fa4
    from fa4.cli import verify

    def changing(q, k, v, **options):
        out, lse = right(q, k, v, **options)
        return out + 2.0**-6 * (fa4._settings.current().vgpu_seed == 1), lse

    right = fa4.attention
    monkeypatch.setattr(verify, "_LENGTHS", [])
    monkeypatch.setattr(verify, "_MASKS", {"causal": {"causal": True}})
    monkeypatch.setattr(verify, "_BITS_LENGTHS", (5, 9))
    monkeypatch.setattr(fa4, "attention", changing)
    assert main(["verify", "--deterministic", "2"]) == 1
    assert "out differs in" in capsys.readouterr().out
