"""Numbers of the machine from a GPU at hand: microbenchmarks timed by the SM's clock and by CUDA events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fa4.arch import Arch, arch_for_capability
from fa4.config import TMEM_LANES
from fa4.errors import DeviceError, ModelError

if TYPE_CHECKING:
    from fa4.perfmodel.machine import Machine
    from fa4.perfmodel.microbenchmarks import Microbenchmark

COUNTS = (2_000, 10_000)
REPEATS = 5


@dataclass(frozen=True)
class Timing:
    """Of one more trip of a microbenchmark: clocks of the SM, and seconds by CUDA events."""

    clocks: float
    seconds: float


def benchmarks(arch: Arch) -> tuple[Microbenchmark, ...]:
    """Those that an architecture can run."""
    from fa4.perfmodel.microbenchmarks import MICROBENCHMARKS

    return tuple(m for m in MICROBENCHMARKS if arch.family in m.families)


def measure(device: int = 0) -> tuple[str, dict[str, Timing]]:
    """The architecture of a CUDA device, and a timing of each microbenchmark: differences of two counts, the least of some repeats.

    Raises:
        DeviceError: there is no such device.
        BackendError: its architecture is unknown.
        ModelError: a microbenchmark computed something wrong.
    """
    import torch

    if not torch.cuda.is_available() or device >= torch.cuda.device_count():
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise DeviceError("device", device, f"there are {count} CUDA devices: clocks are measured on a GPU, or not at all", "run it on one")
    arch = arch_for_capability(torch.cuda.get_device_capability(device))
    return arch.name, {m.name: _timing(m, device) for m in benchmarks(arch)}


def _timing(benchmark: Microbenchmark, device: int) -> Timing:
    import numpy as np
    import torch
    from cutlass.cute.runtime import from_dlpack

    from fa4.perfmodel.microbenchmarks import inputs, launch

    with torch.cuda.device(device):
        x = torch.from_numpy(inputs()).cuda()
        y, clocks = torch.empty(benchmark.threads, device="cuda"), torch.empty(1, dtype=torch.int64, device="cuda")
        arguments = [from_dlpack(t) for t in (x, y, clocks)]
        found: dict[int, list[tuple[float, float]]] = {count: [] for count in COUNTS}
        for count in (COUNTS[0], *COUNTS * REPEATS):  # the first compiles and warms up
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            launch(*arguments, count, benchmark.work)
            end.record()
            end.synchronize()
            found[count].append((float(clocks.item()), begin.elapsed_time(end) / 1e3))
        wanted = benchmark.result(COUNTS[-1], benchmark.threads)
        if not np.allclose(y.cpu().numpy(), wanted, rtol=1e-3):
            raise ModelError("microbenchmark", benchmark.name, "computed something wrong", "report it, with the GPU and the toolchain")
    few, many = (tuple(min(values[i] for values in found[count]) for i in (0, 1)) for count in COUNTS)
    more = COUNTS[1] - COUNTS[0]
    return Timing((many[0] - few[0]) / more, (many[1] - few[1]) / more)


def numbers(clocks: Mapping[str, float]) -> dict[str, float]:
    """Numbers of ``Machine`` from the clocks of a trip of each microbenchmark that was run.

    A hand-over of an mbarrier is an arrival and a wake-up, which are told apart by their share in the preset. Latencies are what is left of
    a trip after the bytes or products in it, and after the hand-over it ends with.
    """
    from fa4.kernels.common.tcgen05 import K_STEP
    from fa4.perfmodel import microbenchmarks as m

    found = {
        "mufu_latency": clocks["special_latency"] / m.OPS,
        "mufu": clocks["special_rate"] / m.OPS,
        "fma_latency": clocks["fma_latency"] / m.OPS,
        "smem": m.OPS * TMEM_LANES * 16 / clocks["shared_rate"],
        "lds_latency": clocks["shared_latency"] / m.OPS,
        "global_latency": clocks["global_latency"],
        "barrier": clocks["barrier"] / m.OPS,
    }
    if "hand_over" in clocks:
        each = clocks["hand_over"] / 2
        found |= {"arrive": each / 3, "wake": each * 2 / 3}
        rate = 4 * (m.INPUTS - m.INPUTS // 16) / (clocks["copy_large"] - clocks["copy_small"])
        found |= {"tma": rate, "tma_latency": clocks["copy_small"] - 4 * (m.INPUTS // 16) / rate - found["wake"]}
    if "product_many" in clocks:
        for name in ("load", "store"):
            small, large = clocks[f"tensor_{name}_small"], clocks[f"tensor_{name}_large"]
            found |= {f"tmem_{name}": 128 * 56 / (large - small), f"tmem_{name}_latency": small - 8 * (large - small) / 56}
        each = (clocks["product_many"] - clocks["product_few"]) / (m.OPS - 1)
        flop = 2 * TMEM_LANES * m.N * K_STEP
        found |= {"tcgen05": flop / each, "tcgen05_done": clocks["product_few"] - each - found["wake"]}
    return found


def rows(machine: Machine, found: Mapping[str, float]) -> list[dict[str, Any]]:
    """Each measured number beside that of a machine: whether it lies in its range."""
    known = dict(machine.parameters())
    table = []
    for name, value in found.items():
        p = known.get(name)
        if p is not None:
            row = {"name": name, "measured": value, "model": p.value, "low": p.low, "high": p.high, "unit": p.unit}
            table.append({**row, "inside": p.low <= value <= p.high})
    return table


def text(table: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table."""
    from fa4._table import format_table

    cells = []
    for row in table:
        span, outside = f"{row['low']:.4g} to {row['high']:.4g}", "" if row["inside"] else "outside"
        cells.append([row["name"], f"{row['measured']:.4g}", f"{row['model']:.4g}", span, row["unit"], outside])
    return format_table(["number", "measured", "model", "range", "unit", ""], cells, left=(0, 4, 5))
