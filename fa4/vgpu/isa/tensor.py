"""TMA: boxes of tensors, in tile mode (PTX ISA 9.7.9.25.5): every lane that executes moves a box on its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu import tensor_map
from fa4.vgpu.bulk import BulkGroups, Store, start_load
from fa4.vgpu.errors import MisalignedError, TensorMapError
from fa4.vgpu.isa.bulk import MULTICAST, SIGNAL, at, blame, lanes_of, targets
from fa4.vgpu.isa.mbarrier import check_own
from fa4.vgpu.isa.registry import Mods, ending
from fa4.vgpu.memory import RANK_SHIFT, FaultError
from fa4.vgpu.program import Address, Op, Operand, Tuple
from fa4.vgpu.tensor_map import TensorMap
from fa4.vgpu.tma import REDUCTIONS, box_view, load_box, reduction_fits, store_box

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]
Coordinates = tuple[Array, ...]

_SPACES = ("shared::cluster", "shared::cta")
_OFFSET = (1 << RANK_SHIFT) - 1


def map_at(g: Any, address: int, rank: int) -> TensorMap:
    """The tensor map at a generic address, for a box with ``rank`` coordinates.

    Raises:
        FaultError: there is none, it is invalid, or has another rank.
    """
    if address % 64:
        raise FaultError(TensorMapError, f"tensor map at {address:#x}: must be a multiple of 64")
    data = g.bytes_at(address, tensor_map.MAP_BYTES)
    maps = g.cta.launch.maps
    found: TensorMap | None = maps.get(data)
    if found is None:
        try:
            found = tensor_map.decode(data)
        except ValueError as error:
            raise FaultError(TensorMapError, f"at {address:#x}: {error}") from None
        problem = found.problem()
        if problem:
            raise FaultError(TensorMapError, f"tensor map at {address:#x}: {problem}")
        maps[data] = found
    if found.rank != rank:
        raise FaultError(TensorMapError, f"a box with {rank} coordinates of a tensor map of rank {found.rank}")
    return found


def _box_in_shared(map_: TensorMap, address: int) -> None:
    """A box begins at a multiple of 128 bytes."""
    if address % 128:
        raise FaultError(MisalignedError, f"a box at shared address {address:#x}, which is not a multiple of 128")


def load_tensor(
    g: Any, op: Op, where: tuple[Array, Array, Array], start: Coordinates, ctas: tuple[Array | None, int], mask: Array | None
) -> None:
    """To shared memory; ``where`` is (destination, map, mbarrier), ``ctas`` (multicast mask, cta_group)."""
    to, maps, signal = where
    for lane in lanes_of(g, mask):
        issuer = g.issuer(op, lane)
        teller_address = at(signal, lane)
        try:
            map_ = map_at(g, at(maps, lane), len(start))
            _box_in_shared(map_, at(to, lane))
            corner = tuple(at(c, lane) for c in start)
            box_view(map_, corner, g.memory, False)
            several = None if ctas[0] is None else at(ctas[0], lane)
            for cta, offset, teller in targets(g, at(to, lane), teller_address, several, ctas[1]):
                fetch = partial(load_box, map_, corner, offset, g.memory)
                start_load(cta, (offset, map_.box_bytes), (teller, teller_address & _OFFSET), fetch, issuer)
        except FaultError as fault:
            raise blame(fault, g, lane) from None


def store_tensor(g: Any, op: Op, where: Coordinates, start: Coordinates, operation: str, mask: Array | None) -> None:
    """From shared memory, or combined with what is there; ``where`` is (map, source)."""
    maps, source = where
    for lane in lanes_of(g, mask):
        try:
            map_ = map_at(g, at(maps, lane), len(start))
            if operation and not reduction_fits(operation, map_.type):
                raise FaultError(TensorMapError, f"reduction {operation} of a tensor map of {map_.type}")
            begin = at(check_own(g, np.array([at(source, lane)], np.uint32), None), 0)
            _box_in_shared(map_, begin)
            corner, offset = tuple(at(c, lane) for c in start), begin & _OFFSET
            box_view(map_, corner, g.memory, True)
            g.cta.shared.check_written(offset, map_.box_bytes)
        except FaultError as fault:
            raise blame(fault, g, lane) from None
        fetch = partial(g.cta.shared.read, offset, map_.box_bytes)
        put = partial(_put, map_, corner, offset, (g.memory, operation))
        g.cta.unit(BulkGroups).start(Store(fetch, put, g.issuer(op, lane), (offset, map_.box_bytes)))


def _put(map_: TensorMap, corner: tuple[int, ...], offset: int, target: Any, data: Array) -> None:
    store_box(map_, corner, offset, data, target)


def prefetch_tensor(g: Any, maps: Array, start: Coordinates, mask: Array | None) -> None:
    """A prefetch changes nothing, but its addresses must exist."""
    for lane in lanes_of(g, mask):
        try:
            map_ = map_at(g, at(maps, lane), len(start))
            box_view(map_, tuple(at(c, lane) for c in start), g.memory, False)
        except FaultError as fault:
            raise blame(fault, g, lane) from None


def _tensor(e: Emitter, o: Operand, mods: Mods) -> tuple[str, str]:
    """[map, {coordinates}] as (address, tuple of coordinates)."""
    rank = int((mods.take("1d", "2d", "3d", "4d", "5d") or "0d")[0])
    if not isinstance(o, Address) or len(o.extra) != 1:
        raise mods.unsupported("operands")
    items = o.extra[0].items if isinstance(o.extra[0], Tuple) else (o.extra[0],)
    if len(items) != rank:
        raise mods.unsupported(f"{len(items)} coordinates")
    return e.address(o, 64), "(" + "".join(f"{e.source(item, 's32')}, " for item in items) + ")"


def _mode(mods: Mods) -> None:
    if any(m.startswith(("im2col", "tile::")) for m in mods.left):
        raise mods.unsupported("only tile mode is modelled: no im2col, gather4 or scatter4")
    mods.take("tile")


@ending(
    "cp.async.bulk.tensor",
    section="9.7.9.25.5.2",
    forms="1d to 5d, tile; loads to shared::cta and shared::cluster (multicast, cta_group), stores; cache hints",
)
def _copy(e: Emitter, op: Op, mods: Mods) -> None:
    _mode(mods)
    operands = list(op.operands)
    if mods.take("L2::cache_hint"):
        operands.pop()
    if "bulk_group" in mods.left:
        for word in ("global", "shared::cta", "bulk_group"):
            if not mods.take(word):
                raise mods.unsupported()
        if len(operands) != 2:
            raise mods.unsupported("operands")
        map_, start = _tensor(e, operands[0], mods)
        e.line(f"{e.helper(store_tensor)}(g, {e.fixed(op)}, ({map_}, {e.address(operands[1], 32)}), {start}, '', {e.masked})")
        return
    if not (mods.take(*_SPACES) and mods.take("global") and mods.take(SIGNAL)):
        raise mods.unsupported()
    several = bool(mods.take(MULTICAST))
    group = 2 if mods.take("cta_group::1", "cta_group::2") == "cta_group::2" else 1
    if len(operands) != 3 + several:
        raise mods.unsupported("operands")
    to, tensor, signal = operands[:3]
    map_, start = _tensor(e, tensor, mods)
    ctas = f"({e.source(operands[3], 'u16') if several else 'None'}, {group})"
    where = f"({e.address(to, 32)}, {map_}, {e.address(signal, 32)})"
    e.line(f"{e.helper(load_tensor)}(g, {e.fixed(op)}, {where}, {start}, {ctas}, {e.masked})")


@ending("cp.reduce.async.bulk.tensor", section="9.7.9.25.5.3", forms="1d to 5d, tile; add min max inc dec and or xor; cache hints")
def _reduce(e: Emitter, op: Op, mods: Mods) -> None:
    _mode(mods)
    operands = list(op.operands)
    if mods.take("L2::cache_hint"):
        operands.pop()
    operation = mods.take(*REDUCTIONS)
    for word in ("global", "shared::cta", "bulk_group"):
        if not mods.take(word):
            raise mods.unsupported()
    if not operation or len(operands) != 2:
        raise mods.unsupported()
    map_, start = _tensor(e, operands[0], mods)
    e.line(f"{e.helper(store_tensor)}(g, {e.fixed(op)}, ({map_}, {e.address(operands[1], 32)}), {start}, {operation!r}, {e.masked})")


@ending("cp.async.bulk.prefetch.tensor", section="9.7.9.25.5.4", forms="1d to 5d, L2.global, tile: addresses are checked")
def _prefetch(e: Emitter, op: Op, mods: Mods) -> None:
    _mode(mods)
    operands = list(op.operands)
    if mods.take("L2::cache_hint"):
        operands.pop()
    if not (mods.take("L2") and mods.take("global")) or len(operands) != 1:
        raise mods.unsupported()
    map_, start = _tensor(e, operands[0], mods)
    e.line(f"{e.helper(prefetch_tensor)}(g, {map_}, {start}, {e.masked})")
