"""Vector clocks, and for every cell of a memory who wrote and read it last: the arithmetic of happens-before.

Agents are numbers. Each has an epoch that grows with every release; an access is stamped with the epoch of its agent and, in the low bits,
the number of its instruction (its site). A clock gives for each agent the highest stamp that lies before a point of the program: an access
is ordered before the point if and only if its stamp is at most that (Lamport 1978; Flanagan and Freund, "FastTrack", 2009). A clock has
rows: memory; what its agent did before its last proxy fence, which is what the asynchronous proxy may see; execution, which relaxed
operations order too; and, where ``tcgen05.fence`` counts, the accesses of tensor memory that were fenced by those who did them, and of
these the ones that the agent has fenced off on its side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

MEMORY, PROXY, EXECUTION, FENCED, TENSOR = range(5)
"""Rows of a clock."""

SITES = 4096
"""Sites that a stamp can tell apart; later ones count as the last."""

_COLUMNS = 8


class Clocks:
    """One clock for each of ``agents``: ``known[a, 0, b]`` is the highest stamp of b that lies before what a does next.

    Of itself an agent always knows in ``::2``: memory, execution and tensor memory. ``fences`` says whether there are the last two rows.
    """

    def __init__(self, agents: int, fences: bool = False) -> None:
        self.known = np.zeros((agents, TENSOR + 1 if fences else EXECUTION + 1, agents), np.int32)
        own = np.arange(agents)
        self.known[own, ::2, own] = 2 * SITES - 1
        self.used = np.zeros(agents, bool)
        self.acted = np.zeros(agents, bool)
        self.published: list[Array | None] = [None] * agents

    def join(self, agent: int, clock: Array) -> None:
        """What lies before ``clock`` lies before what the agent does next."""
        rows = self.known[agent, :TENSOR]
        np.maximum(rows, clock[:TENSOR], out=rows)
        self.published[agent] = None

    def inherit(self, agent: int, clock: Array) -> None:
        """``join`` by an engine, to which the fences of the issuer count as its own."""
        np.maximum(self.known[agent], clock, out=self.known[agent])
        self.published[agent] = None

    def learns(self, agent: int, clock: Array) -> bool:
        """Whether ``join`` would order anything new."""
        return bool((clock[:TENSOR] > self.known[agent, :TENSOR]).any())

    def release(self, agent: int) -> Array:
        """The clock that an agent publishes: what it does later does not lie before it. The same array until something changes."""
        self.acted[agent] = True
        if self.used[agent]:
            clock: Array = self.known[agent].copy()
            self.known[agent, ::2, agent] += SITES
            self.used[agent] = False
            self.published[agent] = clock
            return clock
        found = self.published[agent]
        if found is None:
            found = self.known[agent].copy()
            found[::2, agent] -= SITES  # nothing belongs to this epoch yet
            self.published[agent] = found
        return found

    def relaxed(self, agent: int, fenced: Array | None) -> Array:
        """What a relaxed operation publishes: execution, and what lay before the last fence."""
        now = self.release(agent)
        clock = np.zeros_like(now) if fenced is None else fenced.copy()
        clock[EXECUTION:] = now[EXECUTION:]
        return clock

    def follow(self, agent: int, stream: int, stamp: int) -> None:
        """What ``stream`` did up to a stamp lies before what the agent does next."""
        column = self.known[agent, ::2, stream]
        np.maximum(column, stamp, out=column)
        self.published[agent] = None

    def fence(self, agent: int) -> None:
        """A proxy fence: all that the agent did before may be seen by the asynchronous proxy of whoever it is ordered before."""
        self.known[agent, PROXY, agent] = self.release(agent)[MEMORY, agent]
        self.published[agent] = None

    def fence_before(self, agent: int, streams: list[int]) -> bool:
        """tcgen05.fence::before_thread_sync: what ``streams`` did for the agent, which waited, may be handed on; whether it is new."""
        now = self.release(agent)
        ready = now[TENSOR].copy()
        ready[streams] = now[MEMORY, streams]
        return self._raise(agent, FENCED, ready)

    def fence_after(self, agent: int) -> bool:
        """tcgen05.fence::after_thread_sync: what was fenced and handed on lies before what the agent does next; whether that is new."""
        return self._raise(agent, TENSOR, self.known[agent, FENCED])

    def _raise(self, agent: int, row: int, to: Array) -> bool:
        mine = self.known[agent, row]
        new = bool((to > mine).any())
        np.maximum(mine, to, out=mine)
        self.published[agent] = None
        return new

    def base(self, agent: int) -> int:
        """The stamp of an access now, without its site."""
        self.used[agent] = True
        return int(self.known[agent, 0, agent]) - (SITES - 1)

    def operation(self, agent: int, issued: Array) -> tuple[Array, int]:
        """An operation of an asynchronous agent that was issued at a clock: (its own clock, the base of its stamps)."""
        top = int(self.known[agent, 0, agent])
        clock = issued.copy()
        clock[::2, agent] = top
        self.advance(agent)
        return clock, top - (SITES - 1)

    def advance(self, agent: int) -> None:
        """Begin another epoch."""
        self.known[agent, ::2, agent] += SITES
        self.used[agent] = False
        self.published[agent] = None


def joined(a: Array | None, b: Array | None) -> Array | None:
    """What lies before where two clocks meet; None is a clock that knows nothing."""
    return b if a is None else a if b is None else np.maximum(a, b)


class Conflict(NamedTuple):
    """An access that is not ordered before the one at hand: its cell, agent and stamp, and whether it wrote."""

    cell: int
    agent: int
    stamp: int
    wrote: bool


class Shadow:
    """Of every cell of a memory: the last write, and the last read by each agent.

    ``cells`` arguments are arrays of cell numbers or slices; ``agent`` and ``stamp`` are one for all or arrays, one for each cell;
    ``known`` is the first row of the clock of the access or, where agents differ, of all agents.
    """

    def __init__(self, cells: int, agents: int) -> None:
        self.written = np.zeros(cells, np.int32)
        self.writer = np.zeros(cells, np.int16)
        self.atomics: Shadow | None = None
        self.readers = np.zeros((cells, _COLUMNS), np.int32)
        self.column = np.full(agents, -1, np.int16)
        self.agents = np.zeros(0, np.int16)

    def _column(self, agent: Any) -> Any:
        """Where the reads of an agent stand; agents get a column when they read first."""
        found = self.column[agent]
        if (found < 0).any():
            for new in np.unique(np.asarray(agent)[found < 0]) if np.ndim(found) else [agent]:
                self.column[new] = len(self.agents)
                self.agents = np.append(self.agents, np.int16(new))
            if len(self.agents) > self.readers.shape[1]:
                more = -(-len(self.agents) // _COLUMNS) * _COLUMNS - self.readers.shape[1]
                self.readers = np.pad(self.readers, ((0, 0), (0, more)))
            found = self.column[agent]
        return found

    def conflict(self, cells: Any, agent: Any, known: Array, write: bool, atomic: bool = False) -> Conflict | None:
        """An earlier access that an access must come after, but need not. Atomic ones do not conflict with each other."""
        writers, stamps = self.writer[cells], self.written[cells]
        several = known.ndim == 2
        bad = stamps > (known[agent, writers] if several else known.take(writers))
        if bad.any():
            i = int(bad.argmax())
            return Conflict(_cell(cells, i), int(writers[i]), int(stamps[i]), True)
        if write and self.agents.size:
            count = len(self.agents)
            rows = self.readers[cells, :count]
            wrong = rows > (known[agent][:, self.agents] if several else known.take(self.agents))
            if wrong.any():
                i, j = divmod(int(wrong.argmax()), count)
                return Conflict(_cell(cells, i), int(self.agents[j]), int(rows[i, j]), False)
        if self.atomics is not None and not atomic:
            return self.atomics.conflict(cells, agent, known, False)
        return None

    def read(self, cells: Any, agent: Any, stamp: Any) -> None:
        """Note a read."""
        column = self._column(agent)  # first: it may make room
        self.readers[cells, column] = stamp

    def write(self, cells: Any, agent: Any, stamp: Any) -> Conflict | None:
        """Note a write; the conflict where agents of one access wrote the same cell."""
        self.written[cells], self.writer[cells] = stamp, agent
        if np.ndim(agent):
            bad = self.writer[cells] != agent
            if bad.any():
                cell = _cell(cells, int(bad.argmax()))
                return Conflict(cell, int(self.writer[cell]), int(self.written[cell]), True)
        return None

    def write_atomic(self, cells: Any, agent: Any, stamp: Any) -> None:
        """Note an atomic access."""
        if self.atomics is None:
            self.atomics = Shadow(len(self.written), len(self.column))
        self.atomics.write(cells, agent, stamp)


def _cell(cells: Any, i: int) -> int:
    return cells.start + i if isinstance(cells, slice) else int(cells[i])
