"""Bulk copies without a tensor map, and bulk groups (PTX ISA 9.7.9.25.4): every lane that executes copies on its own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.bulk import LOADS, BulkGroups, Store, start_load
from fa4.vgpu.errors import MisalignedError, OutOfBoundsError
from fa4.vgpu.isa.mbarrier import check_own
from fa4.vgpu.isa.registry import Mods, ending
from fa4.vgpu.lexer import integer
from fa4.vgpu.memory import RANK_SHIFT, FaultError, GlobalMemory
from fa4.vgpu.program import Immediate, Op, Operand
from fa4.vgpu.tma import REDUCTIONS, reduced, reduction_fits

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter
    from fa4.vgpu.state import Cta

Array = npt.NDArray[Any]

MULTICAST = "multicast::cluster"
SIGNAL = "mbarrier::complete_tx::bytes"


def lanes_of(g: Any, mask: Array | None) -> Iterator[int]:
    """Lanes of the gang that execute."""
    return iter(range(g.n) if mask is None else np.flatnonzero(mask).tolist())


def at(values: Array, lane: int) -> int:
    """The value of one lane."""
    return int(values[lane] if values.size > 1 else values[0])


def blame(fault: FaultError, g: Any, lane: int) -> FaultError:
    """The fault, of one lane."""
    if fault.lanes is None or fault.lanes.size != g.n:
        fault.lanes = np.zeros(g.n, bool)
        fault.lanes[lane] = True
    return fault


def aligned(what: str, value: int, align: int) -> None:
    """An address or size must be a multiple of ``align``."""
    if value % align:
        raise FaultError(MisalignedError, f"{what} {value:#x} of a bulk copy is not a multiple of {align}")


def targets(g: Any, to: int, signal: int, mask: int | None, group: int) -> list[tuple[Cta, int, Cta]]:
    """(CTA to write to, offset, CTA whose mbarrier to tell) of every copy that a load makes.

    With ``mask`` the same offsets in every CTA of it. The mbarrier is in the CTA that gets the data, or with cta_group::2 in that CTA of
    its pair which has the parity of the CTA of the mbarrier operand.
    """
    cta, offset = g.shared_of(to)
    ctas = g.cta.cluster.ctas
    teller = signal >> RANK_SHIFT
    if group != 2 and teller != cta.rank:
        raise FaultError(OutOfBoundsError, f"the data goes to CTA {cta.rank} of the cluster, the mbarrier is in CTA {teller}")
    if mask is None:
        if group == 2 and teller >> 1 != cta.rank >> 1:
            raise FaultError(
                OutOfBoundsError, f"the data goes to CTA {cta.rank} of the cluster, the mbarrier is in CTA {teller}, of another pair"
            )
        chosen = [cta.rank]
    else:
        if not 0 < mask < 1 << len(ctas):
            raise FaultError(OutOfBoundsError, f"a copy to CTAs {mask:#b} of a cluster of {len(ctas)}")
        chosen = [rank for rank in range(len(ctas)) if mask >> rank & 1]
    return [(ctas[rank], offset, ctas[rank & ~1 | teller & 1] if group == 2 else ctas[rank]) for rank in chosen]


def global_bytes(memory: GlobalMemory, address: int, size: int, write: bool = False) -> Array:
    """Bytes of global memory, as a view, to be read or written."""
    buffer = memory.find(address, size)
    if buffer is None:
        raise memory.outside(np.array([address], np.uint64), size, None)
    if memory.sharing is not None:
        memory.sharing.box(buffer, address, (size,), (1,), write)
    view: Array = buffer.data[address - buffer.address :][:size]
    return view


def load(g: Any, op: Op, to: Array, source: Array, size: Array, signal: Array, cta_mask: Array | None, mask: Array | None) -> None:
    """From global memory or the CTA's own shared memory to shared memory."""
    from_shared = "shared::cta" in op.mods[3:]
    for lane in lanes_of(g, mask):
        issuer = g.issuer(op, lane)
        count, begin = at(size, lane), at(source, lane)
        try:
            for what, value in (("destination", at(to, lane)), ("source", begin), ("size", count)):
                aligned(what, value, 16)
            if from_shared:
                begin = at(check_own(g, np.array([begin], np.uint32), None), 0) & (1 << RANK_SHIFT) - 1
                g.cta.shared.check_written(begin, count)
                if g.cta.hazards is not None:
                    cells = g.cta.hazards.range_of(begin, count)
                    g.cta.hazards.check_published(g.cta, cells, g.cta.hazards.snapshot(issuer), "a bulk copy")
                fetch = partial(g.cta.shared.read, begin, count)
            else:
                global_bytes(g.memory, begin, count)
                fetch = partial(global_bytes, g.memory, begin, count)
            ctas = None if cta_mask is None else at(cta_mask, lane)
            for cta, offset, teller in targets(g, at(to, lane), at(signal, lane), ctas, 1):
                teller_at = teller, at(signal, lane) & (1 << RANK_SHIFT) - 1
                start_load(cta, (offset, count), teller_at, fetch, issuer, (begin, count) if from_shared else None)
        except FaultError as fault:
            raise blame(fault, g, lane) from None


