"""The function of a basic block, in one of two ways: plain or grouped.

Plain is one instruction after the other; grouped executes those that do the same to different registers as one (``fa4.vgpu.grouping``).
Both compute the same bits and find the same faults: the plain way says what the other must do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fa4.vgpu import isa
from fa4.vgpu.defined import Watch
from fa4.vgpu.emit import NUMPY_TYPES, Compiled, EmitError, Emitter, immediate_bits, view_name
from fa4.vgpu.errors import UnsupportedInstructionError
from fa4.vgpu.grouping import Alone, Calculation, Column, Note, Result, Save, Schedule, Store, Value, as_slice, bank, candidates
from fa4.vgpu.hazards import Sites
from fa4.vgpu.program import Block, Immediate, Kernel, Operand

_TYPES = {**NUMPY_TYPES, "p": np.bool_}
_ONE = {"R32": "u32", "LO": "lo", "HI": "hi", "P": "p"}
"""Views of single rows of the banks of registers."""


@dataclass(frozen=True)
class How:
    """How the blocks of a kernel are generated.

    ``shared_base`` says where shared memory begins, ``clustered`` whether its addresses have the rank of their CTA; with ``sites`` the code
    says which instruction accesses memory, with ``observed`` it tells the observer; ``grouped`` is the faster of the two ways.
    """

    shared_base: int
    clustered: bool
    sites: Sites | None = None
    observed: bool = False
    grouped: bool = True


def compile_block(kernel: Kernel, watch: Watch, place: tuple[int, bool], how: How) -> Compiled:
    """Generate the function of one block; ``place`` is (number of the block, whether all lanes of the gangs are active).

    Raises:
        EmitError: an instruction that is not modelled.
    """
    index, full = place
    block = kernel.blocks[index]
    order = isa.group(block.ops)
    emitter = _GroupEmitter(kernel, watch, None if full else "m", how.shared_base, how.clustered, how.sites, how.observed)
    try:
        grouped = candidates(block) if full and how.grouped else None
        schedule = None if grouped is None else Schedule(emitter, block, order, grouped)
        if schedule is None or not schedule.pays:
            for positions in order:
                _alone(emitter, block, positions)
        else:
            emitter.follow(schedule)
        _end(emitter, block)
    except UnsupportedInstructionError as error:
        raise EmitError(emitter.position, error.message) from error
    return emitter.finish(f"{kernel.name} block {index}")


def _alone(emitter: Emitter, block: Block, positions: list[int]) -> None:
    """Instructions as they are; several are a group of ``isa.group``."""
    watch, index = emitter.watch, block.index
    watched = bool(watch.results) or any(
        (index, p) in watch.reads or not watch.rows.keys().isdisjoint(block.ops[p].written) for p in positions
    )
    if len(positions) == 1 or watched:
        for p in positions:
            emitter.op(block.ops[p], p, index)
    else:
        emitter.position = positions[0]
        emitter.mask = emitter.base_mask
        isa.emit_group(emitter, [block.ops[p] for p in positions])


def _end(emitter: Emitter, block: Block) -> None:
    emitter.mask = emitter.base_mask
    emitter.tell_touched()
    if block.end is not None:
        emitter.position = len(block.ops)
        emitter.begin(block.end)
        emitter.check(block.end, (block.index, len(block.ops)))
        emitter.site(block.end)
        emitter.observe(block.end, len(block.ops), block.index)
        isa.emit_end(emitter, block.end)


@dataclass
class _GroupEmitter(Emitter):
    """Writes the steps of a schedule: operands and results of instructions may be arrays with a row for each of several."""

    kinds: dict[str, str] = field(default_factory=lambda: {"R32": "u32", "LO": "u32", "HI": "u32", "P": "p"})
    """The type of each bank of registers and each result."""
    single: set[str] = field(default_factory=set)
    """Results that have no rows, but one value a lane."""

    def follow(self, schedule: Schedule) -> None:
        """Write all steps."""
        block = schedule.block
        for step in schedule.steps:
            if isinstance(step, Alone):
                _alone(self, block, step.positions)
                continue
            self.position, self.mask = step.position, None
            if isinstance(step, Calculation):
                self._calculate(step)
            elif isinstance(step, Store):
                self._store(step)
            elif isinstance(step, Save):
                self.kinds[step.name] = self.kinds[step.bank]
                self.line(f"{step.name} = {step.bank}[{self._index(step.rows)}].copy()")
            elif isinstance(step, Note):
                self.check_loads(block.ops[step.position])

    def _calculate(self, step: Calculation) -> None:
        operands: list[Any] = []
        for sources in zip(*step.rows, strict=True):
            first = sources[0]
            same = isinstance(first, Immediate) and all(s == first for s in sources)
            operands.append(first if same else Column(sources))
        if len(step.rows) == 1:
            self.single.add(step.name)
        isa.emit(self, replace(step.op, operands=(Result(step.name), *operands)))  # type: ignore[arg-type]  # source, call and assign know them

    # What instructions ask for

    def source(self, o: Operand, type_: str) -> str:
        """As for every instruction, and a row for each of several."""
        if not isinstance(o, Column):
            return super().source(o, type_)
        name = view_name(type_)
        if isinstance(o.sources[0], Immediate):
            bits = [immediate_bits(s.text, type_) for s in o.sources if isinstance(s, Immediate)]
            return self.fixed(np.array(bits, _TYPES[name])[:, None])
        return self._gather([s for s in o.sources if isinstance(s, Value)], name)

    def call(self, ufunc: str, o: Operand, type_: str, *arguments: str) -> None:
        """As for every instruction, and into a new array."""
        if isinstance(o, Result):
            self.assign(o, type_, f"{ufunc}({', '.join(arguments)})")
        else:
            super().call(ufunc, o, type_, *arguments)

    def assign(self, o: Operand, type_: str, value: str) -> None:
        """As for every instruction, and as a new array."""
        if isinstance(o, Result):
            self.kinds[o.name] = view_name(type_)
            self.line(f"{o.name} = {value}")
        else:
            super().assign(o, type_, value)

    # Rows

    def _index(self, rows: Sequence[int]) -> str:
        return as_slice(rows) or self.fixed(np.array(rows))

    def _typed(self, base: str, name: str) -> str:
        return "" if self.kinds[base] == name else f".view(np.{_TYPES[name].__name__})"

    def _row(self, value: Value, name: str) -> str:
        """One value a lane, or one for all."""
        if value.base == "=":
            return self.constant(np.array(value.row, np.uint32).view(_TYPES[name])[()])
        if value.base in _ONE:
            one = _ONE[value.base]
            return f"{name}[{value.row}]" if one == "u32" else f"{one}[{value.row}]{self._typed(value.base, name)}"
        where = "" if value.base in self.single else f"[{value.row}]"
        return f"{value.base}{where}{self._typed(value.base, name)}"

    def _rows(self, base: str, rows: Sequence[int], name: str) -> str:
        """Several values of one base, one a row."""
        if base == "=":
            return self.fixed(np.array(rows, np.uint32).view(_TYPES[name])[:, None])
        return f"{base}[{self._index(rows)}]{self._typed(base, name)}"

    def _gather(self, values: Sequence[Value], name: str) -> str:
        """Values, one a row; or one for all, where all are the same."""
        if all(value == values[0] for value in values):
            return self._row(values[0], name)
        places: dict[str, list[int]] = {}
        for place, value in enumerate(values):
            places.setdefault(value.base, []).append(place)
        if len(places) == 1:
            return self._rows(values[0].base, [value.row for value in values], name)
        result = self.temporary(f"np.empty(({len(values)}, g.n), np.{_TYPES[name].__name__})")
        for base, here in places.items():
            if len(here) == 1 or base in self.single:
                self.line(f"{result}[{self._index(here)}] = {self._row(values[here[0]], name)}")
            else:
                self.line(f"{result}[{self._index(here)}] = {self._rows(base, [values[i].row for i in here], name)}")
        return result

    def _store(self, step: Store) -> None:
        moves: dict[tuple[str, str], list[tuple[int, Value]]] = {}
        for key, value in step.pairs:
            moves.setdefault((bank(key), value.base), []).append((key[1], value))
        for (to, base), pairs in moves.items():
            name = self.kinds[to]
            pairs.sort()
            if len(pairs) == 1 or base in self.single:
                for row, value in pairs:
                    self.line(f"copyto({_ONE[to]}[{row}], {self._row(value, name)})")
                continue
            for some in _stretches(pairs):
                rows = [row for row, _ in some]
                self.line(f"{to}[{self._index(rows)}] = {self._rows(base, [value.row for _, value in some], name)}")


def _stretches(pairs: list[tuple[int, Value]]) -> list[list[tuple[int, Value]]]:
    """Cut where either side stops following a slice; all as one where that gives many pieces."""
    found: list[list[tuple[int, Value]]] = []
    for pair in pairs:
        if found:
            rows = [row for row, _ in found[-1]] + [pair[0]]
            indices = [value.row for _, value in found[-1]] + [pair[1].row]
            if as_slice(rows[-3:]) and as_slice(indices[-3:]):
                found[-1].append(pair)
                continue
        found.append([pair])
    return found if len(found) <= 4 else [pairs]
