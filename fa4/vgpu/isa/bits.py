"""Logic, shifts and bit fields (PTX ISA 9.7.1 and 9.7.8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.isa.registry import Mods, instruction
from fa4.vgpu.lexer import integer
from fa4.vgpu.program import Immediate, Op

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]
U32 = np.uint32


def count_ones(x: Array) -> Array:
    """Bits set in each element."""
    return np.asarray(np.unpackbits(np.ascontiguousarray(x).view(np.uint8), axis=0).reshape(x.size, -1).sum(1, dtype=np.uint32))


def top_bit(x: Array) -> Array:
    """Position of the highest bit set, all ones where there is none."""
    width = 8 * x.dtype.itemsize
    # Big-endian bits: the first one set is the highest.
    bits = np.unpackbits(np.ascontiguousarray(x).astype(x.dtype.newbyteorder(">")).view(np.uint8)).reshape(x.size, width)
    return np.asarray(np.where(x == 0, 0xFFFFFFFF, width - 1 - bits.argmax(1)).astype(np.uint32))


def reverse_bits(x: Array) -> Array:
    """The lowest bit becomes the highest."""
    raw = np.ascontiguousarray(x).view(np.uint8).reshape(x.size, -1)
    return np.packbits(np.unpackbits(raw, axis=1, bitorder="little")[:, ::-1], axis=1, bitorder="little").view(x.dtype).reshape(-1)


def sign_position(x: Array) -> Array:
    """A signed number with its sign removed: negative ones are inverted, so that bfind finds the highest bit that is no sign."""
    return np.asarray(np.where(x < 0, ~x, x))


def extract(a: Array, position: Array, length: Array) -> Array:
    """Bit field of ``length & 255`` bits from bit ``position & 255`` on; a signed one is filled with its top bit, at most the sign of a."""
    width = 8 * a.dtype.itemsize
    start = (position & U32(255)).astype(np.int64)
    size = (length & U32(255)).astype(np.int64)
    bits = a.astype(np.uint64) if a.dtype.kind == "u" else a.astype(np.int64).view(np.uint64)
    mask = np.where(size >= 64, ~np.uint64(0), (np.uint64(1) << size.astype(np.uint64)) - np.uint64(1))
    unsigned = a.view(f"u{a.dtype.itemsize}").astype(np.uint64)
    field = np.where(start >= width, np.uint64(0), unsigned >> np.minimum(start, 63).astype(np.uint64)) & mask
    if a.dtype.kind == "u":
        return np.asarray(field.astype(a.dtype))
    top = np.minimum(start + size - 1, width - 1)
    sign = (bits >> np.clip(top, 0, 63).astype(np.uint64)) & np.uint64(1)
    present = np.clip(np.minimum(size, width - start), 0, 64)
    fill = np.where(present >= 64, np.uint64(0), ~np.uint64(0) << np.minimum(present, 63).astype(np.uint64))
    value = np.where((sign == 1) & (size > 0), field | fill, field)
    return np.asarray(value.astype(f"u{a.dtype.itemsize}").view(a.dtype))


def insert(a: Array, b: Array, position: Array, length: Array) -> Array:
    """B with the low ``length`` bits of a at ``position``."""
    width = 8 * a.dtype.itemsize
    start = (position & U32(255)).astype(np.uint64)
    size = (length & U32(255)).astype(np.uint64)
    one = np.uint64(1)
    mask = np.where(size >= 64, ~np.uint64(0), (one << size) - one)
    mask = np.where(start >= width, np.uint64(0), mask << start)
    value = (b.astype(np.uint64) & ~mask) | ((a.astype(np.uint64) << start) & mask)
    return np.asarray(value.astype(a.dtype))


_PERMUTE = {  # mode: for each value of the two low selector bits the bytes, lowest first
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


def permute(a: Array, b: Array, selector: Array, mode: str) -> Array:
    """Four bytes of the eight of {b, a}, chosen by nibbles; a nibble's top bit replicates the sign of its byte."""
    a, b, selector = np.broadcast_arrays(a, b, selector)
    data = np.stack([a, b], axis=1).view(np.uint8).reshape(-1, 8)
    if mode:
        index = np.array(_PERMUTE[mode])[selector & U32(3)]
        signs = np.zeros_like(index, bool)
    else:
        nibbles = np.stack([selector >> U32(4 * i) for i in range(4)], axis=1)
        index, signs = nibbles & U32(7), (nibbles & U32(8)) != 0
    chosen = np.take_along_axis(data, index.astype(np.intp), axis=1)
    chosen = np.where(signs, np.where(chosen & 0x80, 0xFF, 0), chosen).astype(np.uint8)
    return np.ascontiguousarray(chosen).view(np.uint32).reshape(-1)


