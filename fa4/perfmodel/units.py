"""What warps share in the model: ports, asynchronous engines, barriers. All act in simulated time, through the clock that drives them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

At = Callable[[float, Callable[[float], None]], None]
"""``at(time, action)``: do it then; the action is given the time."""


class Port:
    """Serves requests in the order in which they come."""

    def __init__(self) -> None:
        self.free = 0.0
        self.busy = 0.0

    def request(self, time: float, clocks: float) -> float:
        """When a request of so many clocks is served."""
        start = self.free if self.free > time else time
        self.free = start + clocks
        self.busy += clocks
        return self.free


class Product:
    """A matrix product on its way: how long it takes, the (port, clocks) that its operands take, and what to do when it is done."""

    __slots__ = ("clocks", "flop", "operands", "signals")

    def __init__(self, clocks: float, flop: float, operands: Sequence[tuple[Port, float]]) -> None:
        self.clocks, self.flop, self.operands = clocks, flop, operands
        self.signals: list[Callable[[float], None]] = []


class TensorCore:
    """Products one after the other; the operands of the next are fetched while one is computed."""

    def __init__(self, at: At, log: Callable[[float, float, Product], None]) -> None:
        self.at, self.log = at, log
        self.queue: deque[Product] = deque()
        self.last: Product | None = None
        self.fetched: Product | None = None
        self.fetching = self.computing = False
        self.busy = 0.0

    def push(self, time: float, product: Product) -> None:
        """Add a product."""
        self.queue.append(product)
        self.last = product
        self._fetch(time)

    def signal(self, time: float, action: Callable[[float], None]) -> None:
        """What to do when all products so far are done."""
        if self.last is None:
            action(time)
        else:
            self.last.signals.append(action)

    def _fetch(self, time: float) -> None:
        if self.fetching or self.fetched is not None or not self.queue:
            return
        product = self.queue.popleft()
        self.fetching = True
        done = max((port.request(time, clocks) for port, clocks in product.operands), default=time)
        self.at(done, lambda now: self._arrived(now, product))

    def _arrived(self, time: float, product: Product) -> None:
        self.fetching, self.fetched = False, product
        if not self.computing:
            self._compute(time)

    def _compute(self, time: float) -> None:
        product = self.fetched
        assert product is not None
        self.fetched, self.computing = None, True
        self.busy += product.clocks
        self.log(time, time + product.clocks, product)
        self.at(time + product.clocks, lambda now: self._done(now, product))
        self._fetch(time)

    def _done(self, time: float, product: Product) -> None:
        self.computing = False
        if product is self.last:
            self.last = None
        for action in product.signals:
            action(time)
        if self.fetched is not None:
            self._compute(time)


class Mbarrier:
    """Phases by pending arrivals and bytes; ``waiting`` warps are told when one ends."""

    __slots__ = ("bytes", "expected", "pending", "phase", "waiting")

    def __init__(self, count: int) -> None:
        self.expected = self.pending = count
        self.bytes = 0
        self.phase = 0
        self.waiting: list[tuple[Any, int]] = []

    def passed(self, parity: int) -> bool:
        """Whether the phase of a parity is complete."""
        return self.phase & 1 != parity

    def change(self, arrivals: int, size: int) -> list[Any]:
        """Count arrivals and bytes (more expected: positive); the warps that may go on."""
        self.pending -= arrivals
        self.bytes += size
        if self.pending > 0 or self.bytes != 0:
            return []
        self.phase += 1
        self.pending += self.expected
        ready = [warp for warp, parity in self.waiting if self.passed(parity)]
        self.waiting = [(warp, parity) for warp, parity in self.waiting if not self.passed(parity)]
        return ready


class Gathering:
    """A named barrier or that of a cluster: threads that arrived of those expected (0: all), warps that wait, and phases so far."""

    __slots__ = ("arrived", "expected", "phase", "time", "waiting")

    def __init__(self) -> None:
        self.arrived = self.expected = self.phase = 0
        self.time = 0.0
        self.waiting: list[Any] = []


class Semaphore:
    """A counter in global memory; ``waiting`` are (whoever looks at it, the value that they want)."""

    def __init__(self) -> None:
        self.value = 0
        self.waiting: list[tuple[Any, int]] = []

    def change(self, value: int, added: bool) -> list[Any]:
        """Count on, or set; gives those who have what they want."""
        self.value = self.value + value if added else value
        ready = [who for who, wanted in self.waiting if self.value >= wanted]
        self.waiting = [(who, wanted) for who, wanted in self.waiting if self.value < wanted]
        return ready
