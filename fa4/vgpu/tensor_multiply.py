"""tcgen05.mma (PTX ISA 9.7.16.10): D (+)= A B with D in tensor memory, carried out by the tensor core of a CTA or of a pair, in order.

With M = 128 (256 for a pair) row r of a CTA's part of D is lane r. With M = 64 it is lane 32 (r / 16) + r % 16. A pair with M = 128 has 64
rows a CTA, with columns 0 to N / 2 - 1 in lanes 0 to 63 and the rest in lanes 64 to 127 of the same columns of tensor memory; A from
tensor memory then lies there twice, in lanes 0 to 63 and 64 to 127. Of a pair each CTA gives its rows of A and half the rows of B, the
even one first; the same descriptors and addresses hold in both. float16 accumulators take a column each, in its low half.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu import descriptor, tensor_core, tensor_hazards
from fa4.vgpu.descriptor import Operand
from fa4.vgpu.engine import Issuer
from fa4.vgpu.errors import MatrixDescriptorError, TensorMemoryError, UnsupportedInstructionError
from fa4.vgpu.memory import FaultError
from fa4.vgpu.tensor_memory import LANES, TensorMemory

if TYPE_CHECKING:
    from fa4.vgpu.hazards import Ticket
    from fa4.vgpu.state import Cta

Array = npt.NDArray[Any]

_BATCH = 16
"""Instructions into the same D that are carried out together."""

_TYPES: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2"},
    "i8": {0: "u8", 1: "s8"},
}
_NARROW = {3: "e2m3", 4: "e3m2", 5: "e2m1"}
_ACCUMULATORS = {"f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "i8": {2: "s32"}}
_RESERVED = 1 << 6 | 1 << 23 | 1 << 29


@dataclass(frozen=True)
class MmaForm:
    """What an instruction and its descriptor say; ``m`` and ``n`` are of the whole product, of both CTAs where they work as a pair."""

    group: int
    m: int
    n: int
    a: str
    b: str
    accumulator: str
    negated: tuple[bool, bool] = (False, False)
    transposed: tuple[bool, bool] = (False, False)
    clamp: bool = False

    @property
    def k(self) -> int:
        """K: 32 bytes of an operand's row."""
        return 32 // tensor_core.ITEMSIZE[self.a]

    @property
    def rows(self) -> int:
        """Rows of A and D of one CTA."""
        return self.m // self.group

    @property
    def folded(self) -> bool:
        """Whether the two halves of N lie in the two halves of the lanes."""
        return self.group == 2 and self.m == 128

    @property
    def columns(self) -> int:
        """Columns of tensor memory that D takes."""
        return self.n // 2 if self.folded else self.n


@lru_cache
def decode_instruction(bits: int, kind: str, group: int) -> MmaForm:
    """The instruction descriptor (9.7.16.4.2).

    Raises:
        FaultError: fields that contradict the kind or each other, or a form that is not modelled.
    """

    def wrong(message: str) -> FaultError:
        return FaultError(MatrixDescriptorError, f"instruction descriptor {bits:#010x} of kind::{kind}: {message}")

    if bits >> 2 & 1:
        raise FaultError(UnsupportedInstructionError, f"instruction descriptor {bits:#010x}: a sparse A")
    if bits & (_RESERVED | 3 | 3 << 30):
        raise wrong("bits 0, 1, 6, 23, 29 to 31 must be 0")
    types = []
    for name, code in (("A", bits >> 7 & 7), ("B", bits >> 10 & 7)):
        if kind == "f8f6f4" and code in _NARROW:
            raise FaultError(UnsupportedInstructionError, f"instruction descriptor {bits:#010x}: {name} of type {_NARROW[code]}")
        if code not in _TYPES[kind]:
            raise wrong(f"type {code} of {name}: must be among {_TYPES[kind]}")
        types.append(_TYPES[kind][code])
    accumulator = _ACCUMULATORS[kind].get(bits >> 4 & 3)
    if accumulator is None:
        raise wrong(f"type {bits >> 4 & 3} of D: must be among {_ACCUMULATORS[kind]}")
    if kind == "f16" and (types[0] != types[1] or (accumulator == "f16" and types[0] != "f16")):
        raise wrong(f"A of {types[0]} and B of {types[1]} into {accumulator}")
    clamp, negate_a, negate_b, major_a, major_b = (bool(bits >> i & 1) for i in (3, 13, 14, 15, 16))
    if kind == "i8" and (negate_a or negate_b):
        raise wrong("integers cannot be negated")
    if clamp and kind != "i8":
        raise wrong("only integers can be saturated")
    n, m = (bits >> 17 & 63) * 8, (bits >> 24 & 31) * 16
    step = 32 if group == 2 else 16 if m == 128 or (kind == "i8" and n > 24) else 8
    smallest = 8 if (group, m) == (1, 64) else step
    if m not in ((64, 128), (128, 256))[group - 1] or n % step or not smallest <= n <= 256:
        raise wrong(
            f"M={m}, N={n} with cta_group::{group}: M must be {'64 or 128' if group == 1 else '128 or 256'}, N a multiple of {step}"
        )
    return MmaForm(group, m, n, types[0], types[1], accumulator, (negate_a, negate_b), (major_a, major_b), clamp)


