"""Happens-before of tensor memory: ``tcgen05.ld``, ``st``, ``mma``, allocation and ``tcgen05.fence``; see ``fa4.vgpu.hazards``.

The loads and the stores of a warp are agents beside it, until it waits for them (``tcgen05.wait``) or reads a register that a load brings.
Relaxed operations order tensor memory too, as the examples of the PTX ISA show (9.7.16.6.4). It also wants
``tcgen05.fence::before_thread_sync`` and ``::after_thread_sync`` around whatever synchronises the threads: an error with
``checks="isa"`` only, since flash-attn-4's kernels do without and run. A ``tcgen05.commit`` counts as the fence before.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.clocks import EXECUTION, MEMORY, SITES, TENSOR, Shadow, joined
from fa4.vgpu.errors import DataRaceError, TensorFenceError
from fa4.vgpu.memory import FaultError

if TYPE_CHECKING:
    from fa4.vgpu.hazards import Hazards
    from fa4.vgpu.program import Register
    from fa4.vgpu.state import Cta, Gang

Array = npt.NDArray[Any]
Who = tuple[int, Array, int]
"""Who accesses memory: (agent, its clock, stamp)."""

COLUMNS, QUADRANT = 512, 32
PIPE = "tcgen05"
LOADS, STORES = "tcgen05.ld of warp", "tcgen05.st of warp"
_EVERYTHING = 2**31 - 1


class TensorOrder:
    """The tensor memory of the CTAs of a cluster: a cell for each column of each quadrant of 32 lanes.

    ``loading`` are loads that a warp has not waited for: bits of registers, and the epoch; ``freed`` is the clock of who gave columns back.
    """

    def __init__(self, hazards: Hazards) -> None:
        self.hazards, self.clocks = hazards, hazards.clocks
        self.shadows: dict[int, Shadow] = {}
        self.loading: dict[int, list[tuple[int, int]]] = {}
        self.freed: Array | None = None

    def of(self, cta: Cta) -> Shadow:
        """The shadow of a CTA."""
        found = self.shadows.get(cta.rank)
        if found is None:
            found = self.shadows[cta.rank] = Shadow(4 * COLUMNS, len(self.clocks.used))
        return found

    def access(self, cta: Cta, cells: slice, who: Who, write: bool, what: str = "") -> None:
        """Somebody reads or writes columns of a quadrant.

        Raises:
            FaultError: a race, or a missing fence.
        """
        agent, clock, stamp = who
        shadow = self.of(cta)
        conflict = shadow.conflict(cells, agent, clock[EXECUTION], write)
        if conflict is not None:
            raise self.hazards.race(f"{_cell(conflict.cell)} of tensor memory of CTA {cta.id}{what}", write, conflict)
        if self.hazards.strict and not what:
            conflict = shadow.conflict(cells, agent, clock[TENSOR], write)
            if conflict is not None:
                verb = "written" if write else "read"
                message = f"{_cell(conflict.cell)} of tensor memory of CTA {cta.id} is {verb} in order, but without "
                message += "tcgen05.fence::before_thread_sync there and tcgen05.fence::after_thread_sync here, behind "
                raise FaultError(TensorFenceError, message + self.hazards.describe(conflict))
        if write:
            shadow.write(cells, agent, stamp)
        else:
            shadow.read(cells, agent, stamp)

    def fence(self, g: Gang, before: bool, mask: Array | None) -> None:
        """tcgen05.fence by the warps of a gang."""
        for i in range(g.warps if self.hazards.strict else 0):
            if mask is None or mask[32 * i : 32 * i + 32].any():
                warp = g.first + i
                agent = self.hazards.warp(g.cta, warp)
                streams = [self.hazards.stream(g.cta, (name, warp)) for name in (LOADS, STORES)]
                if self.clocks.fence_before(agent, streams) if before else self.clocks.fence_after(agent):
                    self.hazards.sites.effective.add(g.site)

    def committed(self, cta: Cta) -> Array:
        """The clock that tcgen05.commit hands on."""
        pipe = self.hazards.stream(cta, PIPE)
        if self.hazards.strict:
            self.clocks.fence_before(pipe, [pipe])
        return self.clocks.release(pipe)

    # Loads and stores

    def loaded(self, g: Gang, lanes: slice, lane: int, columns: tuple[int, int], rows: Any) -> None:
        """Warps of a gang load (first, count) columns of their quadrants into registers, until they wait or read those."""
        numbers = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
        bits = _bits(tuple(numbers))
        for i, stream, top in self._moved(g, lanes, lane, columns, False):
            self.loading.setdefault(self.hazards.warp(g.cta, g.first + i), []).append((bits, top))
            self.clocks.advance(stream)

    def stored(self, g: Gang, lanes: slice, lane: int, columns: tuple[int, int]) -> None:
        """Warps of a gang store (first, count) columns of their quadrants, until they wait."""
        for _ in self._moved(g, lanes, lane, columns, True):
            pass

    def _moved(self, g: Gang, lanes: slice, lane: int, columns: tuple[int, int], write: bool) -> Iterator[tuple[int, int, int]]:
        """Done by streams of the warps: (warp of the gang, stream, its epoch); the warp itself is always behind both."""
        cta = g.cta
        for i in range(lanes.start // 32, lanes.stop // 32):
            warp = g.first + i
            streams = self.hazards.stream(cta, (LOADS, warp)), self.hazards.stream(cta, (STORES, warp))
            clock = self.clocks.known[self.hazards.warp(cta, warp)].copy()
            clock[:, streams[0]] = clock[:, streams[1]] = _EVERYTHING
            start = (lane // QUADRANT + i - lanes.start // 32) * COLUMNS + columns[0]
            top = int(self.clocks.known[streams[write], MEMORY, streams[write]])
            self.clocks.used[streams[write]] = self.clocks.acted[self.hazards.warp(cta, warp)] = True
            self.access(cta, slice(start, start + columns[1]), (streams[write], clock, top - (SITES - 1 - g.site)), write)
            yield i, streams[write], top

    def waited(self, g: Gang, write: bool, mask: Array | None) -> None:
        """tcgen05.wait: what the warps of a gang loaded or stored is done."""
        for i in range(g.warps):
            if mask is None or mask[32 * i]:
                agent = self.hazards.warp(g.cta, g.first + i)
                stream = self.hazards.stream(g.cta, (STORES if write else LOADS, g.first + i))
                if self.clocks.used[stream] if write else agent in self.loading:
                    self.hazards.sites.effective.add(g.site)
                self.clocks.follow(agent, stream, int(self.clocks.known[stream, MEMORY, stream]))
                self.clocks.advance(stream)
                if not write:
                    self.loading.pop(agent, None)

    def moved(self, g: Gang, rows: int, to: int) -> None:
        """Registers are copied, which does not read what a load brings."""
        for i in range(g.warps):
            found = self.loading.get(self.hazards.warp(g.cta, g.first + i), [])
            for n, (bits, top) in enumerate(found):
                if bits & rows:
                    found[n] = bits | to, top

    def used(self, g: Gang, rows: int) -> None:
        """Registers are read, by the bits of ``rows``: the loads that bring them, and earlier ones, are done then.

        Raises:
            FaultError: with ``checks="isa"``, which wants tcgen05.wait::ld first.
        """
        for i in range(g.warps):
            agent = self.hazards.warp(g.cta, g.first + i)
            found = self.loading.get(agent)
            if not found:
                continue
            last = max((n for n, (bits, _) in enumerate(found) if bits & rows), default=-1)
            if last < 0:
                continue
            if self.hazards.strict:
                lanes = np.arange(g.n) // 32 == i
                raise FaultError(DataRaceError, "the result of a tcgen05.ld is read before tcgen05.wait::ld", lanes)
            self.clocks.follow(agent, self.hazards.stream(g.cta, (LOADS, g.first + i)), found[last][1])
            del found[: last + 1]
            if not found:
                del self.loading[agent]

    # Allocation

    def allocated(self, cta: Cta, warp: int, to: int, site: int) -> None:
        """A warp got columns: their address is written to shared memory; it comes behind those who gave columns back."""
        hazards = self.hazards
        agent = hazards.warp(cta, warp)
        if self.freed is not None:
            self.clocks.inherit(agent, self.freed)
        who = agent, self.clocks.known[agent, MEMORY], self.clocks.base(agent) + site
        hazards.apply(hazards.shared[cta.rank], hazards.range_of(to, 4), who, True, f"shared memory of CTA {cta.id}")

    def deallocated(self, cta: Cta, warp: int, columns: tuple[int, int], site: int) -> None:
        """Columns are given back: nobody may use them any more.

        Raises:
            FaultError: nothing orders a use before this.
        """
        agent = self.hazards.warp(cta, warp)
        who = agent, self.clocks.known[agent], self.clocks.base(agent) + site
        for quadrant in range(4):
            start = quadrant * COLUMNS + columns[0]
            self.access(cta, slice(start, start + columns[1]), who, True, ", given back here,")
        self.freed = joined(self.freed, self.clocks.release(agent))


def register_bit(register: Register) -> int:
    """The bit of a register in the masks of registers that tcgen05.ld brings."""
    return 1 << 2 * register.index + (register.bits == 64)


@lru_cache(maxsize=4096)
def _bits(rows: tuple[int, ...]) -> int:
    """Bits of registers of 32 bits."""
    return sum(1 << 2 * row for row in rows)


def _cell(cell: int) -> str:
    return f"column {cell % COLUMNS} of lanes {cell // COLUMNS * QUADRANT} and up"
