"""The limits that keep the house liveable, for every Python file of the repository."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("fa4", "tests", "benchmarks", "docs", "examples")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 120
MAX_PARAMETERS = 8
# Exempt from the parameter limit: public API with keyword-only options, op schemas, signatures dictated by other libraries.
MANY_PARAMETERS = ("fa4/ops/", "fa4/integrations/")
# The host entry of a kernel is its binary interface: one parameter per operand.
LAUNCH = ("fa4/kernels/", "__call__")


def violations(source: str, name: str) -> list[str]:
    """What breaks a limit in one file."""
    found = []
    lines = source.count("\n") + (not source.endswith("\n"))
    if lines > MAX_FILE_LINES:
        found.append(f"{name}: {lines} lines, limit {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            found.append(f"{name}:{node.lineno}: {node.name} has {length} lines, limit {MAX_FUNCTION_LINES}")
        positional = [a.arg for a in node.args.posonlyargs + node.args.args if a.arg not in ("self", "cls")]
        public_options = (not node.name.startswith("_") or node.name == "__init__") and len(positional) <= MAX_PARAMETERS
        count = len(positional) if public_options else len(positional) + len(node.args.kwonlyargs)
        launch = name.startswith(LAUNCH[0]) and node.name == LAUNCH[1]
        if count > MAX_PARAMETERS and not name.startswith(MANY_PARAMETERS) and not launch:
            found.append(f"{name}:{node.lineno}: {node.name} has {count} parameters, limit {MAX_PARAMETERS}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_keeps_the_limits(path):
    assert violations(path.read_text(), str(path.relative_to(ROOT))) == []


def test_files_are_found():
    assert ROOT / "fa4" / "api.py" in FILES


def test_checker_catches_each_fault():
    assert violations("x = 1\n" * 601, "a.py") == ["a.py: 601 lines, limit 600"]
    assert violations("def f():\n" + "    x = 1\n" * 120, "a.py") == ["a.py:1: f has 121 lines, limit 120"]
    nine = ", ".join("abcdefghi")
    assert violations(f"def f({nine}): pass\n", "a.py") == ["a.py:1: f has 9 parameters, limit 8"]
    assert violations(f"def _f(*, {nine}): pass\n", "a.py") == ["a.py:1: _f has 9 parameters, limit 8"]
    assert violations(f"def f(*, {nine}): pass\n", "a.py") == []
    assert violations(f"class C:\n    def __init__(self, a, *, {nine[3:]}, j, k): pass\n", "a.py") == []
    assert violations(f"class C:\n    def __init__(self, {nine}): pass\n", "a.py") == ["a.py:2: __init__ has 9 parameters, limit 8"]
    assert violations(f"def f(self, {nine[:-3]}): pass\n", "fa4/ops/a.py") == []
    assert violations(f"def __call__(self, {nine}): pass\n", "fa4/kernels/a.py") == []
    assert violations(f"def __call__(self, {nine}): pass\n", "fa4/a.py") == ["fa4/a.py:1: __call__ has 9 parameters, limit 8"]