def store(g: Any, op: Op, to: Array, source: Array, size: Array, how: tuple[str, str], mask: Array | None) -> None:
    """From shared to global memory, or combined with what is there; ``how`` is (operation, type)."""
    for lane in lanes_of(g, mask):
        count, begin, target = at(size, lane), at(source, lane), at(to, lane)
        try:
            for what, value in (("destination", target), ("source", begin), ("size", count)):
                aligned(what, value, 16)
            begin = at(check_own(g, np.array([begin], np.uint32), None), 0) & (1 << RANK_SHIFT) - 1
            g.cta.shared.check_written(begin, count)
            buffer = g.memory.find(target, count)
            global_bytes(g.memory, target, count, write=True)
            if not buffer.writable:
                raise FaultError(OutOfBoundsError, f"a write to buffer {buffer.name!r}, which is read-only")
        except FaultError as fault:
            raise blame(fault, g, lane) from None
        put = partial(_put, partial(global_bytes, g.memory, target, count, write=True), how)
        try:
            move = Store(partial(g.cta.shared.read, begin, count), put, g.issuer(op, lane), (begin, count))
            if g.cta.launch.sums is not None and how[0] == "add" and "f" in how[1]:
                move.addition = buffer, target
            g.cta.unit(BulkGroups).start(move)
        except FaultError as fault:
            raise blame(fault, g, lane) from None


def _put(target: Any, how: tuple[str, str], data: Array) -> None:
    operation, type_ = how
    view = target()
    if operation:
        size = {"f16": 2, "bf16": 2}.get(type_) or int(type_[1:].split(".")[0]) // 8
        data = reduced(operation, type_, view.view(f"u{size}"), data.view(f"u{size}")).view(np.uint8)
    view[:] = data


def add_shared(g: Any, op: Op, to: Array, source: Array, size: Array, signal: Array, how: tuple[str, str], mask: Array | None) -> None:
    """A reduction from own to another CTA's shared memory."""
    for lane in lanes_of(g, mask):
        issuer, count = g.issuer(op, lane), at(size, lane)
        try:
            for what, value in (("destination", at(to, lane)), ("source", at(source, lane)), ("size", count)):
                aligned(what, value, 16)
            begin = at(check_own(g, source, mask), lane) & (1 << RANK_SHIFT) - 1
            ((cta, offset, teller),) = targets(g, at(to, lane), at(signal, lane), None, 1)
            where = at(signal, lane) & (1 << RANK_SHIFT) - 1
            mbarrier = teller.mbarriers.at(where)
            g.cta.shared.check_written(begin, count)
            cta.shared.check_written(offset, count)
            hazards = g.cta.hazards
            ticket = None
            if hazards is not None:
                ticket = hazards.signalling(issuer, mbarrier, (LOADS, where))
                hazards.check_published(g.cta, hazards.range_of(begin, count), ticket.issued, "a bulk reduction")
        except FaultError as fault:
            raise blame(fault, g, lane) from None

        tell = teller, where, issuer, ticket

        def run(cta: Cta = cta, offset: int = offset, begin: int = begin, count: int = count, tell: Any = tell) -> None:
            target = cta.shared.data[cta.shared.stretch(offset, count)]
            _put(lambda: target, how, g.cta.shared.read(begin, count))
            clock = None
            if tell[3] is not None:
                g.cta.hazards.bytes_sent(tell[3], g.cta, (begin, count))
                clock = g.cta.hazards.bytes_moved(tell[3], cta, (offset, count), write=True)
            tell[0].mbarriers.at(tell[1]).complete_bytes(count, tell[2], clock)

        teller.engine((LOADS, where), ordered=False).push(run, issuer)


def _operands(op: Op, mods: Mods, count: int) -> tuple[list[Operand], list[Operand]]:
    """The first ``count`` operands, and those that the modifiers say follow; the cache policy last, which means nothing here."""
    rest = list(op.operands[count:])
    if mods.take("L2::cache_hint"):
        rest.pop()
    if len(rest) != (MULTICAST in op.mods):
        raise mods.unsupported("operands")
    mods.take(MULTICAST)
    return list(op.operands[:count]), rest


_FORMS = "global to shared::cta and shared::cluster (multicast), shared::cta to shared::cluster and global; cache hints"


