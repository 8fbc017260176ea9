"""The tensor core of sm_100a and its memory: tcgen05 (PTX ISA 9.7.16)."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu import tensor_memory
from fa4.vgpu.engine import Issuer
from fa4.vgpu.errors import TensorMemoryError
from fa4.vgpu.isa.matrix import register_rows, whole_warps
from fa4.vgpu.isa.registry import Mods, ending, instruction
from fa4.vgpu.lexer import integer
from fa4.vgpu.memory import FaultError
from fa4.vgpu.numerics import minmax
from fa4.vgpu.program import Address, Immediate, Op, Operand, Tuple
from fa4.vgpu.tensor_memory import Access, TensorMemory
from fa4.vgpu.tensor_multiply import Multiply, decode_instruction, issue
from fa4.vgpu.tensor_order import PIPE
from fa4.vgpu.warpgroup import per_warp

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]
_SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
_MOST_REGISTERS = 128


def _group(mods: Mods) -> int:
    group = mods.take("cta_group::1", "cta_group::2")
    if not group:
        raise mods.unsupported("a cta_group is needed")
    return int(group[-1])


def _aligned(mods: Mods) -> None:
    if not mods.take("sync") or not mods.take("aligned"):
        raise mods.unsupported("sync.aligned is needed")


def _constant(mods: Mods, o: Operand) -> int:
    if not isinstance(o, Immediate):
        raise mods.unsupported("an immediate is needed")
    return integer(o.text)


# Allocation


def allocate(g: Any, group: int, to: Array, count: Array, mask: Array | None) -> None:
    """tcgen05.alloc by each warp."""
    warps = whole_warps(g, mask)
    offsets, counts = per_warp(g.own(to), g, "address"), per_warp(count, g, "number of columns")
    memory = g.cta.unit(TensorMemory)
    for i in range(g.warps):
        if warps is None or warps[i]:
            memory.allocate(g, i, int(counts[i]), int(offsets[i]), group)


@ending("tcgen05.alloc", section="9.7.16.7.1", forms="cta_group::1 cta_group::2; waits for free columns, with a pair for the other CTA too")
def _alloc(e: Emitter, op: Op, mods: Mods) -> None:
    group = _group(mods)
    _aligned(mods)
    mods.type("b32")
    if not mods.take("shared::cta", "shared"):
        raise mods.unsupported("a generic address")
    to, count = op.operands
    e.line(f"{e.helper(allocate)}(g, {group}, {e.address(to, 32)}, {e.source(count, 'u32')}, {e.masked})")


def deallocate(g: Any, group: int, address: Array, count: Array, mask: Array | None) -> None:
    """tcgen05.dealloc by each warp."""
    warps = whole_warps(g, mask)
    addresses, counts = per_warp(address, g, "address"), per_warp(count, g, "number of columns")
    for i in range(g.warps):
        if warps is None or warps[i]:
            g.cta.unit(TensorMemory).release(int(addresses[i]), int(counts[i]), group)
            if g.cta.hazards is not None:
                g.cta.hazards.tensor.deallocated(g.cta, g.first + i, (int(addresses[i]), int(counts[i])), g.site)


@instruction("tcgen05.dealloc", section="9.7.16.7.1", forms="cta_group::1 cta_group::2")
def _dealloc(e: Emitter, op: Op, mods: Mods) -> None:
    group = _group(mods)
    _aligned(mods)
    mods.type("b32")
    address, count = (e.source(o, "u32") for o in op.operands)
    e.line(f"{e.helper(deallocate)}(g, {group}, {address}, {count}, {e.masked})")


def relinquish(g: Any, group: int, mask: Array | None) -> None:
    """tcgen05.relinquish_alloc_permit."""
    warps = whole_warps(g, mask)
    if warps is None or warps.any():
        memory = g.cta.unit(TensorMemory)
        memory.use_group(group)
        memory.permit = False


@instruction("tcgen05.relinquish_alloc_permit", section="9.7.16.7.1", forms="cta_group::1 cta_group::2")
def _relinquish(e: Emitter, op: Op, mods: Mods) -> None:
    group = _group(mods)
    _aligned(mods)
    e.line(f"{e.helper(relinquish)}(g, {group}, {e.masked})")


# Registers and tensor memory


def _rows(mods: Mods, operands: tuple[Operand, ...], count: int) -> Any:
    """Rows of registers: a slice where they follow each other."""
    rows = register_rows(mods, operands)
    if len(rows) != count:
        raise mods.unsupported(f"{len(rows)} registers, the shape has {count}")
    first = int(rows[0])
    return slice(first, first + count) if (rows == np.arange(first, first + count)).all() else rows


def _access(mods: Mods, packing: str) -> Access:
    shape = mods.take(*_SHAPES)
    times = next((m for m in mods.left if re.fullmatch(r"x\d+", m)), "")
    if not shape or not times:
        raise mods.unsupported("shape")
    mods.take(times)
    access = Access(shape, int(times[1:]), bool(mods.take(packing)))
    if access.times & (access.times - 1) or not 1 <= access.registers <= _MOST_REGISTERS:
        raise mods.unsupported(f"{access.registers} registers")
    return access


def tensor_load(g: Any, access: Access, rows: Any, address: Array, mask: Array | None) -> None:
    """tcgen05.ld."""
    tensor_memory.load(g, access, rows, address, whole_warps(g, mask))


def tensor_store(g: Any, access: Access, rows: Any, address: Array, mask: Array | None) -> None:
    """tcgen05.st."""
    tensor_memory.store(g, access, rows, address, whole_warps(g, mask))


@instruction("tcgen05.ld", section="9.7.16.8.1", forms="32x32b 16x64b 16x128b 16x256b 16x32bx2, every number, pack::16b")
@instruction("tcgen05.st", section="9.7.16.8.2", forms="32x32b 16x64b 16x128b 16x256b 16x32bx2, every number, unpack::16b")
def _move(e: Emitter, op: Op, mods: Mods) -> None:
    loads = op.mods[0] == "ld"
    _aligned(mods)
    mods.type("b32")
    access = _access(mods, "pack::16b" if loads else "unpack::16b")
    registers, address, *split = op.operands if loads else (op.operands[-1], *op.operands[:-1])
    if (access.shape == "16x32bx2") != bool(split):
        raise mods.unsupported("16x32bx2 and only it has a distance of the halves")
    if split:
        access = Access(access.shape, access.times, access.packed, _constant(mods, split[0]))
    rows = _rows(mods, e.items(registers), access.registers)
    e.count("tensor", 4 * access.registers)
    function = e.helper(tensor_load if loads else tensor_store)
    e.line(f"{function}(g, {e.fixed(access)}, {e.fixed(rows)}, {e.address(address, 32)}, {e.masked})")


def reduce_rows(g: Any, rows: Any, type_: str, largest: bool, magnitude: bool, nan: bool) -> Array:
    """The least or greatest of a thread's registers, as bits."""
    values = g.R32[rows].view({"f32": np.float32, "u32": np.uint32, "s32": np.int32}[type_])
    values = np.abs(values) if magnitude else values
    if type_ != "f32":
        return np.asarray((np.max if largest else np.min)(values, axis=0).view(np.uint32))
    result = values[0]
    for row in values[1:]:
        result = minmax(result, row, nan, largest)
    return np.asarray(result.view(np.uint32))


