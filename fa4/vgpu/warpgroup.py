"""Multiplications of warpgroups on their way (PTX ISA 9.7.15): issued by wgmma.mma_async, executed when their group is waited for.

A multiplication reads shared memory and registers as late as it may. From its issue to its completion nobody may touch its result
registers, nor write its A registers; the generated code asks ``check`` before it does. Warp w of the four of a warpgroup owns rows 16 w to
16 w + 15 of the 64, so each warp carries out its own part.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu import descriptor, tensor_core, tensor_hazards
from fa4.vgpu.descriptor import Operand
from fa4.vgpu.errors import DivergenceError, PendingMultiplyError, TensorFenceError
from fa4.vgpu.memory import FaultError

if TYPE_CHECKING:
    from fa4.vgpu.state import Cta, Gang

Array = npt.NDArray[Any]
WARPS = 4
"""Warps of a warpgroup."""
_WRITTEN, _READ = 1, 2


@dataclass(frozen=True)
class WgmmaForm:
    """What one wgmma instruction says: N, types, which operands are transposed (MN-major), negated, and whether int32 is clamped."""

    n: int
    accumulator: str
    a: str
    b: str
    transposed: tuple[bool, bool] = (False, False)
    negated: tuple[bool, bool] = (False, False)
    clamp: bool = False

    @property
    def k(self) -> int:
        """K: 32 bytes of an operand's row."""
        return 32 // tensor_core.ITEMSIZE[self.a]


@dataclass(eq=False)
class _Multiply:
    """One instruction as a gang issued it: rows of result registers and of A registers (or descriptors of A), one entry a warp else."""

    form: WgmmaForm
    first: int
    result: Array
    factor: Array | None
    a: Array
    b: Array
    accumulate: Array
    issue: tuple[Array, int] | None = None  # clocks of the warps and the instruction, see ``fa4.vgpu.hazards``

    @property
    def descriptors(self) -> tuple[Array | None, Array]:
        """Those of A, where it has them, and of B."""
        return (self.a if self.factor is None else None), self.b


