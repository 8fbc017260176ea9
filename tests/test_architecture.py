"""Import layers, cheap import, stable public names."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fa4

ROOT = Path(__file__).parents[1]
SUBMODULES = sorted(m.name for m in pkgutil.walk_packages(fa4.__path__, "fa4.") if not m.name.endswith("__main__"))


def run_python(code: str, **env: str) -> str:
    """Output of ``code`` in a fresh interpreter that imports the same fa4."""
    path = str(Path(fa4.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, **env}, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def lint_imports(folder: Path) -> subprocess.CompletedProcess:
    command = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([str(command), "--no-cache"], cwd=folder, capture_output=True, text=True, check=False)


def test_import_layers():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_import_layers_checker_catches_a_wrong_import(tmp_path):
    """The same contracts, over a copy of the package in which a low layer imports a high one and the reference imports torch."""
    (tmp_path / ".importlinter").write_text((ROOT / ".importlinter").read_text())
    for source in Path(fa4.__file__).parent.rglob("*.py"):
        copy = tmp_path / "fa4" / source.relative_to(Path(fa4.__file__).parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(source.read_text())
    with (tmp_path / "fa4" / "problem.py").open("a") as file:
        file.write("\nimport fa4.api\n")
    with (tmp_path / "fa4" / "reference" / "__init__.py").open("a") as file:
        file.write("\nimport torch\n")
    with (tmp_path / "fa4" / "vgpu" / "__init__.py").open("a") as file:
        file.write("\nimport fa4.arch\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    assert "fa4.vgpu -> fa4.arch" in result.stdout
    assert "fa4.problem -> fa4.api" in result.stdout
    assert "fa4.reference -> torch" in result.stdout


def test_import_is_light():
    """`import fa4` loads neither torch nor cutlass nor numpy, and little else of this package."""
    loaded = run_python("import sys, fa4; print(*sorted(m.split('.')[0] for m in sys.modules))").split()
    assert {"torch", "cutlass", "numpy", "tvm_ffi"}.isdisjoint(loaded)


def test_import_time_is_reported(record_property):
    """Not asserted, since machines differ: the modules loaded above bound it. Recorded for the report."""
    start = time.perf_counter()
    seconds = float(run_python("import time; t = time.perf_counter(); import fa4; print(time.perf_counter() - t)"))
    record_property("import_fa4_ms", seconds * 1e3)
    assert 0 < seconds < time.perf_counter() - start


@pytest.mark.parametrize("name", [name for name in fa4.__all__ if name != "__version__"])
def test_public_name_is_not_a_submodule(name):
    assert f"fa4.{name}" not in SUBMODULES


def test_importing_submodules_first_changes_no_public_name():
    """Every submodule is imported before the public names are looked at; each must still be what its home module defines."""
    optional = {"fa4.testing.strategies"}  # needs hypothesis, which is here, but not part of core
    code = (
        "import importlib, fa4\n"
        f"for name in {[m for m in SUBMODULES if m not in optional]!r}: importlib.import_module(name)\n"
        "for name, home in fa4._HOME.items():\n"
        "    assert getattr(fa4, name) is getattr(importlib.import_module(home), name), name\n"
        "print('same')"
    )
    assert run_python(code) == "same"


def test_unknown_public_name_raises():
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        _ = fa4.atention
    assert {"attention", "supports"} <= set(dir(fa4))
