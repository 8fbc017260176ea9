"""``fa4 inspect``."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import fa4
from fa4.cli import main
from fa4.cli.colour import highlight
from fa4.cli.inspect import parse_changes, window
from fa4.inspection import nvdisasm

BASE = ["inspect", "--arch", "sm_80", "--head-dim", "64"]  # the kernels of tests/inspection

disassembled = cache(nvdisasm.disassemble)


@pytest.fixture(autouse=True)
def _disassembled_once(monkeypatch):
    """Most tests show parts of one kernel."""
    monkeypatch.setattr(nvdisasm, "disassemble", disassembled)


@pytest.fixture
def run(capsys, compile_cache):
    def call(*arguments: str) -> str:
        with fa4.settings(cache=True, cache_dir=compile_cache):
            assert main([*BASE, *arguments]) == 0
        return capsys.readouterr().out

    return call


@pytest.fixture(scope="session")
def whole(compile_cache):
    """Everything, as JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as output, fa4.settings(cache=True, cache_dir=compile_cache):
        assert main([*BASE, "--json"]) == 0
    return json.loads(output.getvalue())


@pytest.mark.compile
@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ([], ["forward bfloat16 head dim 64 sm_80", "registers per thread", "tensor-core products", "(main)"]),
        (["--ptx"], [".target sm_80", "mma.sync.aligned"]),
        (["--sass"], ["HMMA.16816.F32.BF16", "/*0000*/"]),
        (["--annotated"], ["// fa4/kernels/ampere/forward/mma.py:", "// loop, depth 1", "HMMA"]),
        (["--resources"], ["spills per thread", "blocks per SM"]),
        (["--histogram"], ["ldmatrix", "loop, per trip"]),
        (["--source"], ["fa4/kernels/common/online_softmax.py:", "cute.gemm"]),
    ],
    ids=str,
)
def test_sections(run, whole, section, parts):
    output = run(*section)
    for part in parts:
        assert part in output
    assert "\x1b" not in output, "colour belongs on terminals"
    data = json.loads(run(*section, "--json"))
    assert data
    if section:
        assert len(json.dumps(data)) < len(json.dumps(whole))


@pytest.mark.compile
def test_json_says_what_the_text_says(run):
    resources = json.loads(run("--resources", "--json"))["resources"]
    assert f"registers per thread     {resources['registers']}" in run("--resources")
    histogram = json.loads(run("--histogram", "--json"))
    assert histogram["sass"]["counts"]["mma"] == histogram["ptx"]["counts"]["mma"]
    assert len(histogram["loops"]) == 2


@pytest.mark.compile
def test_diff(run):
    """Of a kernel that compiles fast."""
    others = ["--arch", "sm_100a", "--direction", "preprocess", "--diff", "head-dim=128"]
    output = run(*others)
    assert "left:  preprocess bfloat16 head dim 64 sm_100a" in output
    assert "right: preprocess bfloat16 head dim 128 sm_100a" in output
    assert "SASS: integer" in output
    assert json.loads(run(*others, "--json"))["differences"]
    assert "no difference" in run("--diff", "head-dim=64")


@pytest.mark.compile
def test_a_closed_pipe_is_quiet(compile_cache):
    script = f"{Path(sys.executable).with_name('fa4')} {' '.join(BASE)} --ptx | head -1"
    environment = os.environ | {"FA4_CACHE_DIR": compile_cache, "PYTHONPATH": str(Path(fa4.__file__).parents[1])}
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_90", "--head-dim", "64"], "write 'sm_90a'"),
        (["--arch", "sm_80", "--head-dim", "264"], "head_dim 264 must be a multiple of 8 from 8 to 256"),
        (["--arch", "sm_80", "--head-dim", "64", "--dtype", "float32"], "dtype float32"),
        (["--arch", "sm_80", "--head-dim", "64", "--direction", "up"], "direction='up'"),
        (["--arch", "sm_80", "--head-dim", "64", "--softcap", "-1"], "softcap"),
        (["--arch", "sm_80", "--head-dim", "64", "--diff", "cauzal=true"], "'cauzal' is not an option; options are arch, head_dim"),
        (["--arch", "sm_80", "--head-dim", "64", "--diff", "causal=maybe"], "causal: 'maybe' is not true or false"),
        (["--arch", "sm_80", "--head-dim", "64", "--diff", "head_dim=x"], "head_dim: invalid literal"),
        (["--arch", "sm_80", "--head-dim", "64", "--diff", "causal"], "'causal' has no '='"),
    ],
    ids=str,
)
def test_bad_requests_give_one_clear_line(arguments, message, capsys):
    assert main(["inspect", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [["--head-dim", "64"], ["--arch", "sm_80"], [*BASE[1:], "--ptx", "--sass"], [*BASE[1:], "--window", "3"]]
)
def test_bad_arguments_are_refused_by_the_parser(arguments, capsys):
    with pytest.raises(SystemExit) as status:
        main(["inspect", *arguments])
    assert status.value.code == 2


def test_changes():
    assert parse_changes("head-dim=128,causal=True, window=64,none,softcap=5") == {
        "head_dim": 128,
        "causal": True,
        "window": (64, None),
        "softcap": 5.0,
    }


@pytest.mark.parametrize(
    ("text", "expected"), [("128,0", (128, 0)), (",0", (None, 0)), ("-8,none", (-8, None)), ("1", None), ("1,2,3", None), ("a,0", None)]
)
def test_window(text, expected):
    if expected is None:
        with pytest.raises(argparse.ArgumentTypeError, match="128,0"):
            window(text)
    else:
        assert window(text) == expected


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_and_for_those_who_want_it(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    code = "// a line\nSTL [R1], R2 ;\nHMMA.16816.F32 R1 ;\n\tmma.sync.aligned ;\nFADD R1 ;"
    assert highlight(code, io.StringIO()) == code
    coloured = highlight(code, Terminal()).split("\n")
    assert [line.startswith("\x1b[") for line in coloured] == [True, True, True, True, False]
    monkeypatch.setenv("NO_COLOR", "1")
    assert highlight(code, Terminal()) == code


@pytest.mark.compile
@pytest.mark.parametrize("operation", ["preprocess", "postprocess", pytest.param("backward", marks=pytest.mark.slow)])
def test_kernels_of_a_backward(capsys, compile_cache, operation):
    with fa4.settings(cache=True, cache_dir=compile_cache):
        assert main(["inspect", "--arch", "sm_100a", "--head-dim", "64", "--direction", operation, "--resources"]) == 0
    assert "spills per thread" in capsys.readouterr().out
