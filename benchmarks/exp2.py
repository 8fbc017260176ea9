"""Instructions per exponential, counted in machine code, against flash-attn-4 in the same run.

    python benchmarks/exp2.py --peer-python /path/to/python

Each contender's pair function is compiled into the same kernel, which reads, computes and writes eight numbers per thread; what a kernel
that only copies has is subtracted. No GPU is needed; nvdisasm comes with the ``inspect`` extra. "FMA results" counts a packed
instruction twice. What the peer's interpreter needs says ``benchmarks/jit.py``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from jit import ROOT, cpu_name, run

from fa4._table import format_table
from fa4.inspection import nvdisasm, sass

PER_THREAD = 8

# The kernel has to lie in a file: the DSL reads its source.
KERNEL = """
import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_tensor
{imports}

@cute.kernel
def kernel(x: cute.Tensor, out: cute.Tensor):
    first = {per_thread} * (cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0])
    for k in cutlass.range_constexpr(0, {per_thread}, 2):
        a, b = x[first + k], x[first + k + 1]
        out[first + k], out[first + k + 1] = {call}

@cute.jit
def host(x: cute.Tensor, out: cute.Tensor):
    kernel(x, out).launch(grid=[cute.size(x) // (128 * {per_thread}), 1, 1], block=[128, 1, 1])

def cubin(arch):
    vectors = [make_fake_tensor(Float32, (cute.sym_int(divisibility=128 * {per_thread}),), (1,), assumed_align=16) for _ in range(2)]
    return cute.compile(host, *vectors, options=f"--gpu-arch {{arch}} --keep-cubin --dump-dir {folder}").__cubin__
"""
DRIVER = """
import json, pathlib, sys
sys.path.insert(0, {folder!r})
import contender
pathlib.Path({folder!r}, "kernel.cubin").write_bytes(contender.cubin({arch!r}))
from importlib.metadata import version
print(json.dumps({{"dsl": version("nvidia-cutlass-dsl"), "peer": version("flash-attn-4") if {peer} else ""}}))
"""

OURS = "from fa4.emulate_exp.device import emulated_exp2_pair"
THEIRS = "from flash_attn.cute.utils import ex2_emulation_2"
EMULATED = {
    "fa4, fast": (OURS, "emulated_exp2_pair(a, b)"),
    "fa4, unclamped": (OURS, "emulated_exp2_pair(a, b, 3, 'unclamped')"),
    "fa4, full": (OURS, "emulated_exp2_pair(a, b, 3, 'full')"),
    "special-function unit": ("", "cute.math.exp2(a, fastmath=True), cute.math.exp2(b, fastmath=True)"),
}
PEER = {"sm_100a": {"flash-attn-4": (THEIRS, "ex2_emulation_2(a, b)")}}
"""Its scalar function is used by none of its kernels."""

FMA = {"FADD": 1, "FMUL": 1, "FFMA": 1, "FADD2": 2, "FMUL2": 2, "FFMA2": 2}
PIPES = {
    "FMA instructions": tuple(FMA),
    "ALU": ("FMNMX", "FMNMX3", "LEA", "SHF", "IADD3", "VIADD", "LOP3", "SEL", "FSEL", "FSETP"),
    "integer multiply-add": ("IMAD",),
    "MUFU": ("MUFU",),
    "conversions": ("F2F", "F2FP", "F2I", "FRND", "I2F", "I2FP"),
}


def opcodes(python: str, contender: tuple[str, str], arch: str, environment: dict[str, str]) -> tuple[Counter[str], dict[str, object]]:
    """Instructions of one kernel by base name, and the versions that made it, from a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        imports, call = contender
        text = KERNEL.format(imports=imports, call=call, per_thread=PER_THREAD, folder=folder)
        Path(folder, "contender.py").write_text(text)
        versions = run(python, DRIVER.format(folder=folder, arch=arch, peer=imports == THEIRS), {"CUTE_DSL_ARCH": arch, **environment})
        ((_, function),) = sass.parse(nvdisasm.disassemble(Path(folder, "kernel.cubin").read_bytes())).items()
    # Moves of IMAD are address arithmetic or copies, as in the copying kernel.
    return Counter(i.opcode.partition(".")[0] for i in function.instructions if i.kind != "move"), versions


def row(name: str, counts: Counter[str]) -> list[str]:
    """Per element: multiply-add results, then instructions by pipe."""
    results = sum(FMA[opcode] * count for opcode, count in counts.items() if opcode in FMA)
    pipes = [sum(counts[opcode] for opcode in names) for names in PIPES.values()]
    return [name, *(f"{count / PER_THREAD:g}" for count in (results, *pipes))]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has flash-attn-4 (default: this one)")
    arguments = parser.parse_args()
    rows: list[list[str]] = []
    versions: dict[str, object] = {}
    for arch in ("sm_80", "sm_100a"):
        for name, contender in {**EMULATED, **PEER.get(arch, {})}.items():
            peer = contender[0] == THEIRS
            python, environment = (arguments.peer_python, {"PYTHONPATH": ""}) if peer else (sys.executable, {"PYTHONPATH": str(ROOT)})
            copying, _ = opcodes(python, ("", "a, b"), arch, environment)
            counts, found = opcodes(python, contender, arch, environment)
            versions |= {key: value for key, value in found.items() if value}
            counts.subtract(copying)
            rows.append(row(f"{arch}, {name}", counts))
    print(f"per element, degree 3; nvidia-cutlass-dsl {versions['dsl']}, flash-attn-4 {versions['peer']}; compiled on {cpu_name()}")
    print(format_table(["", "FMA results", *PIPES], rows))


if __name__ == "__main__":
    main()
