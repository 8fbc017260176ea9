"""Which registers may be read before they are written: found once per kernel, so that only those are watched when it runs."""

from __future__ import annotations

from dataclasses import dataclass

from fa4.vgpu.program import Block, Kernel, Op, Register


@dataclass(frozen=True)
class Watch:
    """``rows`` numbers the registers to watch; ``reads`` says which of them an op (block, position) may read too early.

    ``results`` and ``factors`` are the result and A registers of wgmma instructions, which may not be touched while those are on their way.
    """

    rows: dict[Register, int]
    reads: dict[tuple[int, int], tuple[Register, ...]]
    results: frozenset[Register] = frozenset()
    factors: frozenset[Register] = frozenset()


def watch(kernel: Kernel) -> Watch:
    """Forward data flow: a register counts as written where every path to here wrote it in every lane.

    A guarded write does not count. A plain ``mov`` hands its source's state on instead of reading it: compilers copy values that
    they know nobody will use.
    """
    number: dict[Register, int] = {}
    for block in kernel.blocks:
        for op in _ops(block):
            for register in op.read + op.written:
                number.setdefault(register, len(number))
    everything = (1 << len(number)) - 1
    entry = {block.index: everything for block in kernel.blocks}
    entry[0] = 0
    work = [0]
    visited = set()
    while work:
        index = work.pop()
        visited.add(index)
        state = entry[index]
        for op in _ops(kernel.blocks[index]):
            state = _after(op, state, number)
        for target in kernel.blocks[index].targets:
            if target < len(kernel.blocks) and (entry[target] & state != entry[target] or target not in visited):
                entry[target] &= state
                work.append(target)
    rows: dict[Register, int] = {}
    reads = {}
    for index in sorted(visited):
        state = entry[index]
        for position, op in enumerate(_ops(kernel.blocks[index])):
            early = [r for r in dict.fromkeys(op.read) if not state >> number[r] & 1]
            for register in early:
                rows.setdefault(register, len(rows))
            if early:
                reads[index, position] = tuple(early)
            state = _after(op, state, number)
    multiplies = [op for block in kernel.blocks for op in block.ops if op.name == "wgmma" and "mma_async" in op.mods]
    results = frozenset(r for op in multiplies for r in op.written)
    factors = frozenset(r for op in multiplies for r in op.read if r.bits == 32)
    return Watch(rows, reads, results, factors)


def is_copy(op: Op) -> bool:
    """A mov from one register to another of the same width."""
    return (
        op.name == "mov"
        and all(isinstance(o, Register) for o in op.operands)
        and len({o.bits for o in op.read} | {op.written[0].bits}) == 1
    )


def _ops(block: Block) -> tuple[Op, ...]:
    return block.ops if block.end is None else (*block.ops, block.end)


def _after(op: Op, state: int, number: dict[Register, int]) -> int:
    if op.guard is not None:
        return state
    if is_copy(op):
        bit = 1 << number[op.written[0]]
        return state | bit if state >> number[op.read[0]] & 1 else state & ~bit
    for register in op.written:
        state |= 1 << number[register]
    return state
