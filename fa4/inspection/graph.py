"""Control flow of a SASS function, and its natural loops (Aho, Lam, Sethi, Ullman, Compilers, 9.6: back edges and dominators).

What is approximated: a call is taken to return, and its target to be reachable, so that a subroutine belongs to no loop of its
callers, while the jumps out of a loop that ptxas writes as ``CALL.REL.NOINC`` are followed. A return, and an indirect branch whose
targets nvdisasm does not list, lead nowhere. A cycle with two entries (irreducible) is no natural loop.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass

from fa4.inspection.sass import Function, Instruction

_TARGET = re.compile(r"`\(([^)]+)\)")
_INDIRECT_TARGETS = re.compile(r"BRANCH_TARGETS\s+([^\"]*)")
# These only name an address for later: BSYNC, which stands right before it, goes on there.
_NO_TRANSFER = ("BSSY", "LEPC", "BMOV")
_NEVER_FALLS_THROUGH = ("EXIT", "RET", "KILL", "BRX", "BRXU", "JMX", "JMXU")


@dataclass(frozen=True)
class Loop:
    """A natural loop: it is entered at ``start`` only, and ``end`` is its last instruction; both byte addresses.

    ``depth`` is 1 for an outermost loop; ``parent`` is the start of the loop around it. ``addresses`` are its instructions, those of
    the loops inside it included.
    """

    start: int
    end: int
    depth: int
    parent: int | None
    addresses: frozenset[int]


def transfers(function: Function) -> tuple[tuple[tuple[int, ...], bool], ...]:
    """For each instruction the positions that it may jump to, and whether the next one may follow."""
    positions = {instruction.address: i for i, instruction in enumerate(function.instructions)}
    return tuple(
        (tuple(positions[target] for target in _targets(instruction, function.labels)), _falls_through(instruction))
        for instruction in function.instructions
    )


def natural_loops(function: Function) -> tuple[Loop, ...]:
    """Every natural loop that can be reached, by start address, those of one start merged."""
    if not function.instructions:
        return ()
    blocks, successors = _blocks(function)
    order = _reverse_postorder(successors)
    dominators = _dominators(order, successors)
    bodies: dict[int, set[int]] = {}
    for block in order:
        for header in successors[block]:
            if header in dominators[block]:
                bodies.setdefault(header, {header}).update(_body(header, block, order, successors))
    return tuple(_loop(header, bodies, blocks) for header in sorted(bodies))


def dominated(function: Function) -> list[frozenset[int]]:
    """For each block that can be reached: the addresses of all blocks that are reached only through it, its own included; largest first."""
    if not function.instructions:
        return []
    blocks, successors = _blocks(function)
    order = _reverse_postorder(successors)
    below: dict[int, set[int]] = {block: set() for block in order}
    for block, around in _dominators(order, successors).items():
        for dominator in around:
            below[dominator].update(blocks[block])
    return sorted((frozenset(addresses) for addresses in below.values()), key=len, reverse=True)


def _blocks(function: Function) -> tuple[list[list[int]], list[list[int]]]:
    """Basic blocks, as lists of addresses, and the blocks that may follow each."""
    instructions = function.instructions
    moves = transfers(function)
    starts = {0}
    for i, (targets, falls) in enumerate(moves):
        if targets or not falls:
            starts.update(targets)
            starts.add(i + 1)
    ordered = sorted(start for start in starts if start < len(instructions))
    blocks: list[list[int]] = []
    successors: list[list[int]] = []
    for start, end in zip(ordered, [*ordered[1:], len(instructions)], strict=True):
        targets, falls = moves[end - 1]
        following = {bisect_right(ordered, target) - 1 for target in targets}
        if falls and end < len(instructions):
            following.add(len(blocks) + 1)
        blocks.append([instruction.address for instruction in instructions[start:end]])
        successors.append(sorted(following))
    return blocks, successors


def _targets(instruction: Instruction, labels: dict[str, int]) -> list[int]:
    """Where an instruction may go besides the next one, within the function."""
    if instruction.opcode.partition(".")[0] in _NO_TRANSFER:
        return []
    names = _TARGET.findall(instruction.operands)
    if listed := _INDIRECT_TARGETS.search(instruction.note):
        names += [name.strip() for name in listed[1].split(",")]
    return [labels[name] for name in names if name in labels]


def _falls_through(instruction: Instruction) -> bool:
    """Whether the next instruction may follow: not after a transfer without a condition, be it a guard or an operand."""
    base = instruction.opcode.partition(".")[0]
    if base in ("BRA", "JMP"):
        return bool(instruction.guard) or "," in instruction.operands
    return bool(instruction.guard) or base not in _NEVER_FALLS_THROUGH


def _reverse_postorder(successors: list[list[int]]) -> list[int]:
    """The blocks that the entry reaches, each before its successors except along back edges."""
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(successors[0]))]
    while stack:
        block, following = stack[-1]
        for successor in following:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(successors[successor])))
                break
        else:
            order.append(block)
            stack.pop()
    return order[::-1]


def _dominators(order: list[int], successors: list[list[int]]) -> dict[int, set[int]]:
    """The blocks through which every path from the entry to a block leads, itself included."""
    predecessors = _predecessors(order, successors)
    everything = set(order)
    dominators = {block: set(everything) for block in order}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            new = {block} | set.intersection(*(dominators[p] for p in predecessors[block]))
            if new != dominators[block]:
                dominators[block], changed = new, True
    return dominators


def _predecessors(order: list[int], successors: list[list[int]]) -> dict[int, list[int]]:
    predecessors: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for successor in successors[block]:
            predecessors[successor].append(block)
    return predecessors


def _body(header: int, source: int, order: list[int], successors: list[list[int]]) -> set[int]:
    """The blocks that reach ``source`` without passing ``header``."""
    predecessors = _predecessors(order, successors)
    body = {header, source}
    waiting = [source] if source != header else []
    while waiting:
        for block in predecessors[waiting.pop()]:
            if block not in body:
                body.add(block)
                waiting.append(block)
    return body


def _loop(header: int, bodies: dict[int, set[int]], blocks: list[list[int]]) -> Loop:
    around = [other for other, body in bodies.items() if other != header and header in body and bodies[header] < body]
    parent = min(around, key=lambda other: len(bodies[other]), default=None)
    addresses = frozenset(address for block in bodies[header] for address in blocks[block])
    return Loop(blocks[header][0], max(addresses), 1 + len(around), None if parent is None else blocks[parent][0], addresses)