@instruction("tcgen05.ld.red", section="9.7.16.8.1", forms="sm_103a: 32x32b, min max of f32 (abs, NaN), u32, s32")
def _load_reduce(e: Emitter, op: Op, mods: Mods) -> None:
    _aligned(mods)
    type_ = mods.type("f32", "u32", "s32")
    access = _access(mods, "")
    name, magnitude, nan = mods.take("min", "max"), bool(mods.take("abs")), bool(mods.take("NaN"))
    if access.shape != "32x32b" or access.times == 1 or not name or (type_ != "f32" and (magnitude or nan)):
        raise mods.unsupported()
    registers, result, address = op.operands
    rows = _rows(mods, e.items(registers), access.registers)
    e.count("tensor", 4 * access.registers)
    fixed = e.fixed(rows)
    e.line(f"{e.helper(tensor_load)}(g, {e.fixed(access)}, {fixed}, {e.address(address, 32)}, {e.masked})")
    e.assign(result, "b32", f"{e.helper(reduce_rows)}(g, {fixed}, {type_!r}, {name == 'max'}, {magnitude}, {nan})")


@instruction("tcgen05.wait::ld", "tcgen05.wait::st", section="9.7.16.8.3", forms="loads and stores of tensor memory are done at once")
def _wait(e: Emitter, op: Op, mods: Mods) -> None:
    _aligned(mods)
    e.line(f"{e.helper(whole_warps)}(g, {e.masked})")
    if e.sites is not None:
        e.line(f"g.cta.hazards.tensor.waited(g, {op.mods[0] == 'wait::st'}, {e.masked})")


@instruction("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync", section="9.7.16.11.1", forms="change no value")
def _fence(e: Emitter, op: Op, mods: Mods) -> None:
    if e.sites is not None:
        e.line(f"g.cta.hazards.tensor.fence(g, {op.mods[0] == 'fence::before_thread_sync'}, {e.masked})")


# Multiplication


