"""Instructions of a block that do the same to different registers, executed as one.

A call of numpy costs little more on many rows of registers than on one, and kernels are unrolled: a step of softmax has hundreds of
instructions of a dozen kinds.

Only instructions that compute each lane from the same lane take part, 32 bits wide, without guards and on registers that nobody watches.
They cannot fail, so they may be executed in any order that hands on their values; all others stay in the order of the text. Within
the block a register is a name for a value. Moves give another name to a value and are not executed; two float32 in 64 bits are two values.
What the rows of registers must hold is written to them before an instruction that is executed by itself reads them, and at the end of the
block, unless nobody reads it any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa4.vgpu.isa.registry import lanewise
from fa4.vgpu.program import Block, Immediate, Op, Operand, Register, Sink, Tuple

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]

_MOST = 128
"""Instructions that are executed as one, at most: what they compute should fit the host's caches."""

_WORTH = 8
"""Instructions of a block that could take part, below which it is not tried."""

Key = tuple[int, int, int]
"""What holds a value: (bits of a register, its row, and which half of 64 bits)."""


class Value(NamedTuple):
    """``row`` of ``base``: a bank of registers, the result of a calculation, or "=" for a constant, whose bits ``row`` has.

    It is there from step ``since`` on, for good or until its row is overwritten.
    """

    base: str
    row: int
    since: int


Source = Value | Immediate


def bank(key: Key) -> str:
    """The bank of registers that a key is a row of: of 32 bits, the halves of 64 bits, or predicates."""
    return _BANKS[key[0], key[2]]


_BANKS = {(32, 0): "R32", (64, 0): "LO", (64, 1): "HI", (1, 0): "P"}


@dataclass(frozen=True)
class Column:
    """An operand of instructions that are executed as one: a value or a literal for each."""

    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Result:
    """Their results, as an array of the generated code."""

    name: str


@dataclass
class Calculation:
    """Instructions like ``op`` that are executed as one, with the sources of each."""

    op: Op
    position: int
    name: str
    rows: list[tuple[Source, ...]] = field(default_factory=list)


@dataclass
class Store:
    """Values are written to rows of registers."""

    position: int
    pairs: list[tuple[Key, Value]]


@dataclass
class Save:
    """Rows of a bank are copied, before they are overwritten, for those who still need what they hold."""

    position: int
    name: str
    bank: str
    rows: list[int]


@dataclass
class Alone:
    """Instructions at these positions of the block are executed as they are."""

    positions: list[int]


@dataclass
class Note:
    """The instruction at this position is executed elsewhere, but reads or writes registers that tcgen05.ld brings."""

    position: int


Step = Calculation | Store | Save | Alone | Note


def keys(registers: Iterable[Register]) -> Iterator[Key]:
    """What holds the values of registers; those of 8 and 16 bits never take part."""
    for r in registers:
        if r.bits in (1, 32, 64):
            yield r.bits, r.index, 0
        if r.bits == 64:
            yield r.bits, r.index, 1


def takes_part(op: Op) -> bool:
    """Whether an instruction may be executed together with others like it, as far as it alone tells."""
    if op.guard is not None or not lanewise(op.name, op.mods):
        return False
    wide = op.mods[-1] == "f32x2"
    if op.name == "mov":
        return _move(op) is not None
    if not op.operands or not isinstance(op.operands[0], Register):
        return False
    bits = (64,) if wide else (1, 32)
    return all(o.bits in bits if isinstance(o, Register) else isinstance(o, Immediate) and not wide for o in op.operands)


def _halves(o: Operand) -> tuple[Key | Immediate | None, ...] | None:
    """The parts of 32 bits, or the predicate, that an operand of a move is; None for one that nobody wants."""
    if isinstance(o, Register):
        return tuple(keys([o])) if o.bits in (1, 32, 64) else None
    if isinstance(o, Immediate):
        return (o,)
    if isinstance(o, Tuple) and len(o.items) == 2:
        parts: list[Key | Immediate | None] = []
        for item in o.items:
            if isinstance(item, Sink):
                parts.append(None)
            elif isinstance(item, Register) and item.bits == 32:
                parts += keys([item])
            else:
                return None
        return tuple(parts)
    return None


