"""Reports as text for people: tables of resources, classes, loops and source lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa4._table import format_table
from fa4.inspection.classes import CLASSES
from fa4.inspection.code import Loop, MachineCode, SourceCount
from fa4.inspection.histogram import Histogram
from fa4.inspection.resources import Resources


def resource_table(used: Resources) -> str:
    """What one block takes, and how many fit."""
    if used.spill_stores is None or used.spill_loads is None:
        spills = "not reported"
    else:
        spills = f"{used.spill_stores} bytes stored, {used.spill_loads} bytes loaded"
    blocks = "decided at run time" if used.blocks_per_sm is None else f"{used.blocks_per_sm}, limited by {used.limited_by}"
    rows = {
        "registers per thread": str(used.registers),
        "spills per thread": spills,
        "stack per thread": f"{used.stack} bytes",
        "shared memory per block": f"{used.static_shared} bytes static, {_or_unknown(used.dynamic_shared)} bytes dynamic",
        "threads per block": _or_unknown(used.threads),
        "blocks per SM": blocks,
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def histogram_table(code: MachineCode | None, ptx: Histogram) -> str:
    """Instructions by class: of the kernel and its main loop in SASS, and of the PTX; the loops below."""
    columns: dict[str, Histogram] = {}
    if code is not None:
        columns["SASS"] = code.histogram
        if code.main_loop is not None:
            columns["main loop"] = code.main_loop.histogram
    columns["PTX"] = ptx
    rows = [
        [kind, *(_number(histogram[kind]) for histogram in columns.values()), meaning]
        for kind, meaning in CLASSES.items()
        if any(histogram[kind] for histogram in columns.values())
    ]
    rows.append(["total", *(str(histogram.total) for histogram in columns.values()), ""])
    lines = [format_table(["instructions", *columns, "what they do"], rows, left=(0, len(columns) + 1))]
    for name, histogram in columns.items():
        if histogram.other:
            lines.append(f"not classified ({name}): " + ", ".join(f"{opcode} {number}" for opcode, number in histogram.other.items()))
    if code is not None:
        lines += ["", loop_table(code)]
    return "\n".join(lines)


def loop_table(code: MachineCode) -> str:
    """The loops, indented by depth, with what one trip is made of."""
    if not code.loops:
        return "no loops"
    kinds = ("mma", "mufu", "fma", "local")
    rows = [[_loop_name(loop, code), str(loop.histogram.total), *(_number(loop.histogram[k]) for k in kinds)] for loop in code.loops]
    return format_table(["loop, per trip", "instructions", *kinds], rows)


def source_table(rows: Sequence[SourceCount], main_loop: Loop | None) -> str:
    """Instructions per Python line, of the kernel and of one trip of its main loop."""
    inside = {(row.file, row.line): row.instructions for row in main_loop.source_lines} if main_loop is not None else {}
    cells = [[row.place, str(row.instructions), _number(inside.get((row.file, row.line), 0)), row.text] for row in rows]
    return format_table(["source line", "SASS", "main loop", "text"], cells, left=(0, 3))


def comparison_table(rows: Sequence[tuple[str, Any, Any]]) -> str:
    """Named pairs of values, and the change of those that are numbers."""
    cells = []
    for name, left, right in rows:
        both = isinstance(left, int) and isinstance(right, int)
        cells.append([name, _or_unknown(left), _or_unknown(right), f"{right - left:+d}" if both else ""])
    return format_table(["", "left", "right", "change"], cells)


def _loop_name(loop: Loop, code: MachineCode) -> str:
    main = " (main)" if loop is code.main_loop else ""
    return f"{'  ' * (loop.depth - 1)}{loop.start:04x}-{loop.end:04x}{main}"


def _number(value: int) -> str:
    return str(value) if value else "-"


def _or_unknown(value: object) -> str:
    return "?" if value is None else str(value)