def start_mma(g: Any, op: Op, static: tuple[str, int, bool, int], values: tuple[Array, ...], mask: Array | None) -> None:
    """tcgen05.mma, once for each lane that executes it.

    ``static`` is (kind, cta_group, A in tensor memory, scale-input-d), ``values`` D, A, B, instruction descriptor, enable-input-d and
    the words of disable-output-lane.
    """
    kind, group, in_memory, scale = static
    for lane in range(g.n) if mask is None else np.flatnonzero(mask).tolist():
        d, a, b, descriptor, enable, *disabled = (int(v[lane if len(v) > 1 else 0]) for v in values)
        words = tuple(disabled) if any(disabled) else ()
        try:
            form = decode_instruction(descriptor, kind, group)
            issue(g.cta, Multiply(form, d, a, b, in_memory, bool(enable), scale, words, g.issuer(op, lane)))
        except FaultError as fault:
            lanes = np.arange(g.n) == lane
            raise FaultError(fault.error, fault.message, lanes) from None


@instruction(
    "tcgen05.mma",
    section="9.7.16.10.9.1",
    forms="kind::f16 tf32 f8f6f4 (e4m3 e5m2) i8; cta_group::1 with M 64 128, cta_group::2 with M 128 256; A in shared or tensor memory, "
    "disable-output-lane, enable-input-d, scale-input-d; collector hints; swizzles of sm_100 descriptors without base offset",
)
def _mma(e: Emitter, op: Op, mods: Mods) -> None:
    group = _group(mods)
    kind = mods.take("kind::f16", "kind::tf32", "kind::f8f6f4", "kind::i8").removeprefix("kind::")
    if not kind:
        raise mods.unsupported("kind")
    mods.ignore("collector::a::")
    d, a, b, descriptor, *rest = op.operands
    disabled = e.items(rest.pop(0)) if isinstance(rest[0], Tuple) else ()
    scale = _constant(mods, rest[1]) if len(rest) == 2 else 0
    if len(disabled) not in (0, 4 * group) or len(rest) > 2 or not 0 <= scale < 16 or (scale and kind not in ("f16", "tf32")):
        raise mods.unsupported("operands")
    in_memory = isinstance(a, Address)
    values = [
        e.address(d, 32),
        e.address(a, 32) if in_memory else e.source(a, "b64"),
        e.source(b, "b64"),
        e.source(descriptor, "b32"),
        e.source(rest[0], "pred"),
        *(e.source(o, "b32") for o in disabled),
    ]
    static = e.fixed((kind, group, in_memory, scale))
    e.line(f"{e.helper(start_mma)}(g, {e.fixed(op)}, {static}, ({', '.join(values)}), {e.masked})")


def commit(g: Any, op: Op, group: int, address: Array, targets: Array | None, mask: Array | None) -> None:
    """tcgen05.commit: one arrival when all that the tensor core was given before is done; ``targets``: in all these CTAs of the cluster."""
    for lane in range(g.n) if mask is None else np.flatnonzero(mask).tolist():
        g.cta.unit(TensorMemory).use_group(group)
        who = g.issuer(op, lane)
        at = int(address[lane if len(address) > 1 else 0])
        cta, offset = g.shared_of(at)
        ranks = [cta.rank] if targets is None else _ranks(int(targets[lane if len(targets) > 1 else 0]), len(cta.cluster.ctas))
        if g.cta.hazards is not None:
            for rank in ranks:
                g.cta.hazards.signalling(who, cta.cluster.ctas[rank].mbarriers.at(offset), PIPE)
        g.cta.engine("tcgen05").push(partial(_arrive, cta.cluster.ctas, ranks, offset, who), who)


def _ranks(bits: int, count: int) -> list[int]:
    ranks = [i for i in range(16) if bits >> i & 1]
    if not ranks or ranks[-1] >= count:
        raise FaultError(TensorMemoryError, f"multicast to CTAs {ranks} of a cluster of {count}")
    return ranks


def _arrive(ctas: Any, ranks: list[int], offset: int, who: Issuer) -> None:
    hazards = who.cta.hazards
    clock = None if hazards is None else hazards.tensor.committed(who.cta)
    for rank in ranks:
        mbarrier = ctas[rank].mbarriers.at(offset)
        if hazards is not None and clock is not None and mbarrier.cta is not who.cta:
            hazards.committed(mbarrier, who, clock)
        mbarrier.arrive(1, who, clock)


@ending(
    "tcgen05.commit",
    section="9.7.16.12.1",
    forms="cta_group::1 cta_group::2, mbarrier::arrive::one, shared::cluster, multicast::cluster",
)
def _commit(e: Emitter, op: Op, mods: Mods) -> None:
    group = _group(mods)
    mods.type("b64")
    multicast = mods.take("multicast::cluster")
    if not mods.take("mbarrier::arrive::one") or not mods.take("shared::cluster") or len(op.operands) != 1 + bool(multicast):
        raise mods.unsupported()
    targets = e.source(op.operands[1], "u16") if multicast else "None"
    e.line(f"{e.helper(commit)}(g, {e.fixed(op)}, {group}, {e.address(op.operands[0], 32)}, {targets}, {e.masked})")
