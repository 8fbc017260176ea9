"""Happens-before: which accesses of shared and tensor memory are ordered, whatever the schedule was.

Agents are the warps of a cluster and what works beside them: the tensor core of each CTA, the loads that signal one mbarrier, the bulk
stores, the copies and the tensor-memory loads and stores of each warp. An operation on an engine begins with the clock of its issuer; an
mbarrier hands on the clocks of all that arrived in a phase, a barrier those of all its warps, a commit that of the tensor core. Two
accesses of which one writes are a race unless one is ordered before the other, even where this run did them in the intended order.

Generic writes reach asynchronous reads (bulk stores, wgmma, tcgen05.mma) only after ``fence.proxy.async`` by the warp that wrote; that is
checked when the asynchronous instruction is issued (PTX ISA 8.6, 9.7.13.3).

A warp counts as one agent: races between its lanes are not looked for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa4.vgpu import descriptor
from fa4.vgpu.clocks import EXECUTION, PROXY, SITES, Clocks, Conflict, Shadow
from fa4.vgpu.errors import DataRaceError, ProxyFenceError
from fa4.vgpu.global_hazards import Foreign
from fa4.vgpu.memory import FaultError
from fa4.vgpu.tensor_order import PIPE, TensorOrder

if TYPE_CHECKING:
    from fa4.vgpu.cluster import Cluster
    from fa4.vgpu.descriptor import Operand
    from fa4.vgpu.engine import Issuer
    from fa4.vgpu.mbarrier import Mbarrier
    from fa4.vgpu.program import Kernel, Op, Register
    from fa4.vgpu.state import Cta, Gang

Array = npt.NDArray[Any]

_STREAMS_PER_WARP, _STREAMS_PER_CTA = 4, 32

SITE_NAMES = frozenset(
    ["ld", "ldu", "st", "atom", "red", "ldmatrix", "stmatrix", "cp", "mbarrier", "tcgen05", "wgmma", "bar", "barrier", "fence", "membar"]
)
"""First words of instructions that touch memory or synchronise."""

_SPACES = frozenset(("shared", "shared::cta", "shared::cluster", "global", "param", "local", "const"))
_STRONG = frozenset(("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"))


class Ticket(NamedTuple):
    """An asynchronous operation from its issue on: who does it, at what clock it was issued, by which instruction."""

    agent: int
    issued: Array
    site: int


class Sites:
    """Numbers of the instructions of a kernel that stamps can name."""

    def __init__(self, kernel: Kernel) -> None:
        self.ops: list[Op | None] = [None]
        self.strong = [False]
        self.mods: list[tuple[str, ...]] = [()]
        self.numbers: dict[int, int] = {}
        self.effective: set[int] = set()
        """Instructions that ordered something new; of arrivals on mbarriers and initialisations, those that a wait came after."""
        self.mixed: set[int] = set()
        """Instructions at a named barrier together with others."""
        self.shift, self.global_shift = (grain(kernel, space).bit_length() - 1 for space in ("shared", "global"))
        loads = [op for block in kernel.blocks for op in block.ops if op.name == "tcgen05" and op.mods[0] == "ld"]
        self.loads = _copies(kernel, {r for op in loads for r in op.written})

    def number(self, op: Op) -> int:
        """The number of an instruction; all beyond the last one share it."""
        found = self.numbers.get(id(op))
        if found is None:
            found = self.numbers[id(op)] = min(len(self.ops), SITES - 1)
            if found == len(self.ops):
                self.ops.append(op if found < SITES - 1 else None)
                self.mods.append(op.mods)
                self.strong.append(op.name in ("atom", "red") or not _STRONG.isdisjoint(op.mods))
        return found


def grain(kernel: Kernel, space: str) -> int:
    """Bytes of a cell of shared or global memory: 4, or less where loads or stores are narrower, since neighbours are then no conflict."""
    sizes = [4]
    for block in kernel.blocks:
        for op in block.ops:
            if op.name in ("ld", "st", "atom", "red") and not any(m in _SPACES and not m.startswith(space) for m in op.mods):
                sizes += [int(m[1:]) // 8 for m in op.mods if m[0] in "busf" and m[1:] in ("8", "16")]
    return min(sizes)


class Hazards:
    """What is ordered before what in one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        launch = cluster.launch
        self.cluster, self.strict = cluster, launch.checks == "isa"
        assert launch.code.how.sites is not None
        self.sites = launch.code.how.sites
        self.shift = self.sites.shift
        ctas, self.warp_count = len(cluster.ctas), -(-launch.threads // 32)
        self.warps = ctas * self.warp_count
        agents = ctas * (self.warp_count * (1 + _STREAMS_PER_WARP) + _STREAMS_PER_CTA)
        self.clocks = Clocks(agents, fences=self.strict)
        self.streams: dict[tuple[int, Any], int] = {}
        self.names: dict[int, str] = {}
        self.shared = [Shadow(-(-launch.shared_bytes >> self.shift), agents) for _ in range(ctas)]
        self.tensor = TensorOrder(self)
        self.touched = np.zeros((ctas, agents), np.int32)
        self.left: dict[int, Array] = {}
        self.tentative: dict[int, set[int]] = {}  # instructions that ordered something new for a warp, which did nothing since
        self.fenced: dict[int, Array] = {}
        self.wrote: set[int] = set()  # warps, since their last proxy fence
        self.fences: dict[int, dict[int, str]] = {}  # the last of the warps, and of which kind, since they handed on anything
        self.fresh: dict[int, list[Mbarrier]] = {}  # that warps made since their last fence
        self.foreign = Foreign(self, launch.order)
        self.lanes = np.repeat(np.arange(self.warps), 32)

    # Agents

    def warp(self, cta: Cta, warp: int) -> int:
        """The number of a warp."""
        return cta.rank * self.warp_count + warp

    def stream(self, cta: Cta, name: Any) -> int:
        """The number of what works beside the warps of a CTA; where there are too many, the last ones share one."""
        key = cta.rank, name
        found = self.streams.get(key)
        if found is None:
            found = min(self.warps + len(self.streams), len(self.clocks.used) - 1)
            self.streams[key] = found
            text = name if isinstance(name, str) else f"{name[0]} {name[1] if name[0].endswith('warp') else hex(name[1])}"
            self.names[found] = f"{text} of CTA {cta.id}"
        return found

    def describe(self, conflict: Conflict) -> str:
        """Who did the other access, and where in the program."""
        if conflict.agent < self.warps:
            rank, warp = divmod(conflict.agent, self.warp_count)
            who = f"warp {warp} of CTA {self.cluster.ctas[rank].id}"
        else:
            who = self.names.get(conflict.agent, "an engine")
        op = self.sites.ops[conflict.stamp % SITES] if conflict.stamp % SITES < len(self.sites.ops) else None
        where = "" if op is None else f" at PTX line {op.line}: {op.text}" + (f" ({op.source})" if op.source else "")
        return f"the {'write' if conflict.wrote else 'read'} by {who}{where}"

    def race(self, what: str, write: bool, conflict: Conflict, lanes: Array | None = None) -> FaultError:
        """The error for two accesses that nothing orders."""
        verb = "written" if write else "read"
        return FaultError(DataRaceError, f"{what} is {verb}, but nothing orders this behind {self.describe(conflict)}", lanes)

    def follow(self, agent: int, clock: Array, site: int) -> None:
        """A warp comes behind ``clock`` by an instruction, which is noted where that orders anything new before anything that follows."""
        self.settle(agent)
        if site not in self.sites.effective and self.clocks.learns(agent, clock):
            self.clocks.release(agent)  # what follows has another epoch
            self.clocks.acted[agent] = False
            self.tentative.setdefault(agent, set()).add(site)
        self.clocks.join(agent, clock)

    def settle(self, agent: int) -> None:
        """Of what a warp waited for and fenced, note what anything followed: that it handed on its clock, or an access by itself."""
        if self.clocks.acted[agent] and agent in self.fences:
            self.sites.effective.update(self.fences.pop(agent))
        waits = self.tentative.get(agent)
        if waits and (self.clocks.used[agent] or self.clocks.acted[agent]):
            self.sites.effective |= waits
            waits.clear()

    # Warps and shared memory

    def access(self, g: Gang, cta: Cta, address: Array, size: int, mask: Array | None, write: bool) -> None:
        """Lanes of a gang read or write ``size`` bytes each at offsets in the shared memory of a CTA."""
        first = self.warp(g.cta, g.first)
        if address.size == 1 and g.n > 1:
            address = np.broadcast_to(address, g.n)
        chosen = address if mask is None or address.size != mask.size else address[mask]
        if not chosen.size:
            return
        cells = (chosen >> chosen.dtype.type(self.shift)).astype(np.intp)
        count = max(1, size >> self.shift)
        if count > 1:
            cells = (cells[:, None] + _range(count)).reshape(-1)
        shadow, clocks, site = self.shared[cta.rank], self.clocks, g.site
        atomic = self.sites.strong[site]
        if g.warps == 1:
            agent: Any = first
            known, stamp = clocks.known[first, 0], clocks.base(first) + site
        else:
            agent = self.lanes[32 * first : 32 * first + g.n]
            agent = agent if mask is None else agent[mask]
            agent = np.repeat(agent, count) if count > 1 else agent
            known = clocks.known[:, 0]
            clocks.used[first : first + g.warps] = True
            stamp = known[agent, agent] - (SITES - 1 - site)
        conflict = shadow.conflict(cells, agent, known, write, atomic)
        if conflict is None and atomic:
            shadow.write_atomic(cells, agent, stamp)
        elif conflict is None and write:
            self.wrote.update(range(first, first + g.warps))
            conflict = shadow.write(cells, agent, stamp)
        elif conflict is None:
            shadow.read(cells, agent, stamp)
        if conflict is not None:
            at = conflict.cell << self.shift
            bad = (address >= max(0, at - size + 1)) & (address < at + (1 << self.shift))
            raise self.race(f"shared memory {at:#x} of CTA {cta.id}", write, conflict, bad if mask is None else bad & mask)
        if cta is not g.cta:
            for one in np.unique(agent).tolist():
                self.touch(cta, one, clocks.base(one) + site)

    def touch(self, cta: Cta, agent: int, stamp: int) -> None:
        """An agent uses the memory of a CTA, which must not end before.

        Raises:
            FaultError: it has ended.
        """
        if not cta.live:
            raise FaultError(DataRaceError, f"CTA {cta.id} has ended before {self._use(agent, stamp)}")
        self.touched[cta.rank, agent] = stamp

    # Synchronisation by warps

    def arrive(self, agent: int, relaxed: bool = False) -> Array:
        """The clock that a warp publishes; a relaxed operation publishes what lay before the last fence."""
        return self.clocks.relaxed(agent, self.fenced.get(agent)) if relaxed else self.clocks.release(agent)

    def leave(self, cta: Cta, warp: int) -> None:
        """A warp exits."""
        agent = self.warp(cta, warp)
        self.clocks.acted[agent] |= len(self.shared) > 1  # others may use the memory of its CTA until then
        self.settle(agent)
        clock = self.clocks.release(agent)
        old = self.left.get(cta.rank)
        self.left[cta.rank] = clock if old is None else np.maximum(old, clock)

    def fence(self, g: Gang, kind: str, mask: Array | None) -> None:
        """A fence by the warps of a gang: "proxy", "release", or "init", of mbarriers that they made."""
        for i in range(g.warps):
            if mask is None or mask[32 * i : 32 * i + 32].any():
                agent = self.warp(g.cta, g.first + i)
                if kind == "release":
                    self.foreign.fence(agent)
                    self.fenced[agent] = self.clocks.release(agent)
                    self.sites.effective.add(g.site)  # whether anything needs it is not traced
                    continue
                self.settle(agent)
                ready = self.fresh.pop(agent, [])
                for mbarrier in ready:
                    mbarrier.visible = True
                # What an earlier one did, this one would have done, if the warp has handed on nothing in between.
                pending = {site: what for site, what in self.fences.get(agent, {}).items() if (what, kind) == ("proxy", "init")}
                if ready or (kind == "proxy" and agent in self.wrote):
                    pending[g.site] = kind
                self.fences[agent] = pending
                if kind == "proxy":
                    self.wrote.discard(agent)
                    self.clocks.fence(agent)
                self.clocks.acted[agent] = False

    def check_end(self, cta: Cta) -> None:
        """A CTA ends: whatever others did to its memory must be ordered before.

        Raises:
            FaultError: something is not.
        """
        known = self.left[cta.rank][EXECUTION]
        late = self.touched[cta.rank] > known
        own = slice(cta.rank * self.warp_count, (cta.rank + 1) * self.warp_count)
        late[own] = False
        if late.any():
            agent = int(late.argmax())
            raise FaultError(DataRaceError, f"CTA {cta.id} may end before {self._use(agent, int(self.touched[cta.rank, agent]))}")
        for mbarrier in cta.mbarriers.objects.values() if self.strict else ():
            if mbarrier.commit is not None and mbarrier.commit[0] >= mbarrier.seen:
                raise self._abandoned(mbarrier, mbarrier.commit[1])

    def _abandoned(self, mbarrier: Mbarrier, who: Issuer) -> FaultError:
        """The error for a commit that nobody waits for in the CTA that it arrives in."""
        message = f"CTA {mbarrier.cta.id} may end before a commit arrives at {mbarrier}, phase {mbarrier.phase}: nobody there waits for it"
        fault = FaultError(DataRaceError, message)
        fault.issuer = who
        return fault

    def _use(self, agent: int, stamp: int) -> str:
        """What was done to the memory of a CTA."""
        return self.describe(Conflict(0, agent, stamp, True)).replace("the write", "an access to its memory", 1)

    # mbarriers

    def made_mbarrier(self, mbarrier: Mbarrier, cta: Cta, warp: int, site: int) -> None:
        """A warp initialised one."""
        agent = self.warp(cta, warp)
        mbarrier.made = Conflict(mbarrier.offset, agent, self.clocks.base(agent) + site, True)
        self.fresh.setdefault(agent, []).append(mbarrier)

    def use_mbarrier(self, mbarrier: Mbarrier, agent: int, site: int) -> None:
        """A warp uses one, which must have been initialised before; site 0: by an operation that it issues.

        Raises:
            FaultError: nothing orders that.
        """
        made = mbarrier.made
        if made is not None and made.stamp > self.clocks.known[agent, 0, made.agent]:
            raise self.race(f"{mbarrier}", False, made)
        if site and agent // self.warp_count != mbarrier.cta.rank:
            self.touch(mbarrier.cta, agent, self.clocks.base(agent) + site)

    def told(self, mbarrier: Mbarrier, agent: int, clock: Array) -> None:
        """An asynchronous operation tells an mbarrier that it is done."""
        self.touch(mbarrier.cta, agent, int(clock[0, agent]))

    def committed(self, mbarrier: Mbarrier, who: Issuer, clock: Array) -> None:
        """A tcgen05.commit arrives in another CTA, which must not end before its products are complete.

        Nor, with ``checks="isa"``, before it has arrived; at the end of flash-attn-4's backward by pairs that waits for neither dS nor K.

        Raises:
            FaultError: it has ended.
        """
        if mbarrier.cta.live:
            self.told(mbarrier, self.stream(who.cta, PIPE), clock)
            mbarrier.commit = mbarrier.phase, who
        elif self.strict:
            raise self._abandoned(mbarrier, who)

    def waited(self, mbarrier: Mbarrier, cta: Cta, warp: int, site: int) -> None:
        """A warp found a phase complete, and comes behind all that arrived."""
        agent = self.warp(cta, warp)
        self.use_mbarrier(mbarrier, agent, site)
        mbarrier.seen = mbarrier.phase
        if mbarrier.published is not None:
            self.sites.effective.update(map(self.sites.number, mbarrier.came.values()))
            if mbarrier.made is not None:
                self.sites.effective.add(mbarrier.made.stamp % SITES)
            mbarrier.came.clear()
            self.follow(agent, mbarrier.published, site)

    # cp.async

    def issued(self, g: Gang) -> Array:
        """The clocks of the warps of a gang."""
        first = self.warp(g.cta, g.first)
        return np.array([self.clocks.release(first + i) for i in range(g.warps)])

    def copied(self, cta: Cta, first: int, issue: tuple[Array, int], where: tuple[Array, int], lanes: Array) -> dict[int, Array]:
        """Some lanes of the warps from ``first`` on write what they copied; the clock behind that, by warp.

        ``issue`` is (clocks of the warps at the issue, site), ``where`` (offsets of all lanes, bytes of each).
        """
        (issued, site), (to, size) = issue, where
        warps = np.flatnonzero(lanes.reshape(-1, 32).any(1))
        streams = np.array([self.stream(cta, ("cp.async of warp", first + w)) for w in warps.tolist()])
        known = self.clocks.known
        tops = known[streams, 0, streams]
        known[streams] = issued[warps]
        known[streams, ::2, streams] = tops[:, None]
        agents = np.zeros(len(issued), np.intp)
        agents[warps] = streams
        count = max(1, size >> self.shift)
        agent = np.repeat(np.repeat(agents, 32)[lanes], count)
        cells = ((to[lanes] >> to.dtype.type(self.shift)).astype(np.intp)[:, None] + _range(count)).reshape(-1)
        shadow = self.shared[cta.rank]
        conflict = shadow.conflict(cells, agent, known[:, 0], True)
        if conflict is None:
            conflict = shadow.write(cells, agent, known[agent, 0, agent] - (SITES - 1 - site))
        if conflict is not None:
            op = self.sites.ops[site]
            where_from = "" if op is None else f" by the copy at PTX line {op.line}: {op.text} ({op.source})"
            raise self.race(f"shared memory {conflict.cell << self.shift:#x} of CTA {cta.id}{where_from}", True, conflict)
        clocks: dict[int, Array] = {
            self.warp(cta, first + w): known[s].copy() for w, s in zip(warps.tolist(), streams.tolist(), strict=True)
        }
        for stream in streams.tolist():
            self.clocks.advance(stream)
        return clocks

    def copies_waited(self, clocks: dict[int, Array], site: int) -> None:
        """Warps waited for their copies."""
        for agent, clock in clocks.items():
            self.follow(agent, clock, site)

    # Asynchronous operations

    def ticket(self, issuer: Issuer, cta: Cta, name: Any) -> Ticket:
        """An operation of the stream ``name`` of a CTA that a warp issues now."""
        site = 0 if issuer.op is None else self.sites.number(issuer.op)
        return Ticket(self.stream(cta, name), self.clocks.release(self.warp(issuer.cta, issuer.warp)), site)

    def snapshot(self, issuer: Issuer) -> Array:
        """The clock of the warp that issues an operation."""
        return self.clocks.release(self.warp(issuer.cta, issuer.warp))

    def signalling(self, issuer: Issuer, mbarrier: Mbarrier, name: Any) -> Ticket:
        """``ticket`` for an operation that will tell an mbarrier.

        Raises:
            FaultError: nothing orders it behind the initialisation of the mbarrier.
        """
        ticket = self.ticket(issuer, mbarrier.cta, name)
        self.use_mbarrier(mbarrier, self.warp(issuer.cta, issuer.warp), 0)
        if not mbarrier.visible and mbarrier.made is not None:
            message = (
                f"an asynchronous operation signals {mbarrier}: no fence.mbarrier_init or fence.proxy.async follows its initialisation"
            )
            raise FaultError(ProxyFenceError, message)
        return ticket

    def bytes_moved(self, ticket: Ticket, cta: Cta, where: tuple[int, int], write: bool) -> Array:
        """The operation reads or writes (offset, bytes) of shared memory; its clock when that is done.

        Raises:
            FaultError: a race.
        """
        clock, base = self.clocks.operation(ticket.agent, ticket.issued)
        cells = self.range_of(*where)
        self.apply(self.shared[cta.rank], cells, (ticket.agent, clock[0], base + ticket.site), write, f"shared memory of CTA {cta.id}")
        if write:
            self.touch(cta, ticket.agent, base + ticket.site)
        return clock

    def bytes_sent(self, ticket: Ticket, cta: Cta, where: tuple[int, int]) -> None:
        """The operation reads (offset, bytes) of the CTA that issued it, to write them elsewhere; the CTA must not end before.

        Raises:
            FaultError: it has ended, or a race.
        """
        self.touch(cta, ticket.agent, self.clocks.base(ticket.agent) + ticket.site)
        self.bytes_moved(ticket, cta, where, write=False)

    def range_of(self, offset: int, size: int) -> slice:
        """Cells of a stretch of shared memory."""
        return slice(offset >> self.shift, -(-(offset + size) >> self.shift))

    def apply(self, shadow: Shadow, cells: Any, who: tuple[int, Array, int], write: bool, what: str) -> None:
        """One agent reads or writes cells; ``who`` is (agent, what it knows, stamp)."""
        agent, known, stamp = who
        conflict = shadow.conflict(cells, agent, known, write)
        if conflict is not None:
            raise self.race(f"byte {conflict.cell << self.shift:#x} of {what}", write, conflict)
        if write:
            shadow.write(cells, agent, stamp)
        else:
            shadow.read(cells, agent, stamp)

    def check_published(self, cta: Cta, cells: Any, issued: Array, what: str) -> None:
        """Generic writes that an asynchronous operation will read must be fenced by who wrote them.

        Raises:
            FaultError: one is not.
        """
        shadow = self.shared[cta.rank]
        writers, stamps = shadow.writer[cells], shadow.written[cells]
        bad = (writers < self.warps) & (stamps > issued[PROXY].take(writers))
        if bad.any():
            i = int(bad.argmax())
            cell = cells.start + i if isinstance(cells, slice) else int(cells[i])
            other = self.describe(Conflict(cell, int(writers[i]), int(stamps[i]), True))
            message = f"{what} reads shared memory {cell << self.shift:#x} of CTA {cta.id}: no fence.proxy.async follows {other}"
            raise FaultError(ProxyFenceError, message)

    def operand(self, descriptors: tuple[int, ...], blackwell: bool, operand: Operand, quarter: int | None = None) -> Any:
        """Cells of a matrix operand; ``quarter``: of rows 16 q to 16 q + 15 only."""
        return operand_cells(descriptors, blackwell, operand, self.shift, quarter)


def _copies(kernel: Kernel, registers: set[Register]) -> frozenset[Register]:
    """Registers, and all that they are moved to."""
    moves = [op for block in kernel.blocks for op in block.ops if op.name == "mov"]
    while more := {r for op in moves if not registers.isdisjoint(op.read) for r in op.written} - registers:
        registers |= more
    return frozenset(registers)


@lru_cache(maxsize=64)
def _range(count: int) -> Array:
    return np.arange(count)


@lru_cache(maxsize=1024)
def operand_cells(descriptors: tuple[int, ...], blackwell: bool, operand: Operand, shift: int, quarter: int | None) -> Any:
    """Cells of a matrix operand in shared memory, each once, as a slice where they follow each other."""
    first, units = descriptor.locate(descriptors, blackwell, operand)
    if quarter is not None:
        units = np.array_split(units, 4, axis=1 if operand.mn_major else 0)[quarter]
    cells = np.unique(units.reshape(-1) + first)
    per = descriptor.UNIT >> shift
    if cells[-1] - cells[0] + 1 == cells.size:
        return slice(int(cells[0]) * per, (int(cells[-1]) + 1) * per)
    return (cells[:, None] * per + np.arange(per)).reshape(-1)