def logic3(a: Array, b: Array, c: Array, table: int) -> Array:
    """Any function of three bits: bit 4a + 2b + c of ``table``."""
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


def funnel(low: Array, high: Array, amount: Array, left: bool, clamp: bool) -> Array:
    """Upper half of {high, low} << n, or lower half of it >> n; n modulo 32, or at most 32."""
    n = (np.minimum(amount, U32(32)) if clamp else amount & U32(31)).astype(np.uint64)
    both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    value = (both << n) >> np.uint64(32) if left else both >> n
    return np.asarray((value & np.uint64(0xFFFFFFFF)).astype(np.uint32))


@instruction("and", "or", "xor", section="9.7.8.1 to 9.7.8.3", forms="pred b16 b32 b64", lanewise=True)
def _logic(e: Emitter, op: Op, mods: Mods) -> None:
    d, a, b = op.operands
    type_ = mods.type("pred", "b16", "b32", "b64")
    e.call(f"bitwise_{op.name}", d, type_, e.source(a, type_), e.source(b, type_))


@instruction("not", section="9.7.8.4", forms="pred b16 b32 b64", lanewise=True)
def _not(e: Emitter, op: Op, mods: Mods) -> None:
    type_ = mods.type("pred", "b16", "b32", "b64")
    e.call("bitwise_not", op.operands[0], type_, e.source(op.operands[1], type_))


@instruction("cnot", section="9.7.8.5", forms="b16 b32 b64")
def _cnot(e: Emitter, op: Op, mods: Mods) -> None:
    """1 where the operand is 0, else 0."""
    type_ = mods.type("b16", "b32", "b64")
    a = e.source(op.operands[1], type_)
    e.assign(op.operands[0], type_, f"equal({a}, {e.constant(0, 'uint' + type_[1:])})")


@instruction("lop3", section="9.7.8.6", forms="b32")
def _lop3(e: Emitter, op: Op, mods: Mods) -> None:
    mods.type("b32")
    d, a, b, c, table = op.operands
    if not isinstance(table, Immediate):
        raise mods.unsupported("the table must be a constant")
    x, y, z = (e.source(o, "b32") for o in (a, b, c))
    e.assign(d, "b32", f"{e.helper(logic3)}({x}, {y}, {z}, {integer(table.text)})")


@instruction("shl", "shr", section="9.7.8.8, 9.7.8.9", forms="b u s of 16 32 64; the amount is clamped to the width", lanewise=True)
def _shift(e: Emitter, op: Op, mods: Mods) -> None:
    d, a, n = op.operands
    type_ = mods.type()
    width = int(type_[1:])
    kind = "int" if type_[0] == "s" else "uint"
    # numpy defines shifts by the width or more just as PTX does, also for negative numbers seen as unsigned ones.
    if isinstance(n, Immediate):
        amount = e.constant(min(integer(n.text) % 2**32, width), f"{kind}{width}")
    elif width == 16:
        amount = f"minimum({e.source(n, 'u32')}, {e.constant(16, 'uint32')}).astype(np.{kind}16)"
    elif width == 64:
        amount = f"{e.source(n, 'u32')}.astype(np.{kind}64)"
    else:
        amount = e.source(n, ("s" if type_[0] == "s" else "u") + "32")
    e.call("left_shift" if op.name == "shl" else "right_shift", d, type_, e.source(a, type_), amount)


