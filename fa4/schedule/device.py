"""The device twin of ``fa4.schedule.order``, for dense batches: tile numbers to tiles, by run-time lengths."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr


class TileOrder(NamedTuple):
    """What a kernel needs to find its tile, made by ``tile_order`` in host code.

    Divisors are ``cute.FastDivmodDivisorV2`` while numbers of tiles fit 32 bits, plain Int64 otherwise. ``last`` is the size of the
    last section, which may be smaller than the others.
    """

    tiles: Any
    blocks: Any
    heads: Any
    section_tiles: Any
    section: Any
    last: Any
    full_sections: Any
    section_size: Any


@cute.jit
def section_size(operand_bytes: Int64, groups: Int64, group: Int64, l2_budget: cutlass.Constexpr[int]) -> Int64:
    """Heads of a section, as ``fa4.schedule.order.section_size``: ``groups`` of ``group`` heads, each with operands of so many bytes."""
    fitting = cutlass.max(Int64(1), Int64(l2_budget) // cutlass.max(operand_bytes, Int64(1)))
    sections = cutlass.max(Int64(1), (groups + fitting - 1) // fitting)
    return cutlass.max(Int64(1), (groups + sections - 1) // sections) * group


@cute.jit
def tile_order(
    blocks: Int64, heads: Int64, batch: Int64, section: Int64, order: cutlass.Constexpr[str], wide: cutlass.Constexpr[bool] = False
) -> TileOrder:
    """The order of ``blocks * heads * batch`` tiles; every number at least 1.

    Args:
        blocks: tiles of one head.
        heads: query heads.
        batch: sequences.
        section: heads of a section, see ``Schedule``.
        order: as for ``Schedule``. In row order a section is one head.
        wide: whether tiles are numbered with 64 bits, see ``Schedule.wide``.
    """
    rows = heads * batch
    size = Int64(1) if const_expr(order == "row") else cutlass.min(section, rows)
    full = rows // size
    last = rows - full * size
    if last == 0:
        last = size
    number = Int64 if const_expr(wide) else Int32
    divisor = Int64 if const_expr(wide) else cute.FastDivmodDivisorV2
    return TileOrder(
        tiles=number(rows * blocks),
        blocks=number(blocks),
        heads=divisor(number(heads)),
        section_tiles=divisor(number(size * blocks)),
        section=divisor(number(size)),
        last=divisor(number(last)),
        full_sections=number(full),
        section_size=number(size),
    )


@cute.jit
def tile_at(index: Any, order: TileOrder, falling: cutlass.Constexpr[bool]) -> tuple[Any, Any, Any]:
    """(block, head, batch) of a tile number, 0 to ``order.tiles`` - 1; ``falling`` as in ``Schedule``."""
    section, rest = _divmod(index, order.section_tiles)
    position, member = _divmod(rest, order.section)
    if section >= order.full_sections:
        position, member = _divmod(rest, order.last)
    batch, head = _divmod(section * order.section_size + member, order.heads)
    if const_expr(falling):
        position = order.blocks - 1 - position
    return position, head, batch


def _divmod(value: Any, divisor: Any) -> tuple[Any, Any]:
    if isinstance(divisor, cute.FastDivmodDivisorV2):
        quotient, remainder = divmod(value, divisor)
        return Int32(quotient), Int32(remainder)
    quotient = value // divisor
    return quotient, value - quotient * divisor
