"""The page docs/architectures.md, generated from the records in fa4/arch.py so that the two cannot disagree."""

from __future__ import annotations

from dataclasses import fields

from fa4.arch import ARCHS, Arch, Quantity, forward_tile_cycles

# Field of Arch -> row heading and divisor for display.
_ROWS = {
    "sm_count": ("SMs", 1),
    "boost_clock": ("Boost clock under tensor load, MHz", 1e6),
    "smem_per_sm": ("Shared memory per SM, KB", 1024),
    "smem_per_block": ("Shared memory per block, KB", 1024),
    "registers_per_sm": ("Registers per SM", 1),
    "registers_per_thread": ("Registers per thread", 1),
    "threads_per_sm": ("Threads per SM", 1),
    "blocks_per_sm": ("Blocks per SM", 1),
    "tmem_lanes": ("Tensor Memory lanes", 1),
    "tmem_columns": ("Tensor Memory columns", 1),
    "bf16_flop": ("Dense bf16 FLOP per SM and clock", 1),
    "exp2": ("exp2 results per SM and clock", 1),
    "fp32_fma": ("fp32 FMA per SM and clock", 1),
    "alu": ("Maximum, select, shift per SM and clock", 1),
    "smem_bandwidth": ("Shared-memory bytes per SM and clock", 1),
    "l2": ("L2, MB", 1024 * 1024),
    "dram_bandwidth": ("Device memory, TB/s", 1e12),
    "bf16_peak": ("Published dense bf16 peak, TFLOPS", 1e12),
}

_INTRODUCTION = """\
# Architectures

The compile targets that have kernels, and the numbers that tuning and the performance model build on. Figures that belong to
a product rather than to the target (SMs, clock, caches, memory, peak) describe the named part. KB and MB are powers of two,
TB/s and TFLOPS powers of ten. A number in brackets refers to the sources below, which also say where documents disagree.
This page is generated from `fa4/arch.py` by `docs/_architectures.py`.
"""

_TILE = """\
## Roofline of one forward tile

Clocks that each unit of one SM needs for 128 queries against 128 keys (`fa4.arch.forward_tile_cycles`); the largest is the
bound. Shared memory counts the operand reads of the two products, with P in Tensor Memory; where there is none, the reads depend
on how a kernel lays its warps over the tile, and no figure is given.
"""


def _quantity(arch: Arch, field: str) -> Quantity:
    value = getattr(arch, field)
    assert isinstance(value, Quantity)
    return value


def sources() -> list[str]:
    """Return every source once, in the order in which the table first cites it; its number is its position, from 1."""
    return list(dict.fromkeys(_quantity(arch, field).source for field in _ROWS for arch in ARCHS.values()))


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def markdown_table() -> str:
    """Return the table of all records: one column per target, one row per quantity, each cell with the number of its source."""
    missing = {field.name for field in fields(Arch)} - {"name", "family", "capability", "part", *_ROWS}
    assert not missing, f"no row for {missing}"
    archs = list(ARCHS.values())
    number = {source: i for i, source in enumerate(sources(), start=1)}
    lines = [
        _row(["", *(f"`{arch.name}`" for arch in archs)]),
        _row(["---"] * (len(archs) + 1)),
        _row(["Compute capability", *(".".join(map(str, arch.capability)) for arch in archs)]),
        _row(["Kernels", *(arch.family for arch in archs)]),
        _row(["Part", *(arch.part for arch in archs)]),
    ]
    for field, (heading, divisor) in _ROWS.items():
        quantities = [_quantity(arch, field) for arch in archs]
        lines.append(_row([heading, *(f"{q.value / divisor:.10g} [{number[q.source]}]" for q in quantities)]))
    return "\n".join(lines) + "\n"


def _tile_table() -> str:
    lines = [_row(["Target", "Head dim", "MMA", "Shared memory", "exp2"]), _row(["---"] * 5)]
    for arch in ARCHS.values():
        for d in (64, 128):
            tile = forward_tile_cycles(arch, 128, 128, d)
            smem = "-" if tile.smem is None else f"{tile.smem:g}"
            lines.append(_row([f"`{arch.name}`", str(d), f"{tile.mma:g}", smem, f"{tile.exp:g}"]))
    return "\n".join(lines) + "\n"


def architectures_page() -> str:
    """Return the whole page as markdown, ending in one newline."""
    listed = "".join(f"{i}. {source}.\n" for i, source in enumerate(sources(), start=1))
    return "\n".join([_INTRODUCTION, markdown_table(), _TILE, _tile_table(), "## Sources\n", listed])
