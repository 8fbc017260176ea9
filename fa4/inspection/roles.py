"""Warp roles in a kernel's machine code: which instructions are whose, and what a trip of a role's main loop is made of.

Attention kernels with specialised warps give each role instructions that no other role has: tensor-core products, copies into shared
memory, exponentials, the reciprocal of the sum, copies out. A role's code is what its own entry dominates, and the entry is the highest
block below which no other role's instructions lie. So kernels can be compared that name and arrange things differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fa4.inspection.classes import sass_class
from fa4.inspection.graph import Loop, dominated, natural_loops
from fa4.inspection.histogram import Histogram, count
from fa4.inspection.sass import Function, Instruction

SIGNS = {"load": "UTMALDG", "mma": "UTCHMMA", "softmax": "MUFU.EX2", "correction": "MUFU.RCP", "epilogue": "UTMASTG"}
"""Role of a forward: how the opcodes begin that only it has."""
BACKWARD_SIGNS = {"load": "UTMALDG", "mma": "UTCHMMA", "compute": "MUFU.EX2", "reduce": "UBLKRED", "epilogue": "UTMASTG"}
"""Likewise of a backward, whose reduce warps add to global memory by bulk copies."""

_TRY_WAIT = re.compile(r"(P\d),")
_TARGET = re.compile(r"`\(([^)]+)\)")


@dataclass(frozen=True)
class Trip:
    """A main loop of a role: its instructions, loops that only wait included.

    ``waiting`` of them are executed only where a first attempt at a wait fails.
    """

    start: int
    histogram: Histogram
    waiting: int

    @property
    def instructions(self) -> int:
        """All."""
        return self.histogram.total


@dataclass(frozen=True)
class Role:
    """A role's code: ``instructions`` of ``copies`` copies of it in all, and its main loops, shortest first."""

    name: str
    copies: int
    instructions: int
    trips: tuple[Trip, ...]

    @property
    def outside(self) -> float:
        """Instructions of a copy that are in no main loop: what a query tile costs once."""
        return (self.instructions - sum(trip.instructions for trip in self.trips)) / self.copies


def roles(function: Function, signs_of: dict[str, str] = SIGNS, outermost: bool = False) -> dict[str, Role]:
    """The roles of a kernel with specialised warps, by name; without those that it does not have.

    Main loops are innermost ones; where a CTA has one tile, so that no loop goes over tiles, they may be the ``outermost`` with a sign of a
    role in no loop inside them.
    """
    signs = {i.address: name for i in function.instructions if (name := _sign(i, signs_of))}
    regions: dict[str, list[frozenset[int]]] = {}
    for region in dominated(function):  # those around come first
        names = {signs[address] for address in region if address in signs}
        if len(names) == 1:
            known = regions.setdefault(names.pop(), [])
            if not any(region <= other for other in known):
                known.append(region)
    main = _outermost_loops(function, signs) if outermost else _main_loops(function, signs)
    return {name: _role(name, function, regions[name], main) for name in signs_of if name in regions}


def _sign(instruction: Instruction, signs_of: dict[str, str]) -> str | None:
    return next((name for name, begin in signs_of.items() if instruction.opcode.startswith(begin)), None)


def _main_loops(function: Function, signs: dict[int, str]) -> list[Loop]:
    """Innermost loops that do work: that have a role's sign or tensor memory in them."""
    work = {i.address for i in function.instructions if i.address in signs or sass_class(i.opcode) == "tensor memory"}
    loops = [loop for loop in natural_loops(function) if loop.addresses & work]
    outer = {loop.parent for loop in loops}
    return [loop for loop in loops if loop.start not in outer]


def _outermost_loops(function: Function, signs: dict[int, str]) -> list[Loop]:
    """Loops with a sign that is in no loop inside them, without those inside another of them."""
    loops = natural_loops(function)
    inside = {loop.start: frozenset[int]().union(*(other.addresses for other in loops if other.parent == loop.start)) for loop in loops}
    found = [loop for loop in loops if (loop.addresses - inside[loop.start]) & signs.keys()]
    return [loop for loop in found if not any(loop.addresses < other.addresses for other in found)]


def _role(name: str, function: Function, regions: list[frozenset[int]], main: list[Loop]) -> Role:
    inside = frozenset[int]().union(*regions)
    trips = [_trip(function, loop) for loop in main if loop.start in inside]
    copies = sum(1 for region in regions if any(loop.start in region for loop in main)) or len(regions)
    return Role(name, copies, len(inside), tuple(sorted(trips, key=lambda trip: trip.instructions)))


def _trip(function: Function, loop: Loop) -> Trip:
    inside = [i for i in function.instructions if i.address in loop.addresses]
    return Trip(loop.start, count((i.opcode for i in inside), sass_class), len(_waiting(inside, function)))


def _waiting(inside: list[Instruction], function: Function) -> set[int]:
    """Addresses of code that a failed try_wait branches to, up to the branch back."""
    found: set[int] = set()
    for i, instruction in enumerate(inside):
        predicate = _TRY_WAIT.match(instruction.operands)
        if "TRYWAIT" in instruction.opcode and predicate and not instruction.guard:
            branch = next((b for b in inside[i + 1 :] if b.opcode == "BRA" and b.guard == f"@!{predicate[1]}"), None)
            target = _TARGET.search(branch.operands) if branch else None
            if branch and target and function.labels[target[1]] > branch.address + 16:
                found |= set(_up_to_branch(inside, function.labels[target[1]]))
    return found


def _up_to_branch(inside: Iterable[Instruction], start: int) -> Iterable[int]:
    for instruction in inside:
        if instruction.address >= start:
            yield instruction.address
            if instruction.opcode == "BRA" and not instruction.guard:
                return
