"""What the compiled kernels need, against flash-attn-4 in the same run: registers, spills, memory, and instructions by warp role.

    python benchmarks/sass.py --peer-python /path/to/python [sm_80] [sm_100a] [backward]

Both sides compile the same kernels, bfloat16, with their own tile sizes: the forwards of sm_80 and sm_100a, the backward of sm_100a. One
parser reads the machine code of both (``fa4.inspection``; nvdisasm comes with the ``inspect`` extra). No GPU is needed. What the peer's
interpreter needs says ``benchmarks/jit.py``.

"spill code" counts the instructions of the whole kernel that load or store local memory. sm_80: "other/MMA" is, for a trip of the main
loop, the instructions that are no tensor-core products, per product. sm_100a: instructions of a trip of each role's main loop; in
brackets those of them that run only where a first attempt at a wait fails. "outside" are a role's instructions in no main loop. Where
the two emulate different shares of the exponentials, "same share" is our kernel with the peer's. Backward: a trip is a query tile;
instructions of a loop inside it count as often as they run, which its products tell. "reductions" are a warp's bulk operations that add
to dQ in global memory.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from jit import PEER_TARGETS, cpu_name, run

from fa4 import tuning
from fa4._table import format_table
from fa4.arch import get_arch
from fa4.compiler import get
from fa4.compiler.cubin import parse_cubin
from fa4.compiler.hostcode import dynamic_shared_memory
from fa4.config import BlackwellForwardConfig
from fa4.errors import UnsupportedError
from fa4.inspection import nvdisasm, sass
from fa4.inspection.graph import natural_loops
from fa4.inspection.roles import BACKWARD_SIGNS, SIGNS, Trip, roles
from fa4.problem import AttentionProblem

HEAD_DIMS = {"sm_80": ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256)), "sm_100a": ((64, 64), (128, 128), (192, 128))}

PEER = """
import json, pathlib
import torch
import cutlass.utils
from torch._subclasses.fake_tensor import FakeTensorMode
torch.cuda.current_device = lambda: 0  # there may be no driver to ask
class HardwareInfo:
    def get_device_multiprocessor_count(self): return 148
    def get_max_active_clusters(self, size): return 148 // size
cutlass.utils.HardwareInfo = HardwareInfo
from flash_attn.cute import interface
with FakeTensorMode():
    q, k, v, out, dout = (torch.empty(2, 1024, 4, d, dtype=torch.bfloat16, device="cuda") for d in ({d}, {d}, {dv}, {dv}, {dv}))
    lse = torch.empty(2, 4, 1024, dtype=torch.float32, device="cuda")
    interface.{call}, causal={causal})
(compiled,) = interface.{function}.compile_cache.cache.values()
pathlib.Path("{folder}", "host.mlir").write_text(str(compiled.ir_module))
from importlib.metadata import version
print(json.dumps({{"version": version("flash-attn-4")}}))
"""


@dataclass(frozen=True)
class Built:
    """A kernel: its cubin, and bytes of dynamic shared memory (0: not known)."""

    cubin: bytes
    shared: int

    @property
    def function(self) -> sass.Function:
        """The machine code of the one kernel."""
        (name,) = parse_cubin(self.cubin)
        return sass.parse(nvdisasm.disassemble(self.cubin))[name]

    @property
    def needs(self) -> list[str]:
        """Registers, bytes of stack, spill code, bytes of shared memory, instructions."""
        ((_, resources),) = parse_cubin(self.cubin).items()
        code = self.function.instructions
        spills = sum(instruction.opcode.startswith(("LDL", "STL")) for instruction in code)
        return [str(number) for number in (resources.registers, resources.stack, spills, self.shared or "", len(code))]


def build_peer(python: str, arch: str, dims: tuple[int, int], causal: bool, backward: bool = False, pair: bool = True) -> tuple[Built, str]:
    """The peer's kernel, of a backward the main one, and its version, from a fresh process; ``pair``: where it uses CTA pairs by itself."""
    function = "_flash_attn_bwd" if backward else "_flash_attn_fwd"
    call = f"{function}(q, k, v, out, dout, lse" if backward else f"{function}(q, k, v"
    with tempfile.TemporaryDirectory() as folder:
        keep = {"CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": folder, "PYTHONPATH": "", "FA_DISABLE_2CTA": str(int(not pair))}
        code = PEER.format(d=dims[0], dv=dims[1], causal=causal, folder=folder, call=call, function=function)
        report = run(python, code, PEER_TARGETS[f"flash-attn-4 {arch}"] | keep)
        (cubin,) = (path for path in Path(folder).rglob("*.cubin") if not re.search("Pre|Postprocess", path.name))
        shared = dynamic_shared_memory(Path(folder, "host.mlir").read_text())
        return Built(cubin.read_bytes(), max(shared.values(), default=0)), f"flash-attn-4 {report['version']}"


