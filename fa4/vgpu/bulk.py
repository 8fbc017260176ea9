"""Bulk copies on their way, and the groups in which a thread waits for those that leave shared memory (PTX ISA 9.7.9.25.1.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt

from fa4.vgpu.engine import Issuer
from fa4.vgpu.errors import PendingCopyError
from fa4.vgpu.memory import FaultError
from fa4.vgpu.sums import Ordered

if TYPE_CHECKING:
    from fa4.vgpu.global_hazards import Payload
    from fa4.vgpu.hazards import Ticket
    from fa4.vgpu.memory import Buffer
    from fa4.vgpu.state import Cta

Array = npt.NDArray[Any]

LOADS = "bulk load"
"""Name of the engines of copies into shared memory, with the offset of the mbarrier they tell."""

ANSWERS = "launch control"
"""Name of the engines of answers to ``clusterlaunchcontrol.try_cancel``, with the offset of the mbarrier they tell."""

STORES = "bulk store"
"""Name of the engines of copies out of shared memory, with the number of the thread."""


def start_load(
    cta: Cta,
    where: tuple[int, int],
    signal: tuple[Cta, int],
    fetch: Callable[[], Array],
    issuer: Issuer,
    source: tuple[int, int] | None = None,
    kind: str = LOADS,
) -> None:
    """Begin a copy into shared memory: ``where`` is (offset, bytes) in ``cta``, ``signal`` the place of the mbarrier to be told.

    From now to its completion nobody may touch the destination; ``fetch`` is called at the completion, and reads ``source``,
    (offset, bytes) in the shared memory of the issuer's CTA, unless it reads global memory.

    Raises:
        FaultError: the destination leaves shared memory or another copy to it is on its way, or there is no mbarrier.
    """
    offset, size = where
    name = kind, signal[1]
    mbarrier = signal[0].mbarriers.at(signal[1])
    cta.shared.begin(offset, size)
    hazards = cta.hazards
    ticket = None if hazards is None else hazards.signalling(issuer, mbarrier, name)
    counts = cta.launch.bytes
    counts[kind] = counts.get(kind, 0) + size

    def run() -> None:
        cta.shared.finish(offset, fetch())
        clock = None
        if hazards is not None and ticket is not None:
            if source is not None:
                hazards.bytes_sent(ticket, issuer.cta, source)
            clock = hazards.bytes_moved(ticket, cta, where, write=True)
            hazards.told(mbarrier, ticket.agent, clock)
        signal[0].mbarriers.at(signal[1]).complete_bytes(size, issuer, clock)

    signal[0].engine(name, ordered=False).push(run, issuer)


@dataclass
class Store:
    """A copy out of shared memory: first ``fetch`` reads ``source`` (offset, bytes), then ``put`` writes what it read.

    ``addition`` is where, (buffer, address), if it adds floating-point numbers whose order is recorded; ``known`` what its
    issuer knew, and ``added`` the clock with which it was done.
    """

    fetch: Callable[[], Array]
    put: Callable[[Array], None]
    issuer: Issuer
    source: tuple[int, int]
    ticket: Ticket | None = None
    clock: Array | None = None
    data: Array | None = None
    complete: bool = False
    addition: tuple[Buffer, int] | None = None
    known: Payload | None = None
    added: Array | None = None

    def read(self) -> None:
        """Read the source, unless that is done."""
        if self.data is None:
            try:
                self.data = self.fetch()
                hazards = self.issuer.cta.hazards
                if hazards is not None and self.ticket is not None:
                    self.clock = hazards.bytes_moved(self.ticket, self.issuer.cta, self.source, write=False)
                counts = self.issuer.cta.launch.bytes
                counts[STORES] = counts.get(STORES, 0) + self.data.size
            except FaultError as fault:
                fault.issuer = self.issuer
                raise

    def write(self) -> None:
        """Write the destination, unless that is done."""
        self.read()
        if not self.complete:
            assert self.data is not None
            self.complete = True
            try:
                self.put(self.data)
            except FaultError as fault:
                fault.issuer = self.issuer
                raise
            self._note(self.data)

    def _note(self, data: Array) -> None:
        """Remember an addition, and let whoever waits for it come behind it."""
        cta = self.issuer.cta
        if self.addition is None or cta.launch.sums is None:
            return
        order = None
        if cta.hazards is not None and self.ticket is not None and self.known is not None:
            self.added, stamp = cta.hazards.clocks.operation(self.ticket.agent, self.ticket.issued)
            order = Ordered(cta.hazards.foreign.index, self.ticket.agent, stamp, self.known)
        cta.launch.sums.note(cta.index, *self.addition, data, order)


class _Group(NamedTuple):
    """Stores that are waited for together, and the instruction that committed them."""

    stores: list[Store]
    site: int


@dataclass
class _Thread:
    """Stores of one thread: those not committed yet, and its groups, oldest first."""

    open: list[Store] = field(default_factory=list)
    groups: list[_Group] = field(default_factory=list)


class BulkGroups:
    """The bulk groups of the threads of a CTA."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.threads: dict[int, _Thread] = {}

    def start(self, store: Store) -> None:
        """Begin a store; a part of the group that its thread commits next."""
        number = 32 * store.issuer.warp + store.issuer.lane
        self.threads.setdefault(number, _Thread()).open.append(store)
        hazards = self.cta.hazards
        if hazards is not None:
            if store.addition is not None:
                store.known = hazards.foreign.payload(hazards.warp(self.cta, store.issuer.warp))
            store.ticket = hazards.ticket(store.issuer, self.cta, (STORES + "s of warp", store.issuer.warp))
            hazards.check_published(self.cta, hazards.range_of(*store.source), store.ticket.issued, "a bulk store")
        engine = self.cta.engine((STORES, number))
        engine.push(store.read, store.issuer)
        engine.push(store.write, store.issuer)

    def commit(self, number: int, site: int = 0) -> None:
        """Close the group of a thread."""
        thread = self.threads.setdefault(number, _Thread())
        thread.groups.append(_Group(thread.open, site))
        thread.open = []

    def wait(self, number: int, keep: int, read: bool, site: int = 0) -> None:
        """Let all groups of a thread but the ``keep`` newest be complete, or have read their sources."""
        thread = self.threads.get(number)
        if thread is None:
            return
        done = thread.groups[: len(thread.groups) - keep] if keep else thread.groups
        for group in done:
            for store in group.stores:
                if read:
                    store.read()
                else:
                    store.write()
                clock = store.clock if read or store.added is None else store.added
                if clock is not None and self.cta.hazards is not None:
                    self.cta.hazards.follow(self.cta.hazards.warp(self.cta, number // 32), clock, site)
        if self.cta.hazards is not None:  # a group that was waited for together with the next one could as well be a part of that
            self.cta.hazards.sites.effective.update(group.site for group in thread.groups[max(0, len(done) - 1) :])
        # A group that has only been read stays, so that a later wait can complete it.
        thread.groups = [g for g in thread.groups[: len(done)] if not all(s.complete for s in g.stores)] + thread.groups[len(done) :]


def check_end(cta: Cta) -> None:
    """A CTA ends: its shared memory is gone for copies that still have to read or write it.

    Stores that were never committed are let go, unless ``checks="isa"``: flash-attn-4's sm_100 backward stores dK and dV so, as the last
    thing it does.

    Raises:
        FaultError: there is one.
    """
    message = f"CTA {cta.id} ends before a bulk copy has"
    answer = f"CTA {cta.id} ends before the answer to a request is in its shared memory"
    for name, engine in cta.engines.items():
        if engine.queue and isinstance(name, tuple) and name[0] in (LOADS, ANSWERS):
            raise _at_end(f"{message} written its shared memory" if name[0] == LOADS else answer, engine.queue[0].issuer)
    for thread in cta.unit(BulkGroups).threads.values():
        uncommitted = thread.open if cta.hazards is not None and cta.hazards.strict else []
        for store in [*uncommitted, *(store for group in thread.groups for store in group.stores)]:
            if store.data is None:
                raise _at_end(f"{message} read its shared memory", store.issuer)


def _at_end(message: str, issuer: Issuer) -> FaultError:
    fault = FaultError(PendingCopyError, message)
    fault.issuer = issuer
    return fault