@instruction("shf", section="9.7.8.7", forms="l r, clamp wrap, b32")
def _funnel(e: Emitter, op: Op, mods: Mods) -> None:
    mods.type("b32")
    d, low, high, n = op.operands
    left, clamp = mods.take("l", "r") == "l", mods.take("clamp", "wrap") == "clamp"
    x, y, z = (e.source(o, "b32") for o in (low, high, n))
    e.assign(d, "b32", f"{e.helper(funnel)}({x}, {y}, {z}, {left}, {clamp})")


@instruction("popc", section="9.7.1.14", forms="b32 b64")
def _popc(e: Emitter, op: Op, mods: Mods) -> None:
    type_ = mods.type("b32", "b64")
    e.assign(op.operands[0], "u32", f"{e.helper(count_ones)}({e.source(op.operands[1], type_)})")


@instruction("clz", section="9.7.1.15", forms="b32 b64")
def _clz(e: Emitter, op: Op, mods: Mods) -> None:
    type_ = mods.type("b32", "b64")
    # top_bit is all ones, -1, for 0: then width - 1 - top is the width.
    top = f"{e.helper(top_bit)}({e.source(op.operands[1], type_)})"
    e.call("subtract", op.operands[0], "u32", e.constant(int(type_[1:]) - 1, "uint32"), top)


@instruction("bfind", section="9.7.1.16", forms="u32 s32 u64 s64, shiftamt")
def _bfind(e: Emitter, op: Op, mods: Mods) -> None:
    type_ = mods.type("u32", "s32", "u64", "s64")
    a = e.source(op.operands[1], type_)
    if type_[0] == "s":
        a = f"{e.helper(sign_position)}({a}).view(np.uint{type_[1:]})"
    value = e.temporary(f"{e.helper(top_bit)}({a})")
    if mods.take("shiftamt"):
        none = e.constant(0xFFFFFFFF, "uint32")
        value = f"where(equal({value}, {none}), {none}, subtract({e.constant(int(type_[1:]) - 1, 'uint32')}, {value}))"
    e.assign(op.operands[0], "u32", value)


@instruction("brev", section="9.7.1.18", forms="b32 b64")
def _brev(e: Emitter, op: Op, mods: Mods) -> None:
    type_ = mods.type("b32", "b64")
    e.assign(op.operands[0], type_, f"{e.helper(reverse_bits)}({e.source(op.operands[1], type_)})")


@instruction("bfe", section="9.7.1.19", forms="u32 s32 u64 s64")
def _bfe(e: Emitter, op: Op, mods: Mods) -> None:
    d, a, position, length = op.operands
    type_ = mods.type("u32", "s32", "u64", "s64")
    x, y, z = e.source(a, type_), e.source(position, "u32"), e.source(length, "u32")
    e.assign(d, type_, f"{e.helper(extract)}({x}, {y}, {z})")


@instruction("bfi", section="9.7.1.20", forms="b32 b64")
def _bfi(e: Emitter, op: Op, mods: Mods) -> None:
    d, a, b, position, length = op.operands
    type_ = mods.type("b32", "b64")
    w, x, y, z = e.source(a, type_), e.source(b, type_), e.source(position, "u32"), e.source(length, "u32")
    e.assign(d, type_, f"{e.helper(insert)}({w}, {x}, {y}, {z})")


@instruction("prmt", section="9.7.9.7", forms="b32, and f4e b4e rc8 ecl ecr rc16")
def _prmt(e: Emitter, op: Op, mods: Mods) -> None:
    mods.type("b32")
    d, a, b, selector = op.operands
    mode = mods.take(*_PERMUTE)
    x, y, z = (e.source(o, "b32") for o in (a, b, selector))
    e.assign(d, "b32", f"{e.helper(permute)}({x}, {y}, {z}, {mode!r})")