@dataclass(frozen=True)
class Multiply:
    """One instruction: addresses of D and (unless ``a`` is a descriptor) A in tensor memory; ``disabled`` lanes keep their D."""

    form: MmaForm
    d: int
    a: int
    b: int
    a_in_tensor_memory: bool
    accumulate: bool
    scale: int
    disabled: tuple[int, ...]
    issuer: Issuer
    ticket: Ticket | None = None


class Chain:
    """Instructions that add to the same D, carried out together: an operation of the engine."""

    def __init__(self, first: Multiply, members: list[Cta]) -> None:
        self.steps = [first]
        self.members = members

    def extend(self, new: Multiply) -> bool:
        """Take one more, where that makes no difference."""
        first = self.steps[0]
        same = new.form == first.form and new.d == first.d and new.a_in_tensor_memory == first.a_in_tensor_memory
        plain = new.accumulate and not (new.scale or new.disabled or first.disabled) and first.form.accumulator != "f16"
        if not (same and plain) or len(self.steps) == _BATCH:
            return False
        self.steps.append(new)
        return True

    def __call__(self) -> None:
        """Read all operands, multiply, and write D in every CTA."""
        try:
            self._run()
        except FaultError:
            for step in self.steps:  # find out whose fault it is
                try:
                    Chain(step, self.members)._run()
                except FaultError as fault:
                    fault.issuer = step.issuer
                    raise
            raise

    def _run(self) -> None:
        first, form = self.steps[0], self.steps[0].form
        hazards = self.members[0].hazards
        if hazards is not None:
            tensor_hazards.execute(hazards, self.steps, self.members)
        parts = []
        operand = Operand("B", form.n // form.group, form.k, tensor_core.ITEMSIZE[form.b], form.transposed[1])
        for cta in self.members:
            parts.append(_read(cta, tuple(s.b for s in self.steps), operand, form.b))
        b = parts[0] if len(parts) == 1 else np.concatenate(parts)
        for number, cta in enumerate(self.members):
            memory = cta.unit(TensorMemory)
            memory.check(first.d & 0xFFFF, form.columns, "D of tcgen05.mma")
            self._multiply(memory, number, b)

    def _multiply(self, memory: TensorMemory, number: int, b: Array) -> None:
        first, form = self.steps[0], self.steps[0].form
        if first.a_in_tensor_memory:
            a = _from_tensor_memory(memory, [s.a for s in self.steps], form)
        else:
            operand = Operand("A", form.rows, form.k, tensor_core.ITEMSIZE[form.a], form.transposed[0])
            a = _read(memory.cta, tuple(s.a for s in self.steps), operand, form.a)
        if form.folded:
            half = form.n // 2
            upper = a[64:] if first.a_in_tensor_memory else a
            halves = zip(tensor_core.multiply(b[:half], a[:64], form.k), tensor_core.multiply(b[half:], upper, form.k), strict=True)
            self._write(memory, number, (np.concatenate(both, axis=1) for both in halves))
        else:
            self._write(memory, number, tensor_core.multiply(b, a, form.k))

    def _write(self, memory: TensorMemory, number: int, products: Iterable[Array]) -> None:
        """``products`` of the instructions in turn are (columns, lanes or rows)."""
        first, form = self.steps[0], self.steps[0].form
        column = first.d & 0xFFFF
        lanes = _lanes(form, first.d >> 16)
        cells = memory.data[column : column + form.columns]
        old = None
        if first.accumulate:
            old = _typed(cells[:, lanes], form.accumulator)
            if first.scale:
                old = old * np.float32(2.0**-first.scale)
        for product in products:
            signed = -product if form.negated[0] != form.negated[1] else product
            old = tensor_core.accumulate(signed, old, form.accumulator, form.clamp)
        new = np.asarray(old)
        if form.accumulator == "f16":
            new = new.view(np.uint16).astype(np.uint32)
        if not first.disabled:
            cells[:, lanes] = new.view(np.uint32)
            return
        words = first.disabled[4 * number : 4 * number + 4]
        enabled = np.array([not words[lane // 32] >> lane % 32 & 1 for lane in np.arange(LANES)[lanes]])
        where = np.arange(LANES)[lanes][enabled]
        cells[:, where] = new.view(np.uint32)[:, enabled]


def _typed(bits: Array, accumulator: str) -> Array:
    if accumulator == "f16":
        return np.asarray(bits.astype(np.uint16).view(np.float16).astype(np.float32))
    return bits.view(np.float32 if accumulator == "f32" else np.int32)


@lru_cache
def _lanes(form: MmaForm, base: int) -> Any:
    """The lanes of the rows of D."""
    if form.rows == 64 and not form.folded:
        rows = np.arange(64)
        return base + 32 * (rows // 16) + rows % 16
    return slice(0, LANES)


def _read(cta: Cta, descriptors: tuple[int, ...], operand: Operand, type_: str) -> Array:
    values = tensor_core.decode(descriptor.read(cta.shared, descriptors, True, operand), type_)
    return np.asarray(values.T if operand.mn_major else values)


def _from_tensor_memory(memory: TensorMemory, addresses: list[int], form: MmaForm) -> Array:
    """A (rows, or all lanes where it is stored twice; all of K): a column has 32 bits of each row, low bits first."""
    width = form.k * tensor_core.ITEMSIZE[form.a] // 4
    for address in addresses:
        memory.check(address & 0xFFFF, width, "A of tcgen05.mma")
    columns = np.concatenate([memory.data[a & 0xFFFF : (a & 0xFFFF) + width] for a in addresses])
    rows = np.ascontiguousarray(columns[:, _lanes(form, addresses[0] >> 16)].T)
    return tensor_core.decode(rows, form.a)


def issue(cta: Cta, multiply: Multiply) -> None:
    """Check what can be checked, and give an instruction to the tensor core.

    Raises:
        FaultError: a descriptor or an address is wrong.
    """
    form = multiply.form
    memory = cta.unit(TensorMemory)
    memory.use_group(form.group)
    memories = [memory] if form.group == 1 else [memory, memory.peer]
    width = form.k * tensor_core.ITEMSIZE[form.a] // 4
    places = [("D", multiply.d, form.columns)] + ([("A", multiply.a, width)] if multiply.a_in_tensor_memory else [])
    for name, address, columns in places:
        if address >> 16 not in ((0, 16) if form.rows == 64 and not form.folded else (0,)):
            raise FaultError(TensorMemoryError, f"{name} of tcgen05.mma at lane {address >> 16} of tensor memory: must be 0")
        for one in memories:
            one.check(address & 0xFFFF, columns, f"{name} of tcgen05.mma")
    if multiply.a_in_tensor_memory and form.transposed[0]:
        raise FaultError(MatrixDescriptorError, "A in tensor memory cannot be MN-major")
    if not multiply.a_in_tensor_memory:
        descriptor.decode(multiply.a, True, "A")
    descriptor.decode(multiply.b, True, "B")
    engine = cta.engine("tcgen05")
    members = sorted((m.cta for m in memories), key=lambda c: c.rank)
    if cta.hazards is not None:
        multiply = replace(multiply, ticket=tensor_hazards.issue(cta.hazards, multiply, members))
    last = engine.queue[-1].run if engine.queue else None
    if not (isinstance(last, Chain) and last.extend(multiply)):
        engine.push(Chain(multiply, members), multiply.issuer)


def check_end(cta: Cta) -> None:
    """A CTA ends: what the tensor core was given must be done, except for arrivals, which are done now; tensor memory must be free.

    Raises:
        FaultError: something is left; all tensor memory must be given back before a kernel ends (9.7.16.7.1).
    """
    for other in cta.cluster.ctas:
        engine = other.engines.get("tcgen05")
        for operation in engine.queue if engine is not None else ():
            if isinstance(operation.run, Chain) and cta in operation.run.members:
                fault = FaultError(TensorMemoryError, f"CTA {cta.id} ends before a multiplication that uses its memory is complete")
                fault.issuer = operation.issuer
                raise fault
    if "tcgen05" in cta.engines:
        cta.engines["tcgen05"].finish()
    memory = cta.units.get(TensorMemory)
    if memory is not None and set(memory.allocations) - memory.leaving:
        left = ", ".join(f"{n} from {s:#x}" for s, n in memory.allocations.items() if s not in memory.leaving)
        raise FaultError(TensorMemoryError, f"CTA {cta.id} ends with columns of tensor memory that were not deallocated: {left}")