def build_ours(arch: str, dims: tuple[int, int], causal: bool, emulated: int | None = None) -> Built:
    """This project's kernel as tuned, or with ``emulated`` of 16 pairs of exponentials on the multiply-add units."""
    problem = AttentionProblem("forward", "bfloat16", *dims, causal=causal)
    config = tuning.config(problem, get_arch(arch))
    if emulated is not None and isinstance(config, BlackwellForwardConfig):
        config = replace(config, exp2=replace(config.exp2, emulated=emulated * config.exp2.period // 16))
    artifact = get(problem, config, arch)
    return Built(artifact.cubin, artifact.kernels[0].launch.dynamic_shared or 0)


def build_backward(dims: tuple[int, int], causal: bool, pair: bool) -> Built | None:
    """This project's main kernel of a backward, with one CTA or a pair; None where it has none."""
    problem = AttentionProblem("backward", "bfloat16", *dims, causal=causal)
    config = tuning.with_pair(tuning.config(problem, get_arch("sm_100a")), pair, *dims)
    try:
        artifact = get(problem, config, "sm_100a")
    except UnsupportedError:
        return None
    return Built(artifact.cubin, artifact.kernels[0].launch.dynamic_shared or 0)


def main_loop(built: Built) -> list[str]:
    """Of the innermost loop with the most products: what else it has, and that per product."""
    function = built.function
    loops = natural_loops(function)
    outer = {loop.parent for loop in loops}
    trips = []
    for loop in loops:
        if loop.start not in outer:
            inside = [instruction.opcode for instruction in function.instructions if instruction.address in loop.addresses]
            trips.append((sum(opcode.startswith("HMMA") for opcode in inside), -len(inside)))
    products, length = max(trips)  # of loops with and without a mask, the one without, which is shorter
    other = -length - products
    return [f"{other}/{products}", f"{other / products:.2f}"]


def trips_of(built: Built) -> dict[str, Trip]:
    """The main loops by role; of the softmax the shortest, and as "masked" the longest where it has one with a mask."""
    found = {}
    for name, role in roles(built.function).items():
        key_tiles = [trip for trip in role.trips if trip.histogram["mma"] or name != "mma"]
        if key_tiles and name != "epilogue":  # whose only loop, if any, is over query tiles
            found[name] = key_tiles[0]
        if name == "softmax" and len(key_tiles) > role.copies:
            found["masked"] = key_tiles[-1]
    return found


def emulated_share(softmax: Trip) -> int:
    """Of 16 pairs of a row of 128, those that the special-function unit does not get; one exponential more is the factor's."""
    return round((128 - softmax.histogram["mufu"]) / 8)


def sm_80(python: str) -> str:
    """The table of the Ampere forward."""
    rows = []
    peer = ""
    for dims in HEAD_DIMS["sm_80"]:
        for causal in (False, True):
            theirs, peer = build_peer(python, "sm_80", dims, causal)
            for who, built in (("fa4", build_ours("sm_80", dims, causal)), ("flash-attn-4", theirs)):
                registers, stack, spills, _, _ = built.needs
                rows.append([f"D {dims[0]} {'causal' if causal else 'full'}, {who}", registers, stack, spills, *main_loop(built)])
    header = ["kernel", "registers", "stack bytes", "spill code", "other/MMA", "per MMA"]
    return f"sm_80 forward, bfloat16; {peer}; compiled on {cpu_name()}\n{format_table(header, rows)}"


def sm_100a(python: str) -> str:
    """The tables of the Blackwell forward: what it needs, trips by role, classes of a trip, and what is outside the trips."""
    needs, lengths, classes, outside = [], [], [], []
    peer = ""
    loops = ("load", "mma", "softmax", "masked", "correction")
    kinds = (
        "mma",
        "mufu",
        "fma",
        "compare",
        "integer",
        "conversion",
        "move",
        "tensor memory",
        "shared",
        "async copy",
        "barrier",
        "control",
    )
    for dims in HEAD_DIMS["sm_100a"]:
        for causal in (False, True):
            theirs, peer = build_peer(python, "sm_100a", dims, causal)
            contenders = {"fa4": build_ours("sm_100a", dims, causal), "flash-attn-4": theirs}
            shares = [emulated_share(trips_of(built)["softmax"]) for built in contenders.values()]
            if shares[0] != shares[1]:
                contenders["fa4, same share"] = build_ours("sm_100a", dims, causal, shares[1])
            for who, built in contenders.items():
                name = f"D {dims[0]}, {dims[1]} {'causal' if causal else 'full'}, {who}"
                found = trips_of(built)
                needs.append([name, *built.needs])
                shown = {role: f"{trip.instructions} ({trip.waiting})" for role, trip in found.items()}
                lengths.append([name, *(shown.get(role, "") for role in loops)])
                for role, trip in found.items():
                    classes.append([name, role, *(str(trip.histogram[kind] or "") for kind in kinds)])
                total = {role.name: f"{role.outside:.0f}" for role in roles(built.function).values()}
                epilogue = sum(trip.instructions for trip in roles(built.function)["epilogue"].trips)
                total["epilogue"] = f"{float(total['epilogue']) + epilogue:.0f}"
                outside.append([name, *(total.get(role, "") for role in SIGNS)])
    return "\n\n".join(
        [
            f"sm_100a forward, bfloat16; {peer}; compiled on {cpu_name()}",
            format_table(["kernel", "registers", "stack bytes", "spill code", "shared bytes", "instructions"], needs),
            "instructions per trip\n" + format_table(["kernel", *loops], lengths),
            "outside the trips\n" + format_table(["kernel", *SIGNS], outside),
            "a trip by class\n" + format_table(["kernel", "role", *kinds], classes, left=(0, 1)),
        ]
    )


PRODUCTS = "UTCHMMA"


def executed(trip: Trip, function: sass.Function, products: int) -> int:
    """Instructions that run in a trip of ``products``, where no wait fails: those of a loop with products inside it as often as it runs."""
    loops = {loop.start: loop for loop in natural_loops(function)}
    inner = [loop for loop in loops.values() if loop.parent == trip.start]
    opcodes = {i.address: i.opcode for i in function.instructions}
    total = trip.instructions - trip.waiting
    for loop in inner:
        repeated = sum(opcodes[address].startswith(PRODUCTS) for address in loop.addresses)
        if repeated:
            runs = (products - (trip.histogram["mma"] - repeated)) // repeated
            total += (runs - 1) * len(loop.addresses)
    return total


def backward_rows(name: str, built: Built, products: int) -> tuple[list[str], list[str], list[str]]:
    """What a kernel needs, its trips, and what is outside of them."""
    function = built.function
    found = roles(function, BACKWARD_SIGNS, outermost=True)
    trips = {role: max(found[role].trips, key=lambda trip: trip.instructions) for role in ("load", "mma", "reduce")}
    trips["compute"] = found["compute"].trips[0]
    if len(found["compute"].trips) > 1:
        trips["masked"] = found["compute"].trips[-1]
    budgets = sorted({int(i.operands.split()[-1], 16) for i in function.instructions if "SETMAXREG" in i.opcode})
    (loop,) = (loop for loop in natural_loops(function) if loop.start == trips["reduce"].start)
    adds = sum(i.opcode.startswith(BACKWARD_SIGNS["reduce"]) for i in function.instructions if i.address in loop.addresses)
    lengths = (f"{executed(trips[role], function, products)} ({trips[role].waiting})" if role in trips else "" for role in BACKWARD_TRIPS)
    outside = (f"{found[role].outside:.0f}" if role in found else "" for role in BACKWARD_SIGNS)
    return [name, *built.needs, " ".join(map(str, budgets)), str(adds)], [name, *lengths], [name, *outside]


BACKWARD_TRIPS = ("load", "mma", "compute", "masked", "reduce")


def backward(python: str) -> str:
    """The tables of the Blackwell backward: what it needs, trips by role, and what is outside of them."""
    rows = []
    peer = ""
    for dims in HEAD_DIMS["sm_100a"]:
        for causal in (False, True):
            for pair in (False, True) if dims[0] >= 128 else (False,):  # flash-attn-4 has no pairs below
                contenders = {"fa4": build_backward(dims, causal, pair)}
                if pair or dims[0] <= 128:  # above it has nothing else
                    contenders["flash-attn-4"], peer = build_peer(python, "sm_100a", dims, causal, backward=True, pair=pair)
                products = (sum(dims) + 2 * 128 + (2 if pair else 1) * 128) // 16
                for who, built in contenders.items():
                    name = f"D {dims[0]}, {dims[1]} {'causal' if causal else 'full'} {'pair' if pair else 'one CTA'}, {who}"
                    rows += [backward_rows(name, built, products)] if built else []
    needs, lengths, outside = zip(*rows, strict=True)
    header = ["kernel", "registers", "stack bytes", "spill code", "shared bytes", "instructions", "of roles", "reductions"]
    return "\n\n".join(
        [
            f"sm_100a backward, bfloat16; {peer}; compiled on {cpu_name()}",
            format_table(header, needs),
            "instructions per trip\n" + format_table(["kernel", *BACKWARD_TRIPS], lengths),
            "outside the trips\n" + format_table(["kernel", *BACKWARD_SIGNS], outside),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "archs", nargs="*", default=[*HEAD_DIMS, "backward"], metavar="which", help="sm_80, sm_100a, backward (default: all)"
    )
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has flash-attn-4 (default: this one)")
    arguments = parser.parse_args()
    tables = {"sm_80": sm_80, "sm_100a": sm_100a, "backward": backward}
    for arch in arguments.archs:
        if arch not in tables:
            parser.error(f"{arch}: must be one of {', '.join(tables)}")
        print(tables[arch](arguments.peer_python) + "\n")


if __name__ == "__main__":
    main()
