"""Happens-before in global memory, also between clusters: by acquire and release on semaphores (PTX ISA 8.7 to 8.10).

Clocks of ``fa4.vgpu.hazards`` reach as far as a cluster. What a warp learns from another cluster, by an acquire that reads what that one
released, is kept as an event of the warp: whoever is behind the event in its own cluster has learnt it too.

Of every 4 bytes of a buffer that may be written: the last write, the last read and the last atomic access. Earlier reads are forgotten,
so that a race with one of them can be missed. What bulk copies read and write in global memory is not looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.clocks import SITES, Conflict, joined
from fa4.vgpu.errors import DataRaceError
from fa4.vgpu.memory import Buffer, FaultError

if TYPE_CHECKING:
    from fa4.vgpu.hazards import Hazards
    from fa4.vgpu.state import Gang

Array = npt.NDArray[Any]
Payload = dict[int, Array]
"""A clock for each cluster, by index."""

WRITE, READ, ATOMIC = range(3)
_NAMES = "write", "read", "atomic access"
_SCOPES = {"cta": 0, "cluster": 1, "gpu": 2, "sys": 2}


class GlobalShadow:
    """Of every cell of a buffer and each kind of access the last one: its cluster (-1: none), agent and stamp."""

    def __init__(self, cells: int) -> None:
        self.cluster = np.full((3, cells), -1, np.int32)
        self.agent = np.zeros((3, cells), np.int16)
        self.stamp = np.zeros((3, cells), np.int32)


class GlobalOrder:
    """What a launch did to global memory, and what was released where: by address, of each CTA the scope and what it knew."""

    def __init__(self) -> None:
        self.shadows: dict[int, GlobalShadow] = {}
        self.released: dict[int, dict[tuple[int, int], tuple[int, Payload]]] = {}

    def shadow(self, buffer: Buffer, shift: int) -> GlobalShadow:
        """The shadow of a buffer."""
        found = self.shadows.get(buffer.address)
        if found is None:
            found = self.shadows[buffer.address] = GlobalShadow((buffer.data.size >> shift) + 1)
        return found


def _same(buffer: Buffer, address: Array, size: int, data: Array) -> bool:
    """Whether writes change nothing."""
    at = (address - np.uint64(buffer.address)).astype(np.intp)[:, None] + np.arange(size)
    return bool((buffer.data[at] == np.ascontiguousarray(data).view(np.uint8).reshape(len(address), size)).all())


class Foreign:
    """What the warps of a cluster know of others."""

    def __init__(self, hazards: Hazards, order: GlobalOrder) -> None:
        self.hazards, self.order, self.index = hazards, order, hazards.cluster.index
        self.events: dict[int, list[tuple[int, int, Array]]] = {}
        self.fenced: dict[int, Payload] = {}
        self.pending: dict[int, list[Payload]] = {}

    def known(self, agent: int, cluster: int) -> Array | None:
        """What an agent knows of another cluster."""
        clock = None
        for who, stamp, learnt in self.events.get(cluster, ()):
            if who == agent or self.hazards.clocks.known[agent, 0, who] >= stamp:
                clock = joined(clock, learnt)
        return clock

    def payload(self, agent: int) -> Payload:
        """All that an agent knows, to be released."""
        found = {self.index: self.hazards.clocks.release(agent)}
        for cluster in self.events:
            clock = self.known(agent, cluster)
            if clock is not None:
                found[cluster] = clock
        return found

    def learn(self, agent: int, payload: Payload) -> None:
        """An agent comes behind what was released."""
        for cluster, clock in payload.items():
            if cluster == self.index:
                self.hazards.clocks.join(agent, clock)
            else:
                before = self.known(agent, cluster)
                if before is None or (clock > before).any():
                    self.events.setdefault(cluster, []).append((agent, self.hazards.clocks.base(agent), clock))

    def fence(self, agent: int) -> None:
        """A fence: relaxed writes that follow release what is known now, relaxed reads before it acquire."""
        for payload in self.pending.pop(agent, ()):
            self.learn(agent, payload)
        self.fenced[agent] = self.payload(agent)

    def synchronise(self, g: Gang, agent: int, address: int, read: bool) -> None:
        """A strong access of one address: what it acquires and releases."""
        strong, mods = self.hazards.sites.strong[g.site], self.hazards.sites.mods[g.site]
        if not strong:
            return
        scope = next((_SCOPES[m] for m in mods if m in _SCOPES), 2)
        place = self.order.released.setdefault(address, {})
        me = self.index, g.cta.rank
        if read:
            for other, (far, payload) in place.items():
                needed = 0 if other == me else 1 if other[0] == self.index else 2
                if min(far, scope) >= needed:
                    if {"acquire", "acq_rel"} & set(mods):
                        self.learn(agent, payload)
                    elif not any(payload is one for one in self.pending.setdefault(agent, [])):
                        self.pending[agent].append(payload)
        else:
            released = self.payload(agent) if {"release", "acq_rel"} & set(mods) else self.fenced.get(agent)
            if released is not None:
                far, before = place.get(me, (scope, {}))
                for cluster, clock in released.items():
                    before[cluster] = np.maximum(before[cluster], clock) if cluster in before else clock
                place[me] = max(far, scope), before

    def access(self, g: Gang, address: Array, size: int, mask: Array | None, value: Array | None) -> None:
        """Lanes of a gang read ``size`` bytes each, or are about to write ``value``: an entry for each lane, or for those of the mask.

        Raises:
            FaultError: a race.
        """
        if address.size == 1 and g.n > 1:
            address = np.broadcast_to(address, g.n)
        write = value is not None
        if value is not None and mask is not None and len(value) == mask.size:
            value = value[mask]
        start = 0
        for i in range(g.warps):
            here = slice(32 * i, 32 * i + 32)
            lanes = address[here] if mask is None else address[here][mask[here]]
            mine, start = slice(start, start + lanes.size), start + lanes.size
            if lanes.size:
                agent = self.hazards.warp(g.cta, g.first + i)
                if self.hazards.sites.strong[g.site]:
                    for one in np.unique(lanes).tolist():
                        self.synchronise(g, agent, one, not write)
                for buffer, some in g.memory.pieces(lanes, size, None):
                    if buffer.writable:
                        chosen = lanes if some is None else lanes[some]
                        data = None if value is None else value[mine] if some is None else value[mine][some]
                        self.touch(buffer, chosen, size, (agent, self.hazards.clocks.known[agent, 0], g.site), data)

    def touch(self, buffer: Buffer, address: Array, size: int, who: tuple[int, Array, int], data: Array | None) -> None:
        """Reads of one buffer by one agent, or writes of ``data``; ``who`` is (agent, what it knows, site).

        Writes of what is there already are no race, unless ``checks="isa"``: flash-attn-4's backward makes such.

        Raises:
            FaultError: a race.
        """
        agent, known, site = who
        write = data is not None
        shift = self.hazards.sites.global_shift
        cells = ((address - np.uint64(buffer.address)) >> np.uint64(shift)).astype(np.intp)
        if size >> shift > 1:
            cells = (cells[:, None] + np.arange(size >> shift)).reshape(-1)
        shadow = self.order.shadow(buffer, shift)
        strong = self.hazards.sites.strong[site]
        for kind in (WRITE, *((READ,) if write else ()), *(() if strong else (ATOMIC,))):
            bad = self._unordered(shadow, kind, cells, agent, known)
            if bad is not None and not (
                data is not None and kind == WRITE and not self.hazards.strict and _same(buffer, address, size, data)
            ):
                i, cluster = bad
                cell = int(cells[i])
                other = Conflict(cell, int(shadow.agent[kind, cell]), int(shadow.stamp[kind, cell]), kind != READ)
                what = self.hazards.describe(other) if cluster == self.index else f"the {_NAMES[kind]} by a warp of cluster {cluster}"
                op = self.hazards.sites.ops[other.stamp % SITES] if cluster != self.index else None
                what += f" at PTX line {op.line}: {op.text} ({op.source})" if op is not None else ""
                where = f"buffer {buffer.name!r} at offset {cell << shift:#x}"
                raise FaultError(DataRaceError, f"{where} is {'written' if write else 'read'}, but nothing orders this behind {what}")
        kind = ATOMIC if strong else WRITE if write else READ
        shadow.cluster[kind, cells], shadow.agent[kind, cells] = self.index, agent
        shadow.stamp[kind, cells] = self.hazards.clocks.base(agent) + site

    def _unordered(self, shadow: GlobalShadow, kind: int, cells: Array, agent: int, known: Array) -> tuple[int, int] | None:
        """(index, cluster) of the first cell whose last access of a kind is not ordered."""
        clusters = shadow.cluster[kind, cells]
        if (clusters < 0).all():
            return None
        agents, stamps = shadow.agent[kind, cells], shadow.stamp[kind, cells]
        bad = (clusters == self.index) & (stamps > known.take(agents))
        for other in np.unique(clusters[(clusters >= 0) & (clusters != self.index)]).tolist():
            clock = self.known(agent, other)
            bad |= (clusters == other) & ((stamps > clock[0].take(agents)) if clock is not None else True)
        return (int(bad.argmax()), int(clusters[bad.argmax()])) if bad.any() else None