@ending("cp.async.bulk", section="9.7.9.25.4.1", forms=_FORMS)
def _copy(e: Emitter, op: Op, mods: Mods) -> None:
    target, source = op.mods[2:4]
    for name in (target, source):
        mods.take(name)
    if target == "global":
        if not mods.take("bulk_group"):
            raise mods.unsupported()
        (to, begin, size), _ = _operands(op, mods, 3)
        values = f"{e.address(to, 64)}, {e.address(begin, 32)}, {e.source(size, 'u32')}"
        e.line(f"{e.helper(store)}(g, {e.fixed(op)}, {values}, ('', ''), {e.masked})")
        return
    if target not in ("shared::cluster", "shared::cta") or source not in ("global", "shared::cta") or not mods.take(SIGNAL):
        raise mods.unsupported()
    (to, begin, size, signal), rest = _operands(op, mods, 4)
    values = f"{e.address(to, 32)}, {e.address(begin, 64 if source == 'global' else 32)}, {e.source(size, 'u32')}, {e.address(signal, 32)}"
    multicast = e.source(rest[0], "u16") if rest else "None"
    e.line(f"{e.helper(load)}(g, {e.fixed(op)}, {values}, {multicast}, {e.masked})")


@ending(
    "cp.reduce.async.bulk",
    section="9.7.9.25.4.2",
    forms="shared::cta to global and shared::cluster; add min max inc dec and or xor; cache hints",
)
def _reduce(e: Emitter, op: Op, mods: Mods) -> None:
    target, source = op.mods[3:5]
    for name in (target, source):
        mods.take(name)
    mods.take("noftz")
    operation, type_ = mods.take(*REDUCTIONS), mods.type()
    if source != "shared::cta" or not operation or not reduction_fits(operation, type_):
        raise mods.unsupported()
    how = operation, type_
    if target == "global" and mods.take("bulk_group"):
        (to, begin, size), _ = _operands(op, mods, 3)
        values = f"{e.address(to, 64)}, {e.address(begin, 32)}, {e.source(size, 'u32')}"
        e.line(f"{e.helper(store)}(g, {e.fixed(op)}, {values}, {how}, {e.masked})")
    elif target == "shared::cluster" and mods.take(SIGNAL) and type_ in ("u32", "s32", "u64", "s64", "b32", "b64"):
        (to, begin, size, signal), _ = _operands(op, mods, 4)
        values = f"{e.address(to, 32)}, {e.address(begin, 32)}, {e.source(size, 'u32')}, {e.address(signal, 32)}"
        e.line(f"{e.helper(add_shared)}(g, {e.fixed(op)}, {values}, {how}, {e.masked})")
    else:
        raise mods.unsupported()


def prefetch(g: Any, source: Array, size: Array, mask: Array | None) -> None:
    """A prefetch changes nothing, but its addresses must exist."""
    for lane in lanes_of(g, mask):
        try:
            for what, value in (("source", at(source, lane)), ("size", at(size, lane))):
                aligned(what, value, 16)
            global_bytes(g.memory, at(source, lane), at(size, lane))
        except FaultError as fault:
            raise blame(fault, g, lane) from None


@ending("cp.async.bulk.prefetch", section="9.7.9.25.4.3", forms="L2.global: addresses are checked")
def _prefetch(e: Emitter, op: Op, mods: Mods) -> None:
    if not (mods.take("L2") and mods.take("global")):
        raise mods.unsupported()
    (source, size), _ = _operands(op, mods, 2)
    e.line(f"{e.helper(prefetch)}(g, {e.address(source, 64)}, {e.source(size, 'u32')}, {e.masked})")


def commit_group(g: Any, mask: Array | None) -> None:
    """Each lane closes its group."""
    groups = g.cta.unit(BulkGroups)
    for lane in lanes_of(g, mask):
        groups.commit(32 * g.first + lane, g.site)


def wait_group(g: Any, keep: int, read: bool, mask: Array | None) -> None:
    """Each lane waits for its groups but the newest ``keep``: here this makes them complete."""
    groups = g.cta.unit(BulkGroups)
    for lane in lanes_of(g, mask):
        groups.wait(32 * g.first + lane, keep, read, g.site)


@ending(
    "cp.async.bulk.commit_group", "cp.async.bulk.wait_group", section="9.7.9.25.4.4, 9.7.9.25.4.5", forms="wait_group with and without read"
)
def _group(e: Emitter, op: Op, mods: Mods) -> None:
    if op.mods[2] == "commit_group":
        e.line(f"{e.helper(commit_group)}(g, {e.masked})")
        return
    count = op.operands[0]
    if not isinstance(count, Immediate):
        raise mods.unsupported()
    e.line(f"{e.helper(wait_group)}(g, {integer(count.text)}, {bool(mods.take('read'))}, {e.masked})")
