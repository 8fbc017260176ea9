"""Time to a kernel: cold, from a filled cache, and in memory, against flash-attn-4 with its own cache enabled.

    python benchmarks/jit.py --peer-python /path/to/python

Each contender runs in fresh processes, its cache in a folder of its own; runs alternate, so that a slow spell of the machine hits both;
`import torch` comes before the clock starts. Both compile their sm_100a and sm_80 forwards, flash-attn-4 on fake CUDA tensors: no GPU is
needed on either side. Same head dim (128), dtype (bfloat16) and mask (causal).

The peer's interpreter needs flash-attn-4 (a pre-release: name the version), and triton, which quack imports, beside a CPU torch:
`pip install flash-attn-4==4.0.0b36 triton torch`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

OURS = """
import json, sys, time
import torch
start = time.perf_counter()
import fa4
from fa4 import compiler, tuning
from fa4.arch import get_arch
from fa4.compiler.load import load_function
from fa4.problem import AttentionProblem
problem = AttentionProblem("forward", "bfloat16", 128, 128, causal=True)
arch = sys.argv[1]
config = tuning.config(problem, get_arch(arch))
artifact = compiler.get(problem, config, arch)
function = load_function(artifact)
ready = time.perf_counter() - start
count = 100_000
equal = AttentionProblem("forward", "bfloat16", 128, 128, causal=True)
start = time.perf_counter()
for _ in range(count):
    compiler.get(equal, config, arch)
lookup = (time.perf_counter() - start) / count
tools = artifact.toolchain
print(json.dumps({
    "ready": ready, "lookup": lookup, "cutlass": "cutlass" in sys.modules,
    "versions": f"fa4 {tools.fa4}, nvidia-cutlass-dsl {tools.dsl} {tools.flavour}, torch {torch.__version__}",
}))
"""

PEER = """
import json, time
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
torch.cuda.current_device = lambda: 0  # there may be no driver to ask
start = time.perf_counter()
from flash_attn.cute.interface import _flash_attn_fwd
with FakeTensorMode():
    q, k, v = (torch.empty(2, 1024, 4, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    _flash_attn_fwd(q, k, v, causal=True)
ready = time.perf_counter() - start
from importlib.metadata import version
assert _flash_attn_fwd.compile_cache.cache, "nothing was compiled or loaded"
print(json.dumps({
    "ready": ready,
    "versions": f"flash-attn-4 {version('flash-attn-4')}, nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')}, torch {torch.__version__}",
}))
"""

PEER_TARGETS = {
    "flash-attn-4 sm_100a": {"FLASH_ATTENTION_ARCH": "sm_100", "FLASH_ATTENTION_NUM_SMS": "148", "CUTE_DSL_ARCH": "sm_100a"},
    "flash-attn-4 sm_80": {"FLASH_ATTENTION_ARCH": "sm_80", "FLASH_ATTENTION_NUM_SMS": "108", "CUTE_DSL_ARCH": "sm_80"},
}


def run(python: str, code: str, environment: dict[str, str], *arguments: str) -> dict[str, object]:
    """What ``code`` reports, from a fresh process outside the repository."""
    result = subprocess.run(
        [python, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=tempfile.gettempdir(),
        env={**os.environ, **environment},
        check=False,
    )
    if result.returncode:
        raise SystemExit(f"{python} failed:\n{result.stderr[-2000:]}")
    report: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return report


class Contender:
    """One side: how to run it, and what it took, in seconds."""

    def __init__(self, name: str, python: str, code: str, environment: dict[str, str]) -> None:
        self.name, self.arch = name, name.rpartition(" ")[2]
        self.times: dict[str, list[float]] = {"cold": [], "warm": []}
        self.report: dict[str, object] = {}
        self.lookups: list[float] = []
        self._command = python, code, environment

    def measure(self, folder: Path, warm_runs: int) -> None:
        """Once with an empty cache, then with the cache that this filled."""
        python, code, environment = self._command
        caches = {"FA4_CACHE_DIR": str(folder), "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder)}
        for kind in ["cold"] + ["warm"] * warm_runs:
            self.report = run(python, code, {**environment, **caches, "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}, self.arch)
            self.times[kind].append(float(str(self.report["ready"])))
            self.lookups.append(float(str(self.report.get("lookup", 0))))

    def median(self, kind: str) -> float:
        """Seconds of "cold" or "warm" runs."""
        return statistics.median(self.times[kind])


def cpu_name() -> str:
    """The processor as Linux names it."""
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("archs", nargs="*", metavar="arch", help="sm_100a, sm_80 (default: both)")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has flash-attn-4 (default: this one)")
    parser.add_argument("--repeats", type=int, default=5, help="cold runs of each contender (default: %(default)s)")
    parser.add_argument("--warm", type=int, default=2, help="runs from the cache after each cold one (default: %(default)s)")
    arguments = parser.parse_args()

    ours, peers = [], []
    for name, target in PEER_TARGETS.items():
        arch = name.rpartition(" ")[2]
        if not arguments.archs or arch in arguments.archs:
            ours.append(Contender(f"fa4 {arch}", sys.executable, OURS, {"PYTHONPATH": str(ROOT)}))
            peers.append(Contender(name, arguments.peer_python, PEER, {"PYTHONPATH": "", **target}))
    for _ in range(arguments.repeats):
        for contender in (*ours, *peers):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder).chmod(0o700)
                contender.measure(Path(folder), arguments.warm)
    if any(contender.report["cutlass"] for contender in ours):
        raise SystemExit("fa4 imported cutlass although its kernel was in the cache")

    load = os.getloadavg()
    print(f"{cpu_name()}, {os.cpu_count()} cores, load {load[0]:.1f}, Python {platform.python_version()}")
    print(ours[0].report["versions"])
    print(peers[0].report["versions"])
    print(f"causal forward, head dim 128, bfloat16; seconds after `import torch`, medians of {arguments.repeats} cold and")
    print(f"{arguments.repeats * arguments.warm} cached runs, each in a fresh process\n")
    print(f"{'':22} {'import + compile':>17} {'from filled cache':>18}")
    for contender in (*ours, *peers):
        print(f"{contender.name:22} {contender.median('cold'):17.2f} {contender.median('warm'):18.3f}")
    for mine, peer in zip(ours, peers, strict=True):
        cold, warm = (mine.median(kind) / peer.median(kind) for kind in ("cold", "warm"))
        print(f"{'ratio, ' + mine.arch:22} {cold:17.2f} {warm:18.3f}")
    print(f"\nfa4.compiler.get in memory: {statistics.median(ours[0].lookups) * 1e6:.2f} us (of an equal problem, not the same object)")


if __name__ == "__main__":
    main()
