"""clusterlaunchcontrol: requests for clusters that have not started, and what their answers say (PTX ISA 9.7.13.18, 9.7.13.19)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from fa4.vgpu.errors import MisalignedError
from fa4.vgpu.isa.bulk import SIGNAL, at, blame, lanes_of
from fa4.vgpu.isa.mbarrier import check_own, from_generic
from fa4.vgpu.isa.registry import Mods, ending, instruction
from fa4.vgpu.launch_control import ANSWER_BYTES, first_ctaid, is_canceled, request
from fa4.vgpu.memory import RANK_SHIFT, FaultError
from fa4.vgpu.program import Op, Tuple

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]

_OFFSET = (1 << RANK_SHIFT) - 1


def try_cancel(g: Any, op: Op, to: Array, signal: Array, multicast: bool, mask: Array | None) -> None:
    """Each lane that executes makes a request."""
    for lane in lanes_of(g, mask):
        where = at(to, lane) & _OFFSET
        try:
            if where % ANSWER_BYTES:
                raise FaultError(MisalignedError, f"the answer's shared address {where:#x} is not a multiple of {ANSWER_BYTES}")
            request(g.cta, where, at(signal, lane) & _OFFSET, multicast, g.issuer(op, lane))
        except FaultError as fault:
            raise blame(fault, g, lane) from None


@ending(
    "clusterlaunchcontrol.try_cancel",
    section="9.7.13.18",
    forms="async, shared::cta or generic, multicast::cluster::all; an error after the CTA has seen a request fail",
)
def _try_cancel(e: Emitter, op: Op, mods: Mods) -> None:
    mods.type("b128")
    shared, multicast = mods.take("shared::cta"), bool(mods.take("multicast::cluster::all"))
    if not mods.take("async") or not mods.take(SIGNAL):
        raise mods.unsupported()
    addresses = [e.address(o, 32 if shared else 64) for o in op.operands]
    if not shared:
        addresses = [f"{e.helper(from_generic)}(g, {address}, {e.masked})" for address in addresses]
    to, signal = (f"{e.helper(check_own)}(g, {address}, {e.masked})" for address in addresses)
    e.line(f"{e.helper(try_cancel)}(g, {e.fixed(op)}, {to}, {signal}, {multicast}, {e.masked})")


@instruction(
    "clusterlaunchcontrol.query_cancel",
    section="9.7.13.19",
    forms="is_canceled, get_first_ctaid::x ::y ::z and v4; of a request that failed only is_canceled",
)
def _query_cancel(e: Emitter, op: Op, mods: Mods) -> None:
    d, answer = op.operands
    if not isinstance(answer, Tuple):
        raise mods.unsupported("operands")
    low, high = (e.source(item, "u64") for item in answer.items)
    if mods.take("is_canceled"):
        if mods.types != ["pred", "b128"]:
            raise mods.unsupported()
        e.assign(d, "pred", e.temporary(f"{e.helper(is_canceled)}(g, {low}, {high}, {e.masked})"))
        return
    which = mods.take("get_first_ctaid", *(f"get_first_ctaid::{axis}" for axis in "xyz"))
    vector = bool(mods.take("v4"))
    if not which or vector != (which == "get_first_ctaid") or mods.types != ["b32", "b128"]:
        raise mods.unsupported()
    axes = "xyz" if vector else which[-1]
    found = e.temporary(f"{e.helper(first_ctaid)}(g, {low}, {high}, {axes!r}, {e.masked})")
    items = e.items(d)
    if len(items) != (4 if vector else 1):
        raise mods.unsupported("operands")
    values = [f"{found}[{i}]" for i in range(len(axes))]
    values += [e.constant(0xFFFFFFFF, "uint32")] * vector  # undefined
    for item, value in zip(items, values, strict=True):
        e.assign(item, "b32", value)