class Multiplications:
    """All that are on their way in a CTA."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        warps, rows = cta.warp_count, len(cta.rows[32])
        self.busy = 0
        self.open: list[list[_Multiply]] = [[] for _ in range(warps)]
        self.groups: list[deque[list[_Multiply]]] = [deque() for _ in range(warps)]
        self.results = np.zeros((rows, warps), np.uint16)
        self.factors = np.zeros((rows, warps), np.uint16)
        self.touched = np.zeros((rows, warps), np.uint8)
        self.fenced = np.zeros(warps, bool)
        self.issued = [0] * warps
        self.expected: list[deque[tuple[Any, ...]]] = [deque() for _ in range(-(-warps // WARPS))]
        self.passed = [0] * -(-warps // WARPS)

    def issue(self, gang: Gang, form: WgmmaForm, registers: tuple[Array, Array | None], values: tuple[Array, Array, Array]) -> None:
        """wgmma.mma_async by all warps of a gang: (result, A) rows; descriptors of A (unused where A is in registers) and B, scale-d."""
        result, factor = registers
        a, b, accumulate = (
            per_warp(v, gang, name) for v, name in zip(values, ("descriptor of A", "descriptor of B", "scale-d"), strict=True)
        )
        multiply = _Multiply(form, gang.first, result, factor, a, b, accumulate)
        if self.cta.hazards is not None:
            self._check_fences(gang, registers, self.cta.hazards.strict)
            clocks = tensor_hazards.start_wgmma(self.cta.hazards, gang, form, multiply.descriptors)
            multiply.issue = clocks, gang.site
        for i in range(gang.warps):
            warp = gang.first + i
            self._agree(warp, i, (form, int(b[i]), bool(accumulate[i]), None if factor is not None else int(a[i])))
            self.open[warp].append(multiply)
        here = slice(gang.first, gang.last)
        self.results[result, here] += 1
        if factor is not None:
            self.factors[factor, here] += 1
        for i in range(gang.warps):  # what is wrong with them shows here, where the instruction is at hand
            if factor is None:
                descriptor.decode(int(a[i]), False, "A")
            descriptor.decode(int(b[i]), False, "B")
        self.busy += gang.warps

    def touch(self, gang: Gang, read: Array, written: Array, mask: Array | None) -> None:
        """Some lanes of a gang read and wrote registers, whose next use by a multiplication needs a fence."""
        warps = np.arange(gang.first, gang.last) if mask is None else gang.first + np.flatnonzero(mask.reshape(-1, 32).any(1))
        self.touched[np.ix_(read, warps)] |= _READ
        self.touched[np.ix_(written, warps)] |= _WRITTEN

    def fence(self, gang: Gang) -> None:
        """wgmma.fence by all warps of a gang."""
        here = slice(gang.first, gang.last)
        if self.cta.hazards is not None and (self.touched[:, here].any() or not self.fenced[here].all()):
            self.cta.hazards.sites.effective.add(gang.site)
        self.touched[:, here] = 0
        self.fenced[here] = True

    def _check_fences(self, gang: Gang, registers: tuple[Array, Array | None], strict: bool) -> None:
        """The first multiplication needs a fence before it, and so do registers that were touched otherwise (9.7.15.7.1).

        Raises:
            FaultError: there is none. Reads alone need one with ``checks="isa"`` only.
        """
        here = slice(gang.first, gang.last)
        bad: Array = ~self.fenced[here]
        what = "the first wgmma"
        if not bad.any():
            for name, rows in zip(("the result", "A"), registers, strict=True):
                if rows is not None and not bad.any():
                    touched = self.touched[rows, here] & (_READ | _WRITTEN if strict else _WRITTEN)
                    bad = np.asarray(touched.any(0))
                    what = f"a wgmma uses a register of {name} that was {'written' if (touched & _WRITTEN).any() else 'read'} before, and"
        if bad.any():
            raise FaultError(TensorFenceError, f"{what} has no wgmma.fence in front of it", np.repeat(bad, 32))

    def _agree(self, warp: int, lane: int, what: tuple[Any, ...]) -> None:
        """The warps of a warpgroup must issue the same multiplications in the same order."""
        group = warp // WARPS
        number = self.issued[warp] - self.passed[group]
        self.issued[warp] += 1
        expected = self.expected[group]
        if number == len(expected):
            expected.append(what)
        elif expected[number] != what:
            lanes = np.zeros(32 * (lane + 1), bool)
            lanes[32 * lane :] = True
            raise FaultError(DivergenceError, f"the warps of warpgroup {group} issue different multiplications", lanes)
        members = self.issued[WARPS * group : WARPS * group + WARPS]
        while expected and min(members) > self.passed[group]:
            expected.popleft()
            self.passed[group] += 1

    def commit(self, first: int, last: int) -> None:
        """wgmma.commit_group by warps [first, last)."""
        for warp in range(first, last):
            self.groups[warp].append(self.open[warp])
            self.open[warp] = []

    def wait(self, gang: Gang, keep: int) -> None:
        """wgmma.wait_group: complete all groups but the ``keep`` newest."""
        todo = []
        for warp in range(gang.first, gang.last):
            groups = self.groups[warp]
            mine: list[_Multiply] = []
            while len(groups) > keep:
                mine += groups.popleft()
            todo.append(mine)
        place = [0] * gang.warps
        while True:
            heads = [mine[at] if at < len(mine) else None for mine, at in zip(todo, place, strict=True)]
            head = next((h for h in heads if h is not None), None)
            if head is None:
                return
            warps = [i for i, h in enumerate(heads) if h is head]
            run = _run(todo[warps[0]][place[warps[0]] :], [(todo[i], place[i]) for i in warps])
            self._complete(gang, run, warps)
            for i in warps:
                place[i] += len(run)

    def _complete(self, gang: Gang, run: list[_Multiply], warps: list[int]) -> None:
        """Carry out multiplications into the same registers for some warps of a gang."""
        if self.cta.hazards is not None:
            for multiply in run:
                assert multiply.issue is not None
                for i in warps:
                    where = self.cta, gang.first + i, gang.first + i - multiply.first
                    tensor_hazards.finish_wgmma(self.cta.hazards, where, multiply.form, multiply.descriptors, multiply.issue)
        for members in _alike(run, [gang.first + i for i in warps]):
            self._multiply(gang, run, [w - gang.first for w in members])
        absolute = np.array([gang.first + i for i in warps])
        for multiply in run:
            self.results[np.ix_(multiply.result, absolute)] -= 1
            if multiply.factor is not None:
                self.factors[np.ix_(multiply.factor, absolute)] -= 1
        self.busy -= len(run) * len(warps)

    def _multiply(self, gang: Gang, run: list[_Multiply], warps: list[int]) -> None:
        form, result = run[0].form, run[0].result
        w = len(warps)
        lanes = _lanes(warps)
        size = tensor_core.ITEMSIZE[form.a]
        at = [gang.first + warps[0] - multiply.first for multiply in run]
        right = _read(
            gang, [int(m.b[i]) for m, i in zip(run, at, strict=True)], Operand("B", form.n, form.k, size, form.transposed[1]), form.b
        )
        if run[0].factor is None:
            operand = Operand("A", 64, form.k, size, form.transposed[0])
            left = _read(gang, [int(m.a[i]) for m, i in zip(run, at, strict=True)], operand, form.a)
            quarters = [(gang.first + i) % WARPS for i in warps]
            if quarters != list(range(WARPS)):
                left = left.reshape(WARPS, 16, -1)[quarters].reshape(16 * w, -1)
        else:
            bits = [np.ascontiguousarray(gang.R32[m.factor][:, lanes])[..., None] for m in run]
            left = np.concatenate([fragment_a(tensor_core.decode(b, form.a), w) for b in bits], axis=1)
        accumulate = bool(run[0].accumulate[at[0]])
        total = from_fragment(gang.R32[result][:, lanes], form) if accumulate else None
        for product in tensor_core.multiply(left, right, form.k):
            signed = -product if form.negated[0] != form.negated[1] else product
            total = tensor_core.accumulate(signed, total, form.accumulator, form.clamp)
        gang.R32[(result, lanes) if isinstance(lanes, slice) else np.ix_(result, lanes)] = into_fragment(np.asarray(total), form)

    def check(self, gang: Gang, read: Array, written: Array, mask: Array | None) -> None:
        """Registers that an instruction is about to read or write must not belong to a multiplication on its way."""
        here = slice(gang.first, gang.last)
        if not any(map(np.count_nonzero, (self.results[read, here], self.results[written, here], self.factors[written, here]))):
            return  # as nearly always
        bad = self.results[read, here].any(0) | self.results[written, here].any(0) | self.factors[written, here].any(0)
        lanes = np.repeat(bad, 32) if mask is None else np.repeat(bad, 32) & mask
        if lanes.any():
            what = "the result of a wgmma that has not been waited for is touched"
            if not (self.results[read, here].any() or self.results[written, here].any()):
                what = "an A register of a wgmma that has not been waited for is overwritten"
            raise FaultError(PendingMultiplyError, what, lanes)


def _read(gang: Gang, descriptors: list[int], operand: Operand, type_: str) -> Array:
    """An operand in shared memory as float32 (mn, all of K)."""
    values = tensor_core.decode(descriptor.read(gang.cta.shared, tuple(descriptors), False, operand), type_)
    return np.asarray(values.T if operand.mn_major else values)


def per_warp(values: Array, gang: Gang, name: str) -> Array:
    """One value a warp.

    Raises:
        FaultError: the lanes of a warp disagree.
    """
    if values.size == 1:
        return np.repeat(values, gang.warps)
    rows = values.reshape(-1, 32)
    differs = (rows != rows[:, :1]).any(1)
    if differs.any():
        raise FaultError(DivergenceError, f"the {name} differs between lanes of a warp", np.repeat(differs, 32))
    return np.array(rows[:, 0])  # a copy: the register may change before the values are used


def _run(entries: list[_Multiply], others: list[tuple[list[_Multiply], int]]) -> list[_Multiply]:
    """The longest beginning of ``entries`` that adds to the same registers and that all warps have in common."""
    first = entries[0]
    length = 1
    for i, entry in enumerate(entries[1:], 1):
        same = entry.form == first.form and entry.result is first.result and (entry.factor is None) == (first.factor is None)
        if not same or not entry.accumulate.all() or any(at + i >= len(mine) or mine[at + i] is not entry for mine, at in others):
            break
        length += 1
    return entries[:length] if first.form.accumulator == "f32" else entries[:1]


def _alike(run: list[_Multiply], warps: list[int]) -> list[list[int]]:
    """Warps that use the same descriptors."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for warp in warps:
        key = tuple((int(m.a[warp - m.first]), int(m.b[warp - m.first]), bool(m.accumulate[warp - m.first])) for m in run)
        found.setdefault(key, []).append(warp)
    return list(found.values())