def _move(op: Op) -> list[tuple[Key | None, Key | Immediate]] | None:
    """What a mov moves where, None where it has another form."""
    to, of = (_halves(o) for o in op.operands)
    if to is None or of is None or len(to) != len(of) or any(isinstance(t, Immediate) for t in to) or any(s is None for s in of):
        return None
    pairs = [(t, s) for t, s in zip(to, of, strict=True) if not isinstance(t, Immediate) and s is not None]
    if any(t is not None and isinstance(s, tuple) and (t[0] == 1) != (s[0] == 1) for t, s in pairs):
        return None
    return None if any(isinstance(s, Immediate) and t is not None and t[0] != 32 for t, s in pairs) else pairs


def candidates(block: Block) -> list[bool] | None:
    """Which of its instructions may take part; None where they are too few to try."""
    found = [takes_part(op) for op in block.ops]
    return found if sum(found) >= _WORTH else None


class Schedule:
    """The steps in which a block is executed."""

    def __init__(self, e: Emitter, block: Block, order: Sequence[list[int]], candidates: Sequence[bool]) -> None:
        self.e, self.block, self.candidates = e, block, candidates
        self.steps: list[Step] = []
        self.values: dict[Key, Value] = {}
        self.dirty: set[Key] = set()  # their rows hold something else
        self.names: dict[tuple[str, int], set[Key]] = {}  # registers whose value lies in the row of another
        self.known: dict[Any, Value] = {}
        self.groups: dict[Any, list[int]] = {}  # steps
        self.part = self.calculations = 0
        self.watched = e.watch.rows.keys() | e.watch.results | e.watch.factors
        ops = block.ops
        last = self._last_uses(order)
        for positions, dead in zip(order, last, strict=True):
            position = positions[0]
            if len(positions) == 1 and self._takes_part(position):
                self.part += 1
                if e.sites is not None and not e.sites.loads.isdisjoint(ops[position].read + ops[position].written):
                    self.steps.append(Note(position))
                self._calculate(ops[position], position)
            else:
                self._alone(positions)
            for key in dead:
                self._forget(key)
        self._store(sorted(self._needed()), len(ops))

    @property
    def pays(self) -> bool:
        """Whether it is faster than one instruction after the other."""
        return self.calculations <= 0.6 * self.part

    def _takes_part(self, position: int) -> bool:
        e, op, where = self.e, self.block.ops[position], (self.block.index, position)
        if where in e.watch.reads or not self.candidates[position]:
            return False
        return not self.watched or self.watched.isdisjoint(op.read + op.written)

    def _last_uses(self, order: Sequence[list[int]]) -> list[set[Key]]:
        """Of each entry of the order what nobody reads behind it, among what it reads or writes."""
        alive = self._needed()
        found = []
        for positions in reversed(order):
            ops = [self.block.ops[p] for p in positions]
            reads = {key for op in ops for key in keys(op.read)}
            writes = {key for op in ops for key in keys(op.written)}
            found.append((reads | writes) - alive)
            alive -= {key for op in ops if op.guard is None for key in keys(op.written)}
            alive |= reads
        return found[::-1]

    def _needed(self) -> set[Key]:
        """What is still needed behind the last instruction but the end of the block: by that, or behind the block."""
        block = self.block
        if block.live is None:
            needed = {key for op in block.all for key in keys(op.read + op.written)}
        else:
            needed = {(bits, row, half) for bits, row in block.live for half in range(1 + (bits == 64))}
        if block.end is not None:
            if block.end.guard is None:
                needed -= set(keys(block.end.written))
            needed |= set(keys(block.end.read))
        return needed

    # Values

    def _own(self, key: Key, since: int = -1) -> Value:
        return Value(bank(key), key[1], since)

    def _value(self, key: Key) -> Value:
        return self.values.get(key) or self._own(key)

    def _set(self, key: Key, value: Value) -> None:
        self._forget(key)
        self.values[key] = value
        if value[:2] != self._own(key)[:2]:
            self.dirty.add(key)
            if value.base in _BANKS.values():
                self.names.setdefault(value[:2], set()).add(key)

    def _forget(self, key: Key) -> None:
        old = self.values.pop(key, None)
        self.dirty.discard(key)
        if old is not None and old[:2] in self.names:
            self.names[old[:2]].discard(key)

    # Steps

    def _calculate(self, op: Op, position: int) -> None:
        if op.name == "mov":
            pairs = _move(op)
            assert pairs is not None
            moved = [(t, self._constant(s, op) if isinstance(s, Immediate) else self._value(s)) for t, s in pairs]
            for to, value in moved:
                if to is not None:
                    self._set(to, value)
            return
        target = op.operands[0]
        assert isinstance(target, Register)
        if target.bits == 64:
            half = replace(op, mods=(*op.mods[:-1], "f32"))
            results = []
            for i in range(2):
                parts = [self._value((64, o.index, i)) for o in op.operands[1:] if isinstance(o, Register)]
                results.append(self._result(half, position, tuple(parts)))
            for key, value in zip(keys([target]), results, strict=True):
                self._set(key, value)
            return
        sources = tuple(self._value((o.bits, o.index, 0)) if isinstance(o, Register) else o for o in op.operands[1:])
        self._set((target.bits, target.index, 0), self._result(op, position, sources))  # type: ignore[arg-type]  # others are literals, see takes_part

    def _constant(self, o: Immediate, op: Op) -> Value:
        from fa4.vgpu.emit import immediate_bits

        return Value("=", int(np.asarray(immediate_bits(o.text, op.mods[-1])).view(np.uint32)), -1)

    def _result(self, op: Op, position: int, sources: tuple[Source, ...]) -> Value:
        what = op.name, op.mods, sources
        if what in self.known:
            return self.known[what]
        earliest = 1 + max((s.since for s in sources if isinstance(s, Value)), default=-1)
        steps = self.groups.setdefault((op.name, op.mods, tuple(isinstance(s, Value) for s in sources)), [])
        for number in steps:
            group = self.steps[number]
            assert isinstance(group, Calculation)
            if number >= earliest and len(group.rows) < _MOST:
                break
        else:
            number = len(self.steps)
            group = Calculation(op, position, f"g{number}")
            self.steps.append(group)
            steps.append(number)
            self.calculations += 1
        group.rows.append(sources)
        self.known[what] = Value(group.name, len(group.rows) - 1, number)
        return self.known[what]

    def _alone(self, positions: list[int]) -> None:
        ops = [self.block.ops[p] for p in positions]
        self._store([key for op in ops for key in keys(op.read + (op.written if op.guard else ()))], positions[0])
        written = list(keys(r for op in ops for r in op.written))
        for key in written:
            self._forget(key)
        self._save(written, positions[0])
        self.steps.append(Alone(positions))
        for key in written:
            self._set(key, self._own(key, len(self.steps) - 1))

    def _store(self, wanted: Iterable[Key], position: int) -> None:
        """Rows of registers get their values, where they hold something else."""
        todo = [key for key in dict.fromkeys(wanted) if key in self.dirty]
        if not todo:
            return
        self._save(todo, position)
        self.steps.append(Store(position, [(key, self.values[key]) for key in todo]))
        for key in todo:
            self.dirty.discard(key)
            if self.values[key].base in _BANKS.values():
                self._set(key, self._own(key, len(self.steps) - 1))

    def _save(self, overwritten: Iterable[Key], position: int) -> None:
        """Copy what these rows hold for other registers that still need it."""
        lost: dict[str, list[tuple[int, set[Key]]]] = {}
        for key in overwritten:
            bank, row, _ = self._own(key)
            names = self.names.pop((bank, row), None)
            if names:
                lost.setdefault(bank, []).append((row, names))
        for bank, rows in lost.items():
            number = len(self.steps)
            self.steps.append(Save(position, f"g{number}", bank, [row for row, _ in rows]))
            for i, (_, names) in enumerate(rows):
                for key in names:
                    self._set(key, Value(f"g{number}", i, number))


def as_slice(numbers: Sequence[int]) -> str | None:
    """A slice with these numbers, as text; None where there is none."""
    if len(numbers) == 1:
        return f"{numbers[0]}:{numbers[0] + 1}"
    step = numbers[1] - numbers[0]
    if step == 0 or any(b - a != step for a, b in pairwise(numbers)):
        return None
    stop = numbers[-1] + (1 if step > 0 else -1)
    return f"{numbers[0]}:{stop if stop >= 0 else ''}" + ("" if step == 1 else f":{step}")
