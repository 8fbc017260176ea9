"""Matrices of a warp: ldmatrix, stmatrix, movmatrix, mma.sync (PTX ISA 9.7.14).

Fragments, with g = lane / 4 and c = lane % 4: a 32-bit register holds P elements (1 of 32 bits, 2 of 16, 4 of 8). Register r of A is row
``g + 8 (r % 2)``, columns ``4 P (r // 2) + P c + i``; register r of B is column g and those rows; C and D have rows ``g + 8 h`` and
columns ``2 c + j``, as a float32 or s32 each or as f16x2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fa4.vgpu import numerics
from fa4.vgpu.errors import DivergenceError
from fa4.vgpu.isa.registry import Mods, instruction
from fa4.vgpu.memory import FaultError, spread
from fa4.vgpu.program import Op, Operand, Register, Tuple

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]

_BATCH = 16
_FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}

SHAPES = {
    # (shape, class of A and B): (registers of A, registers of B)
    ("m16n8k8", "f16"): (2, 1),
    ("m16n8k16", "f16"): (4, 2),
    ("m16n8k8", "bf16"): (2, 1),
    ("m16n8k16", "bf16"): (4, 2),
    ("m16n8k4", "tf32"): (2, 1),
    ("m16n8k8", "tf32"): (4, 2),
    ("m16n8k16", "8"): (2, 1),
    ("m16n8k32", "8"): (4, 2),
    ("m16n8k32", "fp8"): (4, 2),
}


def whole_warps(g: Any, mask: Array | None) -> Array | None:
    """Which warps execute (None: all); an error where some but not all lanes of a warp do."""
    if mask is None:
        return None
    lanes = mask.reshape(-1, 32)
    partial = np.asarray(lanes.any(1) & ~lanes.all(1))
    if partial.any():
        raise FaultError(DivergenceError, "all lanes of the warp must execute this together", (lanes & partial[:, None]).reshape(-1))
    return np.asarray(lanes.all(1))


def _read_rows(g: Any, address: Array, count: int, mask: Array | None) -> tuple[Array, Array | None]:
    """16-byte rows of the matrices as (warps, matrix, row, 4 words)."""
    warps = whole_warps(g, mask)
    everyone = count == 4 and warps is None
    lanes = np.zeros((g.warps, 32), bool)
    if not everyone:
        lanes[slice(None) if warps is None else warps, : 8 * count] = True
    words = g.load("shared", spread(address, g.n), "u4", 4, None if everyone else lanes.reshape(-1))
    return words.reshape(-1, count, 8, 4), warps


def load_matrices(g: Any, rows: Array, address: Array, transposed: bool, mask: Array | None) -> None:
    """ldmatrix: lane l gets row l / 4, elements 2 (l % 4) and the next; transposed: column l / 4, those rows."""
    words, warps = _read_rows(g, address, len(rows), mask)
    if transposed:
        words = np.ascontiguousarray(words.view(np.uint16).reshape(-1, len(rows), 8, 8).swapaxes(2, 3)).view(np.uint32)
    values = words.transpose(1, 0, 2, 3).reshape(len(rows), -1)
    if warps is None:
        g.R32[rows] = values
    else:
        lanes = np.flatnonzero(np.repeat(warps, 32))
        g.R32[np.ix_(rows, lanes)] = values


def store_matrices(g: Any, rows: Array, address: Array, transposed: bool, mask: Array | None) -> None:
    """stmatrix, the inverse of ldmatrix."""
    warps = whole_warps(g, mask)
    words = g.R32[rows].reshape(len(rows), -1, 8, 4).transpose(1, 0, 2, 3)
    if transposed:
        words = np.ascontiguousarray(np.ascontiguousarray(words).view(np.uint16).reshape(-1, len(rows), 8, 8).swapaxes(2, 3)).view(
            np.uint32
        )
    data = np.zeros((g.warps, 32, 4), np.uint32)
    data[:, : 8 * len(rows)] = words.reshape(g.warps, -1, 4)
    lanes = np.zeros((g.warps, 32), bool)
    lanes[slice(None) if warps is None else warps, : 8 * len(rows)] = True
    g.store("shared", np.broadcast_to(address, g.n), data.reshape(-1, 4), "u4", 4, lanes.reshape(-1))


def register_rows(mods: Mods, operands: Sequence[Operand]) -> Array:
    """Numbers of the rows of 32-bit registers; equal lists give the same array."""
    if not all(isinstance(o, Register) and o.bits == 32 for o in operands):
        raise mods.unsupported("operands must be 32-bit registers")
    return _shared_array(tuple(o.index for o in operands if isinstance(o, Register)))


@lru_cache(maxsize=65536)
def _shared_array(rows: tuple[int, ...]) -> Array:
    return np.array(rows)


@instruction("ldmatrix", "stmatrix", section="9.7.14.5.15, 9.7.14.5.16", forms="sync.aligned.m8n8, x1 x2 x4, trans, shared.b16")
def _matrices(e: Emitter, op: Op, mods: Mods) -> None:
    mods.type("b16")
    for word in ("sync", "aligned", "m8n8"):
        if not mods.take(word):
            raise mods.unsupported()
    count, transposed = int(mods.take("x1", "x2", "x4")[1:]), bool(mods.take("trans"))
    space = mods.take("shared", "shared::cta")
    registers, address = op.operands if op.name == "ldmatrix" else op.operands[::-1]
    rows = register_rows(mods, e.items(registers))
    if not space or len(rows) != count:
        raise mods.unsupported()
    e.count("shared", 16 * count // 4)
    function = e.helper(load_matrices if op.name == "ldmatrix" else store_matrices)
    e.line(f"{function}(g, {e.fixed(rows)}, {e.address(address, 32)}, {transposed}, {e.masked})")


def transpose_matrix(g: Any, value: Array, mask: Array | None) -> Array:
    """movmatrix: an 8x8 matrix of 16-bit elements across the lanes, transposed."""
    whole_warps(g, mask)
    halves = np.ascontiguousarray(value).view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint32).reshape(-1)


@instruction("movmatrix", section="9.7.14.5.17", forms="sync.aligned.m8n8.trans.b16")
def _movmatrix(e: Emitter, op: Op, mods: Mods) -> None:
    mods.type("b16")
    if not all(mods.take(word) for word in ("sync", "aligned", "m8n8", "trans")):
        raise mods.unsupported()
    e.assign(op.operands[0], "b32", f"{e.helper(transpose_matrix)}(g, {e.source(op.operands[1], 'b32')}, {e.masked})")


# mma.sync


@dataclass(frozen=True)
class MmaForm:
    """What one opcode says: types of A, B and C/D ("f32", "f16" or "s32"), and whether s32 results are clamped."""

    a: str
    b: str
    accumulator: str
    clamp: bool


def decode(bits: Array, type_: str) -> Array:
    """32-bit registers (..., lanes) to float64 elements (..., lanes, P); exact."""
    if type_ == "tf32":  # the low 13 bits do not take part
        return np.asarray((bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)[..., None])
    bits = np.ascontiguousarray(bits)
    if type_ == "bf16":
        pairs = np.empty((*bits.shape, 2), np.uint32)
        np.left_shift(bits, np.uint32(16), out=pairs[..., 0])
        np.bitwise_and(bits, np.uint32(0xFFFF0000), out=pairs[..., 1])
        return pairs.view(np.float32).astype(np.float64)
    if type_ == "f16":
        return bits.view(np.float16).astype(np.float64).reshape(*bits.shape, 2)
    if type_ in _FP8:
        return np.asarray(bits.view(_FP8[type_]).astype(np.float64).reshape(*bits.shape, 4))
    return np.asarray(bits.view(np.int8 if type_ == "s8" else np.uint8).astype(np.float64).reshape(*bits.shape, 4))


def multiply_add(g: Any, form: MmaForm, rows: tuple[Array, Array, Array, Array], mask: Array | None) -> None:
    """D = A B + C for a batch of independent instructions; ``rows`` are the registers of A, B, C, D, a row of each per instruction.

    Products and sums in float64, rounded once: the hardware's own order and truncation are not modelled (nor documented).
    """
    warps = whole_warps(g, mask)
    R = g.R32
    batch, w = len(rows[1]), g.warps
    a = decode(R[rows[0]], form.a)  # (batch or 1, registers, lanes, P)
    b = decode(R[rows[1]], form.b)
    kh, p = b.shape[1], b.shape[3]
    k = kh * 4 * p
    a = a.reshape(-1, kh, 2, w, 8, 4, p).transpose(3, 0, 2, 4, 1, 5, 6).reshape(w, -1, 16, k)
    b = b.reshape(batch, kh, w, 8, 4, p).transpose(2, 0, 3, 1, 4, 5)
    if a.shape[1] == 1:  # one A for all: one product of 16 x k and k x (8 batch)
        product = np.matmul(a[:, 0], b.reshape(w, batch * 8, k).swapaxes(1, 2)).reshape(w, 2, 8, batch, 4, 2)
        product = product.transpose(3, 1, 5, 0, 2, 4)
    else:
        product = np.matmul(a, b.reshape(w, batch, 8, k).swapaxes(2, 3)).reshape(w, batch, 2, 8, 4, 2)
        product = product.transpose(1, 2, 5, 0, 3, 4)
    product = product.reshape(batch, 4, g.n)  # registers of D: 2 h + j
    if form.accumulator == "f32":
        result = (product + R[rows[2]].view(np.float32)).astype(np.float32).view(np.uint32)
    elif form.accumulator == "s32":
        total = product.astype(np.int64) + R[rows[2]].view(np.int32)
        result = (total.clip(-(2**31), 2**31 - 1) if form.clamp else total).astype(np.uint64).astype(np.uint32)
    else:
        c = np.ascontiguousarray(R[rows[2]]).view(np.float16).reshape(batch, 2, g.n, 2).transpose(0, 1, 3, 2).reshape(batch, 4, g.n)
        total = numerics.to_f16(product + c).reshape(batch, 2, 2, g.n).transpose(0, 1, 3, 2)
        result = np.ascontiguousarray(total).view(np.uint32).reshape(batch, 2, g.n)
    target = rows[3].reshape(-1)
    result = result.reshape(len(target), g.n)
    if warps is None:
        R[target] = result
    else:
        lanes = np.flatnonzero(np.repeat(warps, 32))
        R[np.ix_(target, lanes)] = result[:, lanes]


def _form(mods: Mods) -> tuple[MmaForm, int, int]:
    """The form, and how many registers A and B have."""
    shape = next((m for m in mods.left if m.startswith("m")), "")
    mods.take(shape)
    for word in ("sync", "aligned", "row", "col"):
        if not mods.take(word):
            raise mods.unsupported()
    clamp = bool(mods.take("satfinite"))
    if len(mods.types) != 4:
        raise mods.unsupported()
    d, a, b, c = mods.types
    kind = "8" if {a, b} <= {"s8", "u8"} else "fp8" if {a, b} <= set(_FP8) else a if a == b else ""
    sizes = SHAPES.get((shape, kind))
    accumulators = {"f16": ("f32", "f16"), "bf16": ("f32",), "tf32": ("f32",), "8": ("s32",), "fp8": ("f32", "f16")}.get(kind, ())
    if sizes is None or d != c or d not in accumulators or (clamp and d != "s32"):
        raise mods.unsupported()
    return MmaForm(a, b, d, clamp), *sizes


def emit_group(e: Emitter, ops: Sequence[Op]) -> None:
    """Independent mma instructions with one opcode, executed as one."""
    mods = Mods(ops[0])
    form, size_a, size_b = _form(mods)
    mods.done()
    size_c = 2 if form.accumulator == "f16" else 4
    rows: list[list[Array]] = [[], [], [], []]
    for op in ops:
        d, a, b, c = op.operands
        for part, operand, size in zip(rows, (a, b, c, d), (size_a, size_b, size_c, size_c), strict=True):
            indices = register_rows(mods, e.items(operand))
            if len(indices) != size:
                raise mods.unsupported("number of registers")
            part.append(indices)
    if all((r == rows[0][0]).all() for r in rows[0]):
        del rows[0][1:]
    e.line(f"{e.helper(multiply_add)}(g, {e.fixed(form)}, {e.fixed(tuple(np.array(part) for part in rows))}, {e.masked})")


@instruction(
    "mma",
    section="9.7.14.5.14",
    forms="sync.aligned.row.col; m16n8k8 m16n8k16 of f16 (into f32 or f16) and bf16, m16n8k4 m16n8k8 of tf32, m16n8k16 m16n8k32 of s8 u8 "
    "(satfinite), m16n8k32 of e4m3 e5m2",
)
def _mma(e: Emitter, op: Op, mods: Mods) -> None:
    mods.left.clear()
    emit_group(e, [op])


def group(ops: Sequence[Op]) -> list[list[int]]:
    """Positions of instructions in the order they are executed: independent mma instructions with one opcode come together.

    An instruction between two of them moves before both where neither side uses what the other writes.
    """
    order: list[list[int]] = []
    batch: list[int] = []
    written: set[tuple[int, int]] = set()
    used: set[tuple[int, int]] = set()

    def flush() -> None:
        if batch:
            order.append(list(batch))
        batch.clear()
        written.clear()
        used.clear()

    for position, op in enumerate(ops):
        reads, writes = ({(r.bits, r.index) for r in registers} for registers in (op.read, op.written))  # rows: they may be shared
        joins = op.name == "mma" and op.guard is None and isinstance(op.operands[0], Tuple)
        if batch and joins and (op.opcode != ops[batch[0]].opcode or written & (reads | writes) or len(batch) == _BATCH):
            flush()
        if not joins and (written & reads or writes & (written | used)):
            flush()
        if joins:
            batch.append(position)
            written |= writes
            used |= reads
        else:
            order.append([position])
    flush()
    return order
