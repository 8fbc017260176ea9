"""What the compiled kernels need: registers, stack and the instructions of a main-loop trip, against flash-attn-4 in the same run.

    python benchmarks/resources.py --peer-python /path/to/python

Both sides compile their sm_80 forward, bfloat16, with their own tile sizes; one parser reads the machine code of both
(``fa4.inspection``; nvdisasm comes with the ``inspect`` extra). No GPU is needed. "spill code" counts the instructions of the whole
kernel that load or store local memory. "other/MMA" is, for a trip of the main loop, the instructions that are no tensor-core products,
per product. What the peer's interpreter needs says ``benchmarks/jit.py``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from jit import PEER_TARGETS, cpu_name, run

from fa4 import tuning
from fa4._table import format_table
from fa4.arch import get_arch
from fa4.compiler import get
from fa4.compiler.cubin import parse_cubin
from fa4.inspection import nvdisasm, sass
from fa4.inspection.graph import natural_loops
from fa4.problem import AttentionProblem

ARCH = "sm_80"
HEAD_DIMS = (64, 96, 128, 192, 256)

PEER = """
import json
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
torch.cuda.current_device = lambda: 0  # there may be no driver to ask
from flash_attn.cute.interface import _flash_attn_fwd
with FakeTensorMode():
    q, k, v = (torch.empty(2, 1024, 4, {dim}, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    _flash_attn_fwd(q, k, v, causal={causal})
from importlib.metadata import version
print(json.dumps({{"version": version("flash-attn-4")}}))
"""


def peer_cubin(python: str, dim: int, causal: bool) -> tuple[bytes, str]:
    """The peer's machine code and version, from a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        keep = {"CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": folder, "PYTHONPATH": ""}
        report = run(python, PEER.format(dim=dim, causal=causal), PEER_TARGETS[f"flash-attn-4 {ARCH}"] | keep)
        (cubin,) = Path(folder).rglob("*.cubin")
        return cubin.read_bytes(), f"flash-attn-4 {report['version']}"


def our_cubin(dim: int, causal: bool) -> bytes:
    """This project's machine code."""
    problem = AttentionProblem("forward", "bfloat16", dim, dim, causal=causal)
    return get(problem, tuning.config(problem, get_arch(ARCH)), ARCH).cubin


def row(name: str, cubin: bytes) -> list[str]:
    """Registers, stack, spill code and main loop of the one kernel in a cubin."""
    ((kernel, resources),) = parse_cubin(cubin).items()
    function = sass.parse(nvdisasm.disassemble(cubin))[kernel]
    spills = sum(instruction.opcode.startswith(("LDL", "STL")) for instruction in function.instructions)
    loops = natural_loops(function)
    outer = {loop.parent for loop in loops}
    trips = []
    for loop in loops:
        if loop.start not in outer:
            inside = [instruction.opcode for instruction in function.instructions if instruction.address in loop.addresses]
            trips.append((sum(opcode.startswith("HMMA") for opcode in inside), -len(inside)))
    products, length = max(trips)  # of loops with and without a mask, the one without, which is shorter
    other = -length - products
    return [name, str(resources.registers), str(resources.stack), str(spills), f"{other}/{products}", f"{other / products:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has flash-attn-4 (default: this one)")
    arguments = parser.parse_args()
    rows = []
    peer = ""
    for dim in HEAD_DIMS:
        for causal in (False, True):
            cubin, peer = peer_cubin(arguments.peer_python, dim, causal)
            name = f"D {dim} {'causal' if causal else 'full'}"
            rows.append(row(f"{name}, fa4", our_cubin(dim, causal)))
            rows.append(row(f"{name}, flash-attn-4", cubin))
    print(f"{ARCH} forward, bfloat16; {peer}; compiled on {cpu_name()}")
    print(format_table(["kernel", "registers", "stack bytes", "spill code", "other/MMA", "per MMA"], rows))


if __name__ == "__main__":
    main()
