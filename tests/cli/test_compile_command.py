from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import fa4
from fa4.cli import main
from fa4.cli.compile import describe
from fa4.compiler.pool import Event, Item
from fa4.errors import UnsupportedError

ROOT = Path(fa4.__file__).parents[1]


@pytest.fixture(autouse=True)
def folder(tmp_path):
    with fa4.settings(cache=True, cache_dir=str(tmp_path / "cache")):
        yield tmp_path / "cache"


@pytest.fixture
def asked(monkeypatch):
    """Replaces the pool: a list of the items that reached it. Head dim 32 fails."""
    items: list[Item] = []

    def compile_all(given, jobs):
        items.extend(given)
        for done, item in enumerate(given, start=1):
            yield Event(item, 1.5, "planted" if item.problem.head_dim == 32 else None, done, len(given))

    monkeypatch.setattr("fa4.compiler.pool.compile_all", compile_all)
    return items


def test_compile_covers_the_product_of_its_arguments(asked, capsys):
    assert main(["compile", "--arch", "sm_80,sm_86", "--head-dim", "64,128", "--dtype", "float16,bfloat16", "--jobs", "2"]) == 0
    assert len(asked) == 2 * 2 * 2 * 2
    assert {item.problem.causal for item in asked} == {True, False}
    assert {item.arch for item in asked} == {"sm_80", "sm_86"}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[1/16] forward float16 head dim 64 sm_80: 1.5 s")
    assert lines[-1].startswith("16 kernels compiled in ")


@pytest.mark.parametrize(("option", "causal"), [("--causal", True), ("--no-causal", False)])
def test_causal_or_not(asked, option, causal):
    assert main(["compile", "--arch", "sm_80", "--head-dim", "64", option]) == 0
    assert [item.problem.causal for item in asked] == [causal]


def test_head_dims_of_v(asked):
    assert main(["compile", "--arch", "sm_80", "--head-dim", "192", "--head-dim-v", "128", "--causal"]) == 0
    assert describe(asked[0]) == "forward bfloat16 head dim 192,128 causal sm_80"


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_backward_is_all_of_its_kernels_each_once(asked, capsys, deterministic):
    flags = ["--deterministic"] if deterministic else []
    assert main(["compile", "--arch", "sm_100a", "--head-dim", "64", "--direction", "backward", *flags]) == 0
    assert [item.problem.direction for item in asked] == ["backward", "preprocess", "postprocess", "preprocess", "backward"]
    assert {item.config.dlse for item in asked if item.problem.direction == "preprocess"} == {False, True}
    assert [item.problem.deterministic for item in asked if item.problem.direction == "backward"] == [deterministic] * 2
    assert f"backward bfloat16 head dim 64{' deterministic' if deterministic else ''} sm_100a" in capsys.readouterr().out


def test_failures_are_listed_and_stop_nothing(asked, capsys):
    assert main(["compile", "--arch", "sm_80", "--head-dim", "32,64,300", "--causal", "--direction", "forward,backward"]) == 1
    captured = capsys.readouterr()
    assert "1 kernels compiled" in captured.out
    assert "forward bfloat16 head dim 32 causal sm_80: planted" in captured.err
    assert "head_dim 300 must be a multiple of 8 from 8 to 256" in captured.err
    assert "no backward kernel for sm_80 yet" in captured.err


def test_a_request_that_no_configuration_fits_is_listed(asked, capsys, monkeypatch):
    def refuse(problem, arch):
        raise UnsupportedError("head_dim", problem.head_dim, "does not fit", "use less")

    monkeypatch.setattr("fa4.tuning.config", refuse)
    assert main(["compile", "--arch", "sm_80", "--head-dim", "64", "--causal"]) == 1
    assert "does not fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_1", "--head-dim", "64"], "sm_1"),
        (["--arch", "sm_80", "--head-dim", "x"], "--head-dim"),
        (["--arch", "sm_80"], "--head-dim"),
        (["--arch", "sm_80", "--head-dim", "64", "--jobs", "0"], "--jobs"),
    ],
    ids=str,
)
def test_bad_arguments_say_so(asked, arguments, message, capsys):
    try:
        status = main(["compile", *arguments])
    except SystemExit as error:
        status = error.code
    assert status in (1, 2)
    assert message in capsys.readouterr().err
    assert asked == []


def test_without_a_cache_there_is_nothing_to_fill(asked, capsys):
    with fa4.settings(cache=False):
        assert main(["compile", "--arch", "sm_80", "--head-dim", "64"]) == 2
    assert "turned off" in capsys.readouterr().err


@pytest.mark.parametrize("extra", ["", "sys.modules['rich.progress'] = None\n"], ids=["rich", "without rich"])
def test_a_terminal_gets_a_progress_bar_where_rich_is_installed(folder, extra):
    code = (
        "import sys\n" + extra + "import fa4.compiler.pool as pool\n"
        "pool.compile_all = lambda items, jobs: (pool.Event(i, 1.5, None, n, len(items)) for n, i in enumerate(items, 1))\n"
        "from fa4.cli import main\n"
        "sys.exit(main(['compile', '--arch', 'sm_80', '--head-dim', '64']))\n"
    )
    leader, follower = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FA4_CACHE_DIR": str(folder), "TERM": "xterm", "COLUMNS": "100"}
    result = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=follower, env=environment, check=True, text=True)
    os.close(follower)
    shown = os.read(leader, 65536).decode() if not extra else ""
    os.close(leader)
    assert ("━" in shown and "100%" in shown) == (not extra)
    assert ("[2/2]" in result.stdout) == bool(extra)


@pytest.mark.compile
def test_compile_then_list_verify_and_clear(folder, capsys, monkeypatch):
    """The real thing, once: a small kernel through the pool into the cache and out again."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert main(["cache", "path"]) == 0
    assert capsys.readouterr().out.strip() == str(folder)
    assert main(["compile", "--arch", "sm_80", "--head-dim", "16", "--no-causal", "--jobs", "1"]) == 0
    capsys.readouterr()
    assert main(["cache", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["key", "kernel", "arch", "dsl", "KiB", "last", "used"]
    assert "fa4_ampere_forward_bf16_d16" in lines[2]
    assert lines[-1].startswith("1 kernels, ")
    assert main(["cache", "list", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["arch"] == "sm_80"
    assert main(["cache", "verify"]) == 0
    assert capsys.readouterr().out == "1 kernels, 0 damaged\n"
    (folder / "entries" / entry["key"] / "kernel.ptx").write_text("changed")
    assert main(["cache", "verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {entry["key"]: "kernel.ptx was changed"}
    (folder / "entries" / entry["key"] / "metadata.json").write_text("changed")
    assert main(["cache", "list"]) == 0
    assert "(damaged)" in capsys.readouterr().out
    assert main(["cache", "clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": 1}


def test_cache_commands_on_no_cache(folder, capsys):
    for action in ("path", "list", "verify", "clear"):
        assert main(["cache", action]) == 0
    assert "removed 0 kernels" in capsys.readouterr().out
    with fa4.settings(cache=False):
        assert main(["cache", "list"]) == 2
    assert "turned off" in capsys.readouterr().err


def test_a_folder_of_others_is_not_cleared(folder, capsys):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert main(["cache", "clear"]) == 2
    assert "others may write to it" in capsys.readouterr().err
