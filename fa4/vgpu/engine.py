"""Who runs besides warps, and how warps wait: the machinery that asynchronous instructions are made of.

*An operation on an engine.* An engine executes operations beside the warps, in order: ``cta.engine("tcgen05")`` is the tensor core of a
CTA, ``cta.engine(("tma", offset))`` the loads that signal one mbarrier, and so on; a name makes an engine. An instruction form emits a
call of a helper that reads all its operands and calls ``engine.push(run, issuer)``, where ``run()`` has the whole effect later and
``issuer = g.issuer(op, lane)`` (``op`` by way of ``e.fixed(op)``) says who is to blame for a ``FaultError`` that ``run`` raises. With
``Gpu(delay="late")`` an operation runs as late as possible: in the round-robin schedule when no warp can run; in the random one whenever
it is drawn; in the priority one engines have random priorities among those of the warps. With ``delay="early"`` ``push`` runs it at once.
An instruction that waits for an engine itself (wgmma.wait_group) may simply make it run: ``engine.finish(keep)``.

*Arriving on an mbarrier.* ``mbarrier = g.mbarrier(address)`` of a shared address (32 bits, the CTA's rank in the cluster in its upper
byte), or ``cluster.ctas[rank].mbarriers.at(offset)`` for one at the same offset in another CTA (multicast), then
``mbarrier.arrive(count, who)`` or ``mbarrier.complete_bytes(n, who)``, with the ``Issuer`` as ``who``.

*Waiting.* ``g.block_until(i, Wait(ready, describe, done), signal)`` parks warp ``i`` of the gang until ``ready()``, which is asked again
after every ``signal.notify()``; then ``done()`` is called, which may write result registers. Engines have a ``signal`` that tells
of every completed operation. The instruction must end its block (``program.ENDS``) and be registered with ``isa.registry.ending``.

*Addresses.* In a launch with clusters every shared address has the rank of its CTA in the upper byte, own ones too. ``g.own(address)``
takes the rank off own addresses; ``g.shared_of(address)`` gives the CTA (``cta.cluster.ctas[rank]``, whose memory is ``cta.shared``) and
the offset in it.

*State of other units.* ``cta.unit(Tmem)`` makes one ``Tmem(cta)`` for a CTA when it is first asked for; it is forgotten when the CTA ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, NamedTuple

from fa4.vgpu.memory import FaultError

if TYPE_CHECKING:
    from fa4.vgpu.program import Op
    from fa4.vgpu.state import Cta, Warp

RUNNING, WAITING, EXITED = range(3)


class Issuer(NamedTuple):
    """The lane that issued an operation, and the instruction."""

    cta: Cta
    warp: int
    lane: int
    op: Op | None

    def __str__(self) -> str:
        """For messages."""
        what = "" if self.op is None else f" ({self.op.opcode} at PTX line {self.op.line})"
        return f"CTA {self.cta.id} warp {self.warp}{what}"


class Wait:
    """Why a warp is parked. ``ready`` has no effects; ``done`` is called once when it holds; ``expire`` once if it never will.

    A wait without ``expire`` ends in no other way, so that a warp which waits in vain is a deadlock.
    """

    def __init__(
        self,
        ready: Callable[[], bool],
        describe: Callable[[], str],
        done: Callable[[], None] | None = None,
        expire: Callable[[], None] | None = None,
    ) -> None:
        self.ready, self.describe, self.done, self.expire = ready, describe, done, expire


class Signal:
    """Something that waiting warps want to hear of."""

    def __init__(self) -> None:
        self.waiters: list[tuple[Warp, Wait]] = []

    def notify(self) -> None:
        """Let those go on whose condition holds."""
        if not self.waiters:
            return
        left = []
        for warp, wait in self.waiters:
            if warp.wait is not wait:  # it went on for another reason
                continue
            if wait.ready():
                wake(warp, wait.done)
            else:
                left.append((warp, wait))
        self.waiters = left


def park(warp: Warp, wait: Wait, *signals: Signal) -> None:
    """Stop a warp until ``wait.ready()``; nothing happens where that holds already."""
    if wait.ready():
        if wait.done is not None:
            wait.done()
        return
    warp.state, warp.wait = WAITING, wait
    for signal in signals:
        signal.waiters.append((warp, wait))


def wake(warp: Warp, effect: Callable[[], None] | None) -> None:
    """Let a parked warp go on."""
    warp.state, warp.wait = RUNNING, None
    if effect is not None:
        effect()


class Operation(NamedTuple):
    """What an engine will do, and for whom."""

    run: Callable[[], None]
    issuer: Issuer


class Engine:
    """A queue of operations that run one after the other, in order unless the engine may choose (``ordered`` False)."""

    def __init__(self, cta: Cta, name: Hashable, ordered: bool) -> None:
        self.cta, self.name, self.ordered = cta, name, ordered
        self.queue: deque[Operation] = deque()
        self.signal = Signal()

    def __str__(self) -> str:
        """For messages."""
        return f"engine {self.name} of CTA {self.cta.id}"

    def push(self, run: Callable[[], None], issuer: Issuer) -> None:
        """Queue an operation; with early completion, do it now."""
        launch = self.cta.launch
        if launch.early:
            launch.progress += 1
            run()
            self.signal.notify()
            return
        self.queue.append(Operation(run, issuer))
        self.cta.cluster.schedule.busy[self] = None

    def step(self, place: Callable[[int], int] | None = None) -> None:
        """Do one operation; of several, where there is no order, the one that ``place`` says."""
        queue, launch = self.queue, self.cta.launch
        if place is not None and not self.ordered and len(queue) > 1:
            queue.rotate(-place(len(queue)))
        operation = queue.popleft()
        if not queue:
            del self.cta.cluster.schedule.busy[self]
        launch.progress += 1
        try:
            operation.run()
        except FaultError as fault:
            fault.issuer = fault.issuer or operation.issuer
            raise
        self.signal.notify()

    def finish(self, keep: int = 0) -> None:
        """Do all operations but the newest ``keep``."""
        while len(self.queue) > keep:
            self.step()
