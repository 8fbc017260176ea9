"""Recorded facts about kernels: JSON files {toolchain: {"kernel arch": facts}}, written by record_resources.py, reviewed by people."""

from __future__ import annotations

import json

import cutlass
import pytest

TOOLCHAIN = f"{cutlass.__version__} cuda {cutlass.CUDA_VERSION.major}.{cutlass.CUDA_VERSION.minor}"


def assert_recorded(path, compiled, arch, facts):
    """What the file says of a kernel; skipped where it knows nothing of this toolchain."""
    recorded = json.loads(path.read_text())
    if TOOLCHAIN not in recorded:
        pytest.skip(f"no resources recorded for {TOOLCHAIN}")
    assert recorded[TOOLCHAIN].get(f"{compiled.name} {arch}") == facts


def write(path, facts, keep):
    """Replace what the file says of this toolchain's kernels; ``keep`` those that ``facts`` does not name."""
    everything = json.loads(path.read_text()) if path.exists() else {}
    everything[TOOLCHAIN] = {**(everything.get(TOOLCHAIN, {}) if keep else {}), **facts}
    path.write_text(_dump(everything))


def _dump(everything):
    """One kernel a line, or where it has several kinds of facts one kind a line."""
    parts = []
    for toolchain, kernels in everything.items():
        lines = ",\n".join(f"    {json.dumps(name)}: {_facts(values)}" for name, values in sorted(kernels.items()))
        parts.append(f"  {json.dumps(toolchain)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _facts(values):
    if not isinstance(values, dict):
        return json.dumps(values)
    return "{\n" + ",\n".join(f"      {json.dumps(kind)}: {json.dumps(value)}" for kind, value in values.items()) + "\n    }"
