"""Write resources.json anew for this toolchain: ``python tests/kernels/ampere/record_resources.py [default]``, then review the diff."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from conftest import compile_ptx  # noqa: E402
from test_forward_code import DEFAULT, FULL, GOLDEN, TOOLCHAIN  # noqa: E402


def dump(recorded):
    """One kernel a line."""
    parts = []
    for toolchain, kernels in recorded.items():
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(values)}" for name, values in sorted(kernels.items()))
        parts.append(f"  {json.dumps(toolchain)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main():
    recorded = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    kernels = recorded.setdefault(TOOLCHAIN, {})
    for task, arch in DEFAULT if "default" in sys.argv[1:] else DEFAULT + FULL:
        compiled = compile_ptx(task, arch)
        kernels[f"{compiled.name} {arch}"] = compiled.resources
        GOLDEN.write_text(dump(recorded))


if __name__ == "__main__":
    main()
