"""Write the resources.json of a family anew for this toolchain, then review the diff.

python tests/kernels/record_resources.py {ampere,auxiliary,blackwell,blackwell-backward} [default]

``default`` compiles what the default run of the tests compiles. Without it entries of kernels that no test names any more are dropped.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

here = Path(__file__).parent
sys.path[:0] = [str(here), str(here / sys.argv[1].partition("-")[0]), str(here.parents[1] / "examples"), str(here.parent)]

from conftest import compile_ptx  # noqa: E402
from golden import write  # noqa: E402


def main():
    modules = {
        "ampere": "test_forward_code",
        "auxiliary": "test_auxiliary_code",
        "blackwell": "test_blackwell_code",
        "blackwell-backward": "test_backward_code",
    }
    tests = import_module(modules[sys.argv[1]])
    only_default = "default" in sys.argv[2:]
    facts = {}
    for task, arch, *configuration in tests.DEFAULT if only_default else dict.fromkeys(tests.DEFAULT + tests.FULL):
        compiled = compile_ptx(task, arch, *configuration)
        facts[f"{compiled.name} {arch}"] = tests.facts(compiled)
    write(tests.GOLDEN, facts, keep=only_default)


if __name__ == "__main__":
    main()
