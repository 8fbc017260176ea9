"""Which instructions of the machine code a warp executed, from the events of its PTX: no meaning of SASS is needed.

Instructions that synchronise are anchors. They come in the same order in both, so the events of a warp are a string that the control flow
of the machine code, taken as an automaton, must accept; of the paths that do the shortest is taken. An anchor with a guard may be passed
by, others may not. Where PTX and SASS have equally many anchors of a kind they are taken to be in the same order of the text, which tells
loops apart that differ in nothing else (with and without a mask).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fa4.perfmodel.machine_code import MachineCode
from fa4.perfmodel.trace import Event
from fa4.vgpu.program import Kernel

_ANCHORS = {
    "SYNCS.PHASECHK": "wait",
    "SYNCS.ARRIVE": "arrive",
    "SYNCS.EXCH": "init",
    "BAR": "bar",
    "UCGABAR_ARV": "cluster_arrive",
    "UCGABAR_WAIT": "cluster_wait",
    "UTCBAR": "commit",
    "LDTM": "tld",
    "STTM": "tst",
    "UTMALDG": "load",
    "UBLKCP.S.S": "copy",
    "UBLKCP": "load",
    "UGETNEXTWORKID": "ask",
    "UTMASTG": "store",
    "UTMAREDG": "store",
    "UBLKRED": "store",
    "UTMACMDFLUSH": "bulk_commit",
    "DEPBAR": "bulk_wait",
    "LDGSTS": "cp",
    "LDGDEPBAR": "cp_commit",
    "WARPGROUP.DEPBAR": "wg_wait",
    "STAS": "copy",
    "REDAS": "copy",
}
_MATRIX = {"UTC": "mma", "HGMMA": "wgmma", "QGMMA": "wgmma", "IGMMA": "wgmma"}

KINDS = {"test": "wait", "expect": "arrive", "cp_wait": "bulk_wait"}
"""Events that look like others in SASS."""

STAYS = {"bulk_wait": 30, "wg_wait": 30, "cp_commit": 5, "wg_commit": 0, "bulk_commit": 30, "cp_arrive": 0, "copy": 30}
"""Events that may have no instruction of their own, and what that costs in the search, in instructions."""

MISPLACED = 150
"""What an anchor costs that the order of the text does not suggest, in instructions."""


def anchor(opcode: str) -> str:
    """The kind of anchor that an instruction is; empty where it is none."""
    base, *rest = opcode.split(".")
    if base.startswith("UTC") and base.endswith("MMA"):
        return "mma"
    if base in _MATRIX:
        return _MATRIX[base]
    if base == "BAR" and rest and rest[0] not in ("SYNC", "ARV", "RED"):
        return ""
    return next((_ANCHORS[name] for n in (3, 2, 1) if (name := ".".join([base, *rest][:n])) in _ANCHORS), "")


def kind_of(event: Event) -> str:
    """The kind of anchor that an event is; empty where it is none."""
    kind = KINDS.get(event.kind, event.kind)
    return kind if kind in _KNOWN else ""


_KNOWN = frozenset(_ANCHORS.values()) | frozenset(_MATRIX.values()) | frozenset(STAYS)


@dataclass(frozen=True)
class Path:
    """Positions executed, in order.

    ``at`` has for each event that is an anchor an index into ``positions``, and whether that is its instruction; where not, it happens
    after that one (-1: before the first).
    """

    positions: tuple[int, ...]
    at: tuple[tuple[int, bool], ...]


class AlignmentError(Exception):
    """The events of a warp do not fit the machine code."""


@dataclass
class Aligner:
    """Aligns the warps of one kernel. ``preferred`` maps an instruction of the PTX to a position."""

    code: MachineCode
    kernel: Kernel
    kinds: list[str] = field(init=False)
    preferred: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Find the anchors."""
        self.kinds = [anchor(i.opcode) for i in self.code.instructions]
        self._reach: dict[int, dict[int, tuple[int, ...]]] = {}
        self.preferred = {}

    def prefer(self, executed: dict[str, list[int]]) -> None:
        """Pair the instructions of the PTX, by kind in the order of the text, with anchors where there are as many."""
        for kind, ops in executed.items():
            positions = [i for i, k in enumerate(self.kinds) if k == kind]
            if len(positions) == len(ops) or (kind == "wait" and len(positions) > len(ops)):  # waits have a slow path at the end
                self.preferred.update(zip(ops, positions, strict=False))

    def align(self, events: Sequence[Event]) -> Path:
        """The path of a warp; ``events`` are those that are anchors.

        Raises:
            AlignmentError: there is none.
        """
        states: dict[int, tuple[float, int, bool]] = {-1: (0.0, -1, False)}  # position -> (cost, position before, moved)
        history = [states]
        for number, event in enumerate(events):
            kind = kind_of(event)
            new: dict[int, tuple[float, int, bool]] = {}
            wanted = self.preferred.get(event.op)
            for position, (cost, _, _) in states.items():
                for target, path in self._from(position).items():
                    if self.kinds[target] != kind:
                        continue
                    total = cost + len(path) + (MISPLACED if wanted is not None and target != wanted else 0)
                    if target not in new or total < new[target][0]:
                        new[target] = total, position, True
                if kind in STAYS:
                    total = cost + STAYS[kind]
                    if position not in new or total < new[position][0]:
                        new[position] = total, position, False
            if not new:
                raise AlignmentError(f"event {number} of {len(events)}, {event.kind} at PTX {self.kernel.ops[event.op].opcode}")
            history.append(new)
            states = new
        return self._path(history, min(states, key=lambda p: states[p][0]))

    def _path(self, history: list[dict[int, tuple[float, int, bool]]], last: int) -> Path:
        chosen: list[tuple[int, bool]] = []
        position = last
        for states in history[:0:-1]:
            _, before, moved = states[position]
            chosen.append((position, moved))
            position = before
        positions: list[int] = []
        at: list[tuple[int, bool]] = []
        here = -1
        for position, moved in reversed(chosen):
            if moved:
                positions += self._from(here)[position]
                here = position
            at.append((len(positions) - 1, moved))
        return Path((*positions, *self._end(here)), tuple(at))

    def _from(self, position: int) -> dict[int, tuple[int, ...]]:
        """Anchors that can be reached from a position (-1: the entry) without passing another, with the instructions on the way."""
        found = self._reach.get(position)
        if found is None:
            found = self._reach[position] = {}
            for target, path in self._search(position):
                if self.kinds[target] and target not in found:
                    found[target] = path
        return found

    def _end(self, position: int) -> tuple[int, ...]:
        """The way from the last anchor to an exit, if there is one without other anchors."""
        for target, path in self._search(position):
            if self.code.instructions[target].opcode.startswith("EXIT") and not self.code.instructions[target].guard:
                return path
        return ()

    def _search(self, position: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Breadth first: (position, path to it without the start)."""
        before: dict[int, int] = {}
        first = [0] if position < 0 else self._next(position)
        queue = deque(first)
        for start in first:
            before[start] = position
        while queue:
            here = queue.popleft()
            if self.kinds[here] or self.code.instructions[here].opcode.startswith("EXIT"):
                path = [here]
                while (back := before[path[-1]]) != position or (back == position and path[-1] not in first):
                    path.append(back)
                yield here, tuple(reversed(path))
            if self.kinds[here] and not self._skippable(here):
                continue
            for after in self._next(here):
                if after not in before:
                    before[after] = here
                    queue.append(after)

    def _skippable(self, position: int) -> bool:
        return bool(self.code.instructions[position].guard) or self.kinds[position] in STAYS

    def _next(self, position: int) -> list[int]:
        targets, falls = self.code.moves[position]
        following = [position + 1] if falls and position + 1 < len(self.kinds) else []
        return [*following, *(t for t in targets if t not in following)]
