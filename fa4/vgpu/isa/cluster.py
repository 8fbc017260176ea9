"""Clusters: the barrier of all their threads, and addresses in the shared memory of their CTAs (PTX ISA 9.7.9.21 to 9.7.9.23, 9.7.13.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.errors import OutOfBoundsError
from fa4.vgpu.isa.registry import Mods, ending, instruction
from fa4.vgpu.memory import RANK_SHIFT, WINDOW_SHIFT, WINDOWS, FaultError, spread
from fa4.vgpu.program import Op

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]


@ending("barrier.cluster", section="9.7.13.4", forms="arrive (release relaxed), wait (acquire), aligned or not")
def _barrier(e: Emitter, op: Op, mods: Mods) -> None:
    kind = mods.take("arrive", "wait")
    how = mods.take(*(("release", "relaxed") if kind == "arrive" else ("acquire",)))
    aligned = bool(mods.take("aligned"))
    if not kind:
        raise mods.unsupported()
    relaxed = f"{how == 'relaxed'}, " if kind == "arrive" else ""
    e.line(f"g.cta.cluster.barrier.{kind}(g, {aligned}, {relaxed}{e.masked})")


def map_address(g: Any, address: Array, rank: Array, mask: Array | None) -> Array:
    """Mapa: the same offset in the CTA ``rank`` of the cluster; generic addresses (64 bits) keep their window."""
    bad = spread(rank >= len(g.cta.cluster.ctas), g.n)
    bad = bad if mask is None else bad & mask
    if bad.any():
        first = int(spread(rank, g.n)[bad.argmax()])
        raise FaultError(OutOfBoundsError, f"CTA {first} of a cluster of {len(g.cta.cluster.ctas)}", bad)
    kind = address.dtype.type
    return np.asarray(address & ~kind(0xFF << RANK_SHIFT) | (rank.astype(address.dtype) << kind(RANK_SHIFT)))


@instruction("mapa", section="9.7.9.22", forms="shared::cluster or generic, u32 u64")
def _mapa(e: Emitter, op: Op, mods: Mods) -> None:
    type_ = mods.type("u32", "u64")
    mods.take("shared::cluster")
    d, a, rank = op.operands
    e.assign(d, type_, f"{e.helper(map_address)}(g, {e.source(a, type_)}, {e.source(rank, 'u32')}, {e.masked})")


def rank_of(g: Any, address: Array, mask: Array | None) -> Array:
    """Getctarank: which CTA of the cluster a shared address lies in."""
    if address.dtype.itemsize == 8:
        bad = spread(address >> np.uint64(WINDOW_SHIFT) != WINDOWS["shared"] >> WINDOW_SHIFT, g.n)
        bad = bad if mask is None else bad & mask
        if bad.any():
            raise FaultError(OutOfBoundsError, "a generic address that is not in shared memory", bad)
    return np.asarray((address >> address.dtype.type(RANK_SHIFT)).astype(np.uint32) & np.uint32(0xFF))


@instruction("getctarank", section="9.7.9.23", forms="shared::cluster or generic, u32 u64")
def _rank(e: Emitter, op: Op, mods: Mods) -> None:
    type_ = mods.type("u32", "u64")
    space = mods.take("shared::cluster")
    source = e.source(op.operands[1], type_)
    mask = "None" if space and type_ == "u32" else e.masked
    if space and type_ == "u64":
        source = f"{source}.astype(np.uint32)"
    e.assign(op.operands[0], "u32", f"{e.helper(rank_of)}(g, {source}, {mask})")
