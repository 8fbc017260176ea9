"""Time to a kernel: cold, from a filled cache, and in memory, against flash-attn-4 with its own cache enabled.

    python benchmarks/jit.py --peer-python /path/to/python

Each contender runs in fresh processes, its cache in a folder of its own; runs alternate, so that a slow spell of the machine hits both;
`import torch` comes before the clock starts. Both compile their sm_100a and sm_80 forwards, and the whole backward of sm_100a, three
kernels on either side; flash-attn-4 on fake CUDA tensors: no GPU is needed. Same head dim (128), dtype (bfloat16) and mask (causal).

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
arch, direction = sys.argv[1:]
problem = AttentionProblem(direction, "bfloat16", 128, 128, causal=True)
config = tuning.config(problem, get_arch(arch))
around = tuning.around_backward(problem) if direction == "backward" else ()
artifacts = [compiler.get(*request, arch) for request in ((problem, config), *around)]
functions = [load_function(artifact) for artifact in artifacts]
ready = time.perf_counter() - start
count = 100_000
equal = AttentionProblem(direction, "bfloat16", 128, 128, causal=True)
start = time.perf_counter()
for _ in range(count):
    compiler.get(equal, config, arch)
lookup = (time.perf_counter() - start) / count
tools = artifacts[0].toolchain
print(json.dumps({
    "ready": ready, "lookup": lookup, "cutlass": "cutlass" in sys.modules,
    "versions": f"fa4 {tools.fa4}, nvidia-cutlass-dsl {tools.dsl} {tools.flavour}, torch {torch.__version__}",
}))
"""

PEER = """
import json, sys, time
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
torch.cuda.current_device = lambda: 0  # there may be no driver to ask
start = time.perf_counter()
from flash_attn.cute.interface import _bwd_postprocess_convert, _bwd_preprocess, _flash_attn_bwd, _flash_attn_fwd
with FakeTensorMode():
    q, k, v, out, dout = (torch.empty(2, 1024, 4, 128, dtype=torch.bfloat16, device="cuda") for _ in range(5))
    if sys.argv[2] == "backward":
        _flash_attn_bwd(q, k, v, out, dout, torch.empty(2, 4, 1024, dtype=torch.float32, device="cuda"), causal=True)
        kernels = _bwd_preprocess, _flash_attn_bwd, _bwd_postprocess_convert
    else:
        _flash_attn_fwd(q, k, v, causal=True)
        kernels = (_flash_attn_fwd,)
ready = time.perf_counter() - start
from importlib.metadata import version
assert all(kernel.compile_cache.cache for kernel in kernels), "nothing was compiled or loaded"
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


CASES = {"sm_100a": ("sm_100a", "forward"), "sm_80": ("sm_80", "forward"), "backward": ("sm_100a", "backward")}
"""Architecture and direction of what is compiled."""


class Contender:
    """One side: how to run it, and what it took, in seconds."""

    def __init__(self, name: str, case: str, python: str, code: str, environment: dict[str, str]) -> None:
        self.case, (arch, direction) = case, CASES[case]
        self.name, self._arguments = f"{name} {arch} {direction}", (arch, direction)
        self.times: dict[str, list[float]] = {"cold": [], "warm": []}
        self.report: dict[str, object] = {}
        self.lookups: list[float] = []
        self._command = python, code, environment

    def measure(self, folder: Path, warm_runs: int) -> None:
        """Once with an empty cache, then with the cache that this filled."""
        python, code, environment = self._command
        caches = {"FA4_CACHE_DIR": str(folder), "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder)}
        for kind in ["cold"] + ["warm"] * warm_runs:
            self.report = run(python, code, {**environment, **caches, "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}, *self._arguments)
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
    parser.add_argument("cases", nargs="*", metavar="case", default=[*CASES], help=f"{', '.join(CASES)} (default: all)")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has flash-attn-4 (default: this one)")
    parser.add_argument("--repeats", type=int, default=5, help="cold runs of each contender (default: %(default)s)")
    parser.add_argument("--warm", type=int, default=2, help="runs from the cache after each cold one (default: %(default)s)")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time instead of wall time: for a machine that others use too")
    arguments = parser.parse_args()

    ours, peers = [], []
    clock = "process_time" if arguments.cpu_time else "perf_counter"
    mine, theirs = (code.replace("perf_counter", clock) for code in (OURS, PEER))
    for case in arguments.cases:
        if case not in CASES:
            parser.error(f"{case}: must be one of {', '.join(CASES)}")
        target = PEER_TARGETS[f"flash-attn-4 {CASES[case][0]}"]
        ours.append(Contender("fa4", case, sys.executable, mine, {"PYTHONPATH": str(ROOT)}))
        peers.append(Contender("flash-attn-4", case, arguments.peer_python, theirs, {"PYTHONPATH": "", **target}))
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
    kind = "CPU seconds" if arguments.cpu_time else "seconds"
    print(f"causal, head dim 128, bfloat16; {kind} after `import torch`, medians of {arguments.repeats} cold and")
    print(f"{arguments.repeats * arguments.warm} cached runs, each in a fresh process\n")
    print(f"{'':30} {'import + compile':>17} {'from filled cache':>18}")
    for contender in (*ours, *peers):
        print(f"{contender.name:30} {contender.median('cold'):17.2f} {contender.median('warm'):18.3f}")
    for own, peer in zip(ours, peers, strict=True):
        cold, warm = (own.median(kind) / peer.median(kind) for kind in ("cold", "warm"))
        print(f"{'ratio, ' + own.case:30} {cold:17.2f} {warm:18.3f}")
    print(f"\nfa4.compiler.get in memory: {statistics.median(ours[0].lookups) * 1e6:.2f} us (of an equal problem, not the same object)")


if __name__ == "__main__":
    main()
