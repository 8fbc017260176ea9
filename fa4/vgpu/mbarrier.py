"""mbarrier objects (PTX ISA 9.7.13.16): phases that end when all expected arrivals and all expected bytes are in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from fa4.vgpu.clocks import joined
from fa4.vgpu.engine import Issuer, Signal
from fa4.vgpu.errors import BarrierError
from fa4.vgpu.memory import FaultError

if TYPE_CHECKING:
    from fa4.vgpu.clocks import Conflict
    from fa4.vgpu.program import Op
    from fa4.vgpu.state import Cta

Array = npt.NDArray[Any]
MOST_ARRIVALS = 2**20 - 1
MOST_BYTES = 2**20 - 1


class Mbarrier:
    """One object: ``expected`` and ``pending`` arrivals, ``bytes`` still to come (negative where they came before they were expected)."""

    def __init__(self, cta: Cta, offset: int, count: int) -> None:
        self.cta, self.offset = cta, offset
        self.expected = self.pending = count
        self.bytes = 0
        self.phase = 0
        self.signal = Signal()
        self.arrivals: list[tuple[Issuer, int]] = []
        self.gathered: Array | None = None
        self.published: Array | None = None
        self.made: Conflict | None = None  # who initialised it
        self.came: dict[int, Op] = {}  # instructions that arrived since the last wait
        self.visible = False  # to asynchronous operations
        self.seen = 0  # phases that a warp found complete
        self.commit: tuple[int, Issuer] | None = None  # by another CTA, the last that arrived: in which phase, and whose

    def __str__(self) -> str:
        """For messages."""
        return f"mbarrier {self.offset:#x} of CTA {self.cta.id}"

    def describe(self) -> str:
        """What the phase has and what it lacks."""
        came = "; ".join(f"{count} by {who}" for who, count in self.arrivals[-8:]) or "none"
        return f"{self} in phase {self.phase}: {self.pending} of {self.expected} arrivals and {self.bytes} bytes are missing; came: {came}"

    def state(self) -> int:
        """The token of the current phase: its number, and the pending arrivals in the low 32 bits."""
        return (self.phase & 0xFFFFFFFF) << 32 | self.pending

    def completed(self, token: int) -> bool:
        """Whether the phase of a token is complete.

        Raises:
            FaultError: the token is of neither the current nor the last phase.
        """
        behind = (self.phase - (token >> 32)) & 0xFFFFFFFF
        if behind > 1:
            raise FaultError(BarrierError, f"a token of phase {token >> 32}, but {self.describe()}")
        return behind == 1

    def arrive(self, count: int, who: Issuer, clock: Array | None, drop: bool = False, complete: bool = True) -> None:
        """``count`` arrivals; ``drop`` takes them off the following phases too. With ``complete`` False the phase may not end.

        Whoever waits for the phase comes behind ``clock``.

        Raises:
            FaultError: more arrivals than the phase still expects.
        """
        if count < 1 or count > self.pending:
            raise FaultError(BarrierError, f"{count} arrivals by {who}, too many or too few: {self.describe()}")
        if not complete and count == self.pending:
            raise FaultError(BarrierError, f"arrive.noComplete by {who} would complete the phase: {self.describe()}")
        self.pending -= count
        self.arrivals.append((who, count))
        if clock is not None and who.op is not None:
            self.came[id(who.op)] = who.op
        self.gathered = joined(self.gathered, clock)
        if drop:
            self.expected -= count
        self._advance()

    def expect_more(self, count: int, who: Issuer) -> None:
        """Raise the pending count of this phase, for an arrival that will come by itself (cp.async.mbarrier.arrive)."""
        if self.pending + count > MOST_ARRIVALS:
            raise FaultError(BarrierError, f"{count} more arrivals by {who} than an mbarrier can count: {self.describe()}")
        self.pending += count

    def expect_bytes(self, size: int, who: Issuer) -> None:
        """Wait for ``size`` more bytes in this phase.

        Raises:
            FaultError: the count leaves its range.
        """
        self._transaction(size, who)
        self._advance()

    def complete_bytes(self, size: int, who: Issuer, clock: Array | None) -> None:
        """``size`` bytes came; whoever waits for the phase comes behind ``clock``.

        Raises:
            FaultError: the count leaves its range.
        """
        self.gathered = joined(self.gathered, clock)
        self._transaction(-size, who)
        self._advance()

    def _transaction(self, size: int, who: Issuer) -> None:
        if abs(self.bytes + size) > MOST_BYTES:
            verb = "expected" if size > 0 else "completed"
            raise FaultError(BarrierError, f"{abs(size)} bytes {verb} by {who}: beyond the 2^20-1 that are counted: {self.describe()}")
        self.bytes += size
        self.cta.launch.progress += 1

    def _advance(self) -> None:
        self.cta.launch.progress += 1
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.expected
            self.arrivals = []
            self.published, self.gathered = joined(self.published, self.gathered), None
            self.signal.notify()


class Mbarriers:
    """The mbarriers of a CTA, by offset in its shared memory."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.objects: dict[int, Mbarrier] = {}

    def at(self, offset: int) -> Mbarrier:
        """The mbarrier at ``offset``.

        Raises:
            FaultError: there is none.
        """
        found = self.objects.get(offset)
        if found is None:
            known = ", ".join(f"{o:#x}" for o in self.objects) or "none"
            raise FaultError(
                BarrierError, f"no mbarrier was initialised at shared address {offset:#x} of CTA {self.cta.id}; there are: {known}"
            )
        return found

    def init(self, offset: int, count: int) -> None:
        """Make one that expects ``count`` arrivals.

        Raises:
            FaultError: misaligned, a count out of range, or one is there already.
        """
        if offset % 8:
            raise FaultError(BarrierError, f"an mbarrier at {offset:#x}, which is not a multiple of 8")
        if not 1 <= count <= MOST_ARRIVALS:
            raise FaultError(BarrierError, f"an mbarrier with {count} arrivals: must be 1 to 2^20-1")
        if offset in self.objects:
            raise FaultError(BarrierError, f"{self.objects[offset]} is initialised again without mbarrier.inval")
        self.objects[offset] = Mbarrier(self.cta, offset, count)

    def invalidate(self, offset: int) -> None:
        """Forget one.

        Raises:
            FaultError: there is none, or a warp waits for it.
        """
        found = self.at(offset)
        waiting = [warp.index for warp, wait in found.signal.waiters if warp.wait is wait]
        if waiting:
            raise FaultError(BarrierError, f"{found} is invalidated while warps {waiting} wait for it")
        del self.objects[offset]