def _lanes(warps: list[int]) -> Any:
    """The lanes of some warps of a gang: a slice where they follow each other."""
    if warps == list(range(warps[0], warps[0] + len(warps))):
        return slice(32 * warps[0], 32 * (warps[-1] + 1))
    return np.concatenate([np.arange(32 * i, 32 * i + 32) for i in warps])


def fragment_a(values: Array, warps: int) -> Array:
    """A from registers (4, lanes, P): register r of lane l has row l / 4 + 8 (r % 2), columns 4 P (r / 2) + P (l % 4) and on."""
    p = values.shape[-1]
    return np.ascontiguousarray(values.reshape(2, 2, warps, 8, 4, p).transpose(2, 1, 3, 0, 4, 5)).reshape(16 * warps, 8 * p)


_TO_FRAGMENT = (3, 1, 5, 0, 2, 4)
"""(warp, half, row, block of 8 columns, quarter, column) to (block, half, column, warp, row, quarter)."""


def into_fragment(values: Array, form: WgmmaForm) -> Array:
    """D (16 rows a warp, N) as registers (count, lanes).

    Element k of lane l is row l / 4 + 8 (k / 2 % 2), column 8 (k / 4) + 2 (l % 4) + k % 2; two float16 share a register.
    """
    w, blocks = len(values) // 16, form.n // 8
    elements = values.reshape(w, 2, 8, blocks, 4, 2).transpose(_TO_FRAGMENT).reshape(2 * blocks, 2, 32 * w)
    if form.accumulator == "f16":
        return np.ascontiguousarray(elements.transpose(0, 2, 1)).view(np.uint32).reshape(2 * blocks, 32 * w)
    return np.asarray(elements.view(np.uint32).reshape(4 * blocks, 32 * w))


def from_fragment(registers: Array, form: WgmmaForm) -> Array:
    """The inverse of ``into_fragment``."""
    w, blocks = registers.shape[1] // 32, form.n // 8
    registers = np.ascontiguousarray(registers)
    if form.accumulator == "f16":
        elements = registers.view(np.float16).reshape(2 * blocks, 32 * w, 2).transpose(0, 2, 1)
    else:
        elements = registers.view(np.float32 if form.accumulator == "f32" else np.int32)
    parts = elements.reshape(blocks, 2, 2, w, 8, 4)
    return np.ascontiguousarray(parts.transpose(np.argsort(_TO_FRAGMENT))).reshape(16 * w, form.n)
