"""Stores and reductions in another CTA's shared memory that tell an mbarrier there (PTX ISA 9.7.9.12, 9.7.13.8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.errors import MisalignedError, OutOfBoundsError
from fa4.vgpu.isa.bulk import SIGNAL, at, blame, lanes_of
from fa4.vgpu.isa.loadstore import stack_lanes
from fa4.vgpu.isa.registry import Mods, ending
from fa4.vgpu.memory import FaultError
from fa4.vgpu.program import Op
from fa4.vgpu.tma import REDUCTIONS, reduced, reduction_fits

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]


def send(g: Any, op: Op, to: Array, value: Array, signal: Array, how: tuple[str, str], mask: Array | None) -> None:
    """Each lane sends its value; ``how`` is (operation or "", type)."""
    operation, type_ = how
    for lane in lanes_of(g, mask):
        issuer, data = g.issuer(op, lane), np.ascontiguousarray(value[lane]).reshape(-1)
        size = data.nbytes
        try:
            (cta, offset), (teller, where) = g.shared_of(at(to, lane)), g.shared_of(at(signal, lane))
            if teller is not cta:
                raise FaultError(OutOfBoundsError, f"the data goes to CTA {cta.rank} of the cluster, the mbarrier is in CTA {teller.rank}")
            if offset % size:
                raise FaultError(MisalignedError, f"shared address {at(to, lane):#x} is not a multiple of {size}")
            mbarrier = teller.mbarriers.at(where)
            if operation:
                cta.shared.check_written(offset, size)
            else:
                cta.shared.begin(offset, size)
            name = "st.async", where
            ticket = None if g.cta.hazards is None else g.cta.hazards.signalling(issuer, mbarrier, name)
        except FaultError as fault:
            raise blame(fault, g, lane) from None

        def run(cta: Any = cta, offset: int = offset, where: int = where, data: Array = data, who: Any = (issuer, ticket)) -> None:
            if operation:
                target = cta.shared.data[cta.shared.stretch(offset, data.nbytes)].view(data.dtype)
                target[...] = reduced(operation, type_, target, data)
            else:
                cta.shared.finish(offset, data.view(np.uint8))
            clock = None if who[1] is None else g.cta.hazards.bytes_moved(who[1], cta, (offset, data.nbytes), write=True)
            cta.mbarriers.at(where).complete_bytes(data.nbytes, who[0], clock)

        cta.engine(name, ordered=False).push(run, issuer)


@ending("st.async", section="9.7.9.12", forms="weak, shared::cluster; b u s f of 32 and 64 bits, v2 v4")
def _store(e: Emitter, op: Op, mods: Mods) -> None:
    type_ = mods.type("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64")
    mods.take("weak")
    mods.take("shared::cluster")
    vector = int((mods.take("v2", "v4") or "v1")[1:])
    items = e.items(op.operands[1])
    if not mods.take(SIGNAL) or len(items) != vector:
        raise mods.unsupported()
    kind = "u" + type_[1:]
    _emit(e, op, ("", kind), f"{e.helper(stack_lanes)}(g.n, {', '.join(e.source(item, kind) for item in items)})")


@ending("red.async", section="9.7.13.8", forms="relaxed cluster, shared::cluster; every operation on u32 s32 b32, add of u64")
def _reduce(e: Emitter, op: Op, mods: Mods) -> None:
    type_ = mods.type("u32", "s32", "u64", "b32")
    mods.take("relaxed")
    mods.take("cluster")
    mods.take("shared::cluster")
    operation = mods.take(*REDUCTIONS)
    if not mods.take(SIGNAL) or not operation or not reduction_fits(operation, type_) or (type_ == "u64" and operation != "add"):
        raise mods.unsupported()
    _emit(e, op, (operation, type_), f"{e.helper(stack_lanes)}(g.n, {e.source(op.operands[1], 'u' + type_[1:])})")


def _emit(e: Emitter, op: Op, how: tuple[str, str], value: str) -> None:
    to, _, signal = op.operands
    e.line(f"{e.helper(send)}(g, {e.fixed(op)}, {e.address(to, 32)}, {value}, {e.address(signal, 32)}, {how}, {e.masked})")
