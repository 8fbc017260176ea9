"""Registers that are never needed at the same time share a row, so that the rows in use fit the host's caches.

Compilers number registers without end (a Blackwell forward kernel has 7000), but only some hundreds are alive at any place. Registers keep
their names and identities; only ``Register.index``, the row, changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from fa4.vgpu.program import Address, Block, Inverse, Kernel, Op, Operand, Register, Tuple

_LONG = 1 << 62


def share_rows(kernel: Kernel) -> Kernel:
    """The kernel with rows shared; registers listed together, as the results of a vector load, stay side by side where they can.

    A register keeps its row from the first place where it is written or alive to the last, in the order of the text. That holds lane by
    lane, wherever other lanes are. Registers of asynchronous multiplications keep theirs throughout.
    """
    spans, live = _spans(kernel)
    rows: dict[Register, int] = {}
    until: dict[int, Any] = {bits: np.full(max(count, 1), -1, np.int64) for bits, count in kernel.registers.items()}
    for position, op in enumerate(_ops(kernel)):
        for registers in _lists(op):
            new = [r for r in dict.fromkeys(registers) if r not in rows]
            if len(new) == len(registers) and all(spans[r][0] == position for r in new):
                _place(new, spans, until, rows)
            else:
                for r in new:
                    _place([r], spans, until, rows)
    named: dict[Register, Register] = {r: r._replace(index=row) for r, row in rows.items()}
    used = {bits: 1 + max((row for r, row in rows.items() if r.bits == bits), default=-1) for bits in kernel.registers}
    blocks = tuple(
        replace(
            b,
            ops=tuple(_renamed(op, named) for op in b.ops),
            end=None if b.end is None else _renamed(b.end, named),
            live=frozenset((r.bits, rows[r]) for r in alive),
        )
        for b, alive in zip(kernel.blocks, live, strict=True)
    )
    return replace(kernel, blocks=blocks, registers=used)


def _ops(kernel: Kernel) -> Iterator[Op]:
    for block in kernel.blocks:
        yield from block.ops if block.end is None else (*block.ops, block.end)


def _lists(op: Op) -> Iterator[list[Register]]:
    """Every register of an instruction, those of a vector together."""
    for operand in op.operands:
        if isinstance(operand, Tuple) and len(operand.items) > 1 and all(isinstance(o, Register) for o in operand.items):
            vector = [o for o in operand.items if isinstance(o, Register)]
            if len({r.bits for r in vector}) == 1:
                yield vector
    for r in op.read + op.written:
        yield [r]


def _place(registers: list[Register], spans: dict[Register, tuple[int, int]], until: dict[int, Any], rows: dict[Register, int]) -> None:
    """The first free rows that follow each other."""
    start = min(spans[r][0] for r in registers)
    taken = until[registers[0].bits]
    free = taken < start
    count = len(registers)
    if count == 1:
        first = int(free.argmax())
    else:
        sums = np.concatenate([[0], np.cumsum(free)])
        runs = sums[count:] - sums[:-count] == count
        if not runs.any():
            for r in registers:
                _place([r], spans, until, rows)
            return
        first = int(runs.argmax())
    for i, r in enumerate(registers):
        rows[r] = first + i
        taken[first + i] = spans[r][1]


def _spans(kernel: Kernel) -> tuple[dict[Register, tuple[int, int]], list[list[Register]]]:
    """First and last position of each register at which it is used or alive, and what is alive behind each block."""
    number: dict[Register, int] = {}
    for op in _ops(kernel):
        for r in op.read + op.written:
            number.setdefault(r, len(number))
    uses, kills = zip(*(_effects(b, number) for b in kernel.blocks), strict=True)
    alive = list(uses)  # at the beginning of each block
    changed = True
    while changed:
        changed = False
        for block in reversed(kernel.blocks):
            after = _after(block, alive)
            before = uses[block.index] | (after & ~kills[block.index])
            changed |= before != alive[block.index]
            alive[block.index] = before
    registers = list(number)
    first: dict[Register, int] = {}
    last: dict[Register, int] = {}

    def reach(position: int, reached: Iterable[Register]) -> None:  # positions come in order
        for r in reached:
            first.setdefault(r, position)
            last[r] = position

    position = 0
    live = []
    for block in kernel.blocks:
        reach(position, (registers[i] for i in _bits(alive[block.index])))
        for op in block.all:
            reach(position, op.read + op.written)
            position += 1
        live.append([registers[i] for i in _bits(_after(block, alive))])
        if block.all:  # behind an empty one as much is alive as before it
            reach(position - 1, live[-1])
    throughout = {r for op in _ops(kernel) if op.name == "wgmma" for r in op.read + op.written if r.bits == 32}
    return {r: (0, _LONG) if r in throughout else (first[r], last[r]) for r in registers}, live


def _after(block: Block, alive: list[int]) -> int:
    after = 0
    for target in block.targets:
        if target < len(alive):
            after |= alive[target]
    return after


def _effects(block: Block, number: dict[Register, int]) -> tuple[int, int]:
    """Registers that a block reads before it writes them, and those that it writes in every lane."""
    use = kill = 0
    for op in reversed(block.ops if block.end is None else (*block.ops, block.end)):
        if op.guard is None:
            for r in op.written:
                use &= ~(1 << number[r])
                kill |= 1 << number[r]
        for r in op.read:
            use |= 1 << number[r]
    return use, kill


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _renamed(op: Op, named: dict[Register, Register]) -> Op:
    guard = op.guard and (named[op.guard[0]], op.guard[1])
    operands = tuple([named[o] if isinstance(o, Register) else _operand(o, named) for o in op.operands])
    return Op(op.name, op.mods, operands, guard, op.line, op.text, op.source)


def _operand(o: Operand, named: dict[Register, Register]) -> Any:
    if isinstance(o, Register):
        return named[o]
    if isinstance(o, Tuple):
        return Tuple(tuple(_operand(item, named) for item in o.items))
    if isinstance(o, Inverse):
        return Inverse(named[o.register])
    if isinstance(o, Address):
        return Address(_operand(o.base, named), o.offset, tuple(_operand(item, named) for item in o.extra))
    return o
