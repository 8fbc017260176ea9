"""What the events of a trace do in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fa4.errors import ModelError
from fa4.perfmodel.report import Span
from fa4.perfmodel.trace import Event
from fa4.perfmodel.units import Gathering, Mbarrier, Port, Product, Semaphore

if TYPE_CHECKING:
    from fa4.perfmodel.simulation import Cta, Simulation, Sm, Warp

NEVER = float("inf")
CHUNK = 4096
"""Bytes in which bulk copies come to the port of shared memory."""

_16_BIT = 2


class Group:
    """Asynchronous products of a warp that were committed together."""

    __slots__ = ("done", "waiting")

    def __init__(self) -> None:
        self.done = False
        self.waiting: Warp | None = None


class Actions:
    """Handlers of events. Each gives when the result is there; ``-time``: the warp itself goes on then; ``NEVER``: it waits for others."""

    def __init__(self, simulation: Simulation) -> None:
        self.s, self.machine = simulation, simulation.machine
        self.parked: dict[Warp, tuple[float, int, str]] = {}
        self.turns: dict[int, float] = {}  # by address of a semaphore, since when it is somebody's turn
        names = [name.removeprefix("_on_") for name in dir(self) if name.startswith("_on_")]
        self.handlers: dict[str, Callable[[Warp, float, Event, float], float]] = {name: getattr(self, f"_on_{name}") for name in names}
        m = self.machine
        self.smem, self.try_wait, self.wake, self.arrive = m.smem.value, m.try_wait.value, m.wake.value, m.arrive.value
        self.barrier, self.lds_latency, self.local_port = m.barrier.value, m.lds_latency.value, m.local_port.value
        self.dsmem = 0.0 if m.dsmem is None else m.dsmem.value

    # Steps

    def event(self, warp: Warp, time: float, step: Any, done: float) -> float:
        """Execute the next event of a warp."""
        event = warp.events[warp.next_event]
        warp.next_event += 1
        handler = self.handlers.get(event.kind)
        if handler is None:
            return done
        result = handler(warp, time, event, done)
        if result == NEVER:
            self.parked[warp] = time, step[-1], f"{event.kind} {event.data[1] if event.kind == 'wait' else ''}".strip()
        return result

    def shared(self, wavefronts: int, loads: bool) -> Callable[[Warp, float, Any, float], float]:
        """An access to shared memory that no event describes."""
        extra = self.lds_latency if loads else 0.0

        def act(warp: Warp, time: float, step: Any, done: float) -> float:
            return warp.cta.sm.port.request(time, wavefronts) + extra

        return act

    def local(self, warp: Warp, time: float, step: Any, done: float) -> float:
        """A local load or store: it shares the port."""
        sm = warp.cta.sm
        sm.local += self.local_port
        return sm.port.request(time, self.local_port) + self.machine.local_latency.value

    def tensor_stores(self, warp: Warp, time: float, step: Any, done: float) -> float:
        """Wait until what was stored to tensor memory is there: the warp, or who waits for the scoreboard."""
        return max(done, warp.stored) if step[4] else -max(time + 1.0, warp.stored)

    def tensor_store(self, warp: Warp, time: float, step: Any, done: float) -> float:
        """A store to tensor memory."""
        warp.stored = max(warp.stored, done)
        return done

    def go_on(self, warp: Warp, time: float, delay: float) -> None:
        """A parked warp goes on, some latency after what it waited for."""
        since, number, _ = self.parked.pop(warp)
        when = time + self.s.shaken(delay)
        key = number, "wait"
        self.s.log.stalls[key] = self.s.log.stalls.get(key, 0.0) + when - since
        if self.s.log.timeline:
            self.s.log.spans.append(Span(warp.cta.sm.index, f"warp {warp.index}", "wait", since, when, number))
        self.s.resume(warp, when)

    # mbarriers

    def _mbarrier(self, cta: Cta, rank: int, offset: int) -> Mbarrier:
        found = cta.peers[rank].mbarriers.get(offset) if rank < len(cta.peers) else None
        if found is None:
            rule = f"no mbarrier was initialised at {offset:#x} of CTA {rank} of the cluster by this simulated time"
            raise ModelError("trace", cta.trace.index, rule, "record whole clusters from their start")
        return found

    def _change(self, cta: Cta, where: tuple[int, int], arrivals: int, size: int) -> Callable[[float], None]:
        def act(time: float) -> None:
            for warp in self._mbarrier(cta, *where).change(arrivals, size):
                self.go_on(warp, time, self.wake)

        return act

    def _on_init(self, warp: Warp, time: float, event: Event, done: float) -> float:
        rank, offset, count = event.data
        warp.cta.peers[rank].mbarriers[offset] = Mbarrier(count)
        return done

    def _on_wait(self, warp: Warp, time: float, event: Event, done: float) -> float:
        rank, offset, parity = event.data
        found = self._mbarrier(warp.cta, rank, offset)
        if found.passed(parity):
            return done
        found.waiting.append((warp, parity))
        return NEVER

    def _on_test(self, warp: Warp, time: float, event: Event, done: float) -> float:
        return done

    def _on_arrive(self, warp: Warp, time: float, event: Event, done: float) -> float:
        rank, offset, count, size = event.data
        delay = self.arrive if rank == warp.cta.trace.rank else self.s.shaken(self.dsmem)
        self.s.at(time + delay, self._change(warp.cta, (rank, offset), count, size))
        return done

    def _on_expect(self, warp: Warp, time: float, event: Event, done: float) -> float:
        rank, offset, size = event.data
        self.s.at(time + self.arrive, self._change(warp.cta, (rank, offset), 0, size))
        return done

    # Other barriers

    def _on_bar(self, warp: Warp, time: float, event: Event, done: float) -> float:
        number, threads, arrives = event.data
        found = warp.cta.named.setdefault(number, Gathering())
        found.arrived += 32
        found.expected = threads
        if not arrives:
            found.waiting.append(warp)
            self.parked[warp] = time, -1, "bar"
        full = self._full(warp.cta, found)
        if full:
            found.arrived = 0
            waiting, found.waiting = found.waiting, []
            for other in waiting:
                if other is not warp:
                    self.go_on(other, time, self.barrier)
        if arrives:
            return done
        if full:
            del self.parked[warp]
            return -(time + self.barrier)
        return NEVER

    def _full(self, cta: Cta, found: Gathering) -> bool:
        return found.arrived > 0 and found.arrived >= (found.expected or 32 * cta.live)

    def left(self, cta: Cta, time: float) -> None:
        """A warp of a CTA has ended: others may have waited for all that are left."""
        for found in cta.named.values():
            if found.waiting and not found.expected and self._full(cta, found):
                found.arrived = 0
                waiting, found.waiting = found.waiting, []
                for warp in waiting:
                    self.go_on(warp, time, self.barrier)
        self._check_cluster(cta, time)

    def _on_cluster_arrive(self, warp: Warp, time: float, event: Event, done: float) -> float:
        found = warp.cta.gathering
        warp.cluster_phase = found.phase
        found.arrived += 32
        self._check_cluster(warp.cta, time)
        return done

    def _check_cluster(self, cta: Cta, time: float) -> None:
        found = cta.gathering
        if found.arrived and found.arrived >= 32 * sum(peer.live for peer in cta.peers):
            found.arrived = 0
            found.phase += 1
            found.time = time + (self.dsmem if len(cta.peers) > 1 else self.barrier)
            waiting, found.waiting = found.waiting, []
            for warp in waiting:
                self.go_on(warp, time, found.time - time)

    def _on_cluster_wait(self, warp: Warp, time: float, event: Event, done: float) -> float:
        found = warp.cta.gathering
        if found.phase > warp.cluster_phase:
            return -max(time + 1.0, found.time)
        found.waiting.append(warp)
        return NEVER

    # Tensor cores

    def _on_mma(self, warp: Warp, time: float, event: Event, done: float) -> float:
        group, m, n, k, size, in_memory = event.data
        rate = self.machine.need("tcgen05", "tcgen05.mma") * _16_BIT / size
        clocks = 2.0 * max(m, 128 * group) * n * k / (rate * group)
        each = (0 if in_memory else m // group * k * size) + n // group * k * size
        ports = self._pair(warp.cta, group)
        product = Product(clocks, 2.0 * m * n * k, [(sm.port, each / self.smem) for sm in ports])
        self.s.core(ports[0]).push(time, product)
        return done

    def _pair(self, cta: Cta, group: int) -> list[Sm]:
        """The SMs that work on an instruction, the even CTA's first."""
        if group == 1:
            return [cta.sm]
        first = cta.trace.rank & ~1
        return [peer.sm for peer in cta.peers[first : first + 2]]

    def _on_commit(self, warp: Warp, time: float, event: Event, done: float) -> float:
        offset, *ranks = event.data
        cta, delay = warp.cta, self.machine.need("tcgen05_done", "tcgen05.commit")

        def act(now: float) -> None:
            for rank in ranks:
                self.s.at(now + self.s.shaken(delay), self._change(cta, (rank, offset), 1, 0))

        first = cta.peers[cta.trace.rank & ~1].sm if self.s.uses_pairs else cta.sm
        self.s.core(first).signal(time, act)
        return done

    def _on_wgmma(self, warp: Warp, time: float, event: Event, done: float) -> float:
        n, k, size, in_registers = event.data
        rate = self.machine.need("wgmma", "wgmma") * _16_BIT / size / 4
        flop = 2.0 * 16 * n * k
        moved = (0 if in_registers else 16 * k * size) + (n * k * size if warp.part == 0 else 0)
        port = warp.cta.sm.port
        product = Product(flop / rate, flop, [(port, moved / self.smem)] if moved else [])
        self.s.core(warp.cta.sm, 1 + warp.part).push(time, product)
        return done

    def _on_wg_commit(self, warp: Warp, time: float, event: Event, done: float) -> float:
        group = Group()
        warp.async_groups.append(group)
        latency = self.machine.need("wgmma_latency", "wgmma")

        def act(now: float) -> None:
            group.done = True
            if group.waiting is not None:
                self.go_on(group.waiting, now, latency)

        self.s.core(warp.cta.sm, 1 + warp.part).signal(time, act)
        return done

    def _on_wg_wait(self, warp: Warp, time: float, event: Event, done: float) -> float:
        (keep,) = event.data
        groups = warp.async_groups
        awaited = groups[: len(groups) - keep]
        warp.async_groups = groups[len(awaited) :]
        if not awaited or awaited[-1].done:
            return done
        awaited[-1].waiting = warp
        return NEVER

    # Bulk copies

    def _on_load(self, warp: Warp, time: float, event: Event, done: float) -> float:
        rate, latency = self.machine.need("tma", "TMA"), self.machine.need("tma_latency", "TMA")
        data = event.data
        for i in range(0, len(data), 4):
            size, to, teller, offset = data[i : i + 4]
            if i == 0 or data[i - 1] != offset or data[i - 3] == to:  # the copies of a multicast come from one request
                begin = warp.cta.sm.loads.request(time, size / rate) - size / rate
                first = begin + self.s.shaken(latency)
            self._arriving(warp.cta, first, (size, to), rate, self._change(warp.cta, (teller, offset), 0, -size))
            if self.s.log.timeline:
                self.s.log.spans.append(Span(warp.cta.sm.index, "TMA loads", f"{size} bytes", begin, first + size / rate, -1))
        return done

    def _arriving(self, cta: Cta, first: float, what: tuple[int, int], rate: float, then: Callable[[float], None]) -> None:
        """Chunks of a copy come to shared memory of a CTA and take its port; then something happens."""
        size, to = what
        port = cta.peers[to].sm.port
        chunks = max(1, -(-size // CHUNK))
        for i in range(chunks):
            part = min(CHUNK, size - i * CHUNK)
            self.s.at(first + (i * CHUNK + part) / rate, self._chunk(port, part, then if i == chunks - 1 else None))

    def _chunk(self, port: Port, size: int, then: Callable[[float], None] | None) -> Callable[[float], None]:
        def act(time: float) -> None:
            end = port.request(time, size / self.smem)
            if then is not None:
                self.s.at(end, then)

        return act

    def _on_copy(self, warp: Warp, time: float, event: Event, done: float) -> float:
        size, to, teller, offset = event.data
        rate = self.machine.need("tma", "a copy between CTAs")
        begin = warp.cta.sm.remote.request(time, size / rate) - size / rate
        first = begin + self.s.shaken(self.dsmem)
        self._arriving(warp.cta, first, (size, to), rate, self._change(warp.cta, (teller, offset), 0, -size))
        return done

    def _on_ask(self, warp: Warp, time: float, event: Event, done: float) -> float:
        """A request for a cluster: nobody has published how long the answer takes. An access to global memory goes as far."""
        there = time + self.s.shaken(self.machine.global_latency.value)
        for i in range(0, len(event.data), 4):
            size, _, teller, offset = event.data[i : i + 4]
            self.s.at(there, self._change(warp.cta, (teller, offset), 0, -size))
        return done

    def _on_store(self, warp: Warp, time: float, event: Event, done: float) -> float:
        size, _ = event.data
        rate, latency = self.machine.need("tma", "TMA"), self.machine.need("tma_store_latency", "TMA")
        sm = warp.cta.sm
        end = sm.stores.request(time, size / rate)
        self._arriving(warp.cta, end - size / rate, (size, warp.cta.trace.rank), rate, lambda now: None)
        warp.bulk_open[0] = max(warp.bulk_open[0], end + CHUNK / self.smem)
        warp.bulk_open[1] = max(warp.bulk_open[1], end + self.s.shaken(latency))
        return done

    def _on_bulk_commit(self, warp: Warp, time: float, event: Event, done: float) -> float:
        warp.bulk_groups.append((warp.bulk_open[0], warp.bulk_open[1]))
        warp.bulk_open = [0.0, 0.0]
        return done

    def _on_bulk_wait(self, warp: Warp, time: float, event: Event, done: float) -> float:
        keep, read = event.data
        groups = warp.bulk_groups
        awaited = groups[: len(groups) - keep] if keep else groups
        if not read:
            warp.bulk_groups = groups[len(awaited) :]
        return -max([time + 1.0, *(group[0 if read else 1] for group in awaited)])

    # Loads and stores

    def _on_lds(self, warp: Warp, time: float, event: Event, done: float) -> float:
        return warp.cta.sm.port.request(time, event.data[0]) + self.lds_latency

    def _on_sts(self, warp: Warp, time: float, event: Event, done: float) -> float:
        return warp.cta.sm.port.request(time, event.data[0])

    def _on_ldg(self, warp: Warp, time: float, event: Event, done: float) -> float:
        served = warp.cta.sm.copies.request(time, 32 * event.data[0] / self.machine.copy.value)
        return served + self.s.shaken(self.machine.global_latency.value)

    def _on_stg(self, warp: Warp, time: float, event: Event, done: float) -> float:
        warp.cta.sm.copies.request(time, 32 * event.data[0] / self.machine.copy.value)
        return done

    _on_atom = _on_ldg

    # Semaphores

    def _on_poll(self, warp: Warp, time: float, event: Event, done: float) -> float:
        address, wanted = event.data
        found = self.s.semaphores.get(address)
        if found is None or found.value >= wanted:
            there = time + self.s.shaken(self.machine.global_latency.value)
            self.turns[address] = there
            return there
        found.waiting.append((warp, wanted))
        return NEVER

    def _on_signal(self, warp: Warp, time: float, event: Event, done: float) -> float:
        address, value, added = event.data
        there = time + self.s.shaken(self.machine.global_latency.value / 2)
        begun = self.turns.pop(address, None)
        if begun is not None:
            self.s.log.turns.append(there - begun)
        found = self.s.semaphores.get(address)
        if found is not None:
            self.s.at(there, self._count(found, address, value, bool(added)))
        return done

    def _count(self, found: Semaphore, address: int, value: int, added: bool) -> Callable[[float], None]:
        """A semaphore counts; those who wait notice when they look next, which takes half a round trip after it was begun."""

        def act(time: float) -> None:
            trip = self.machine.global_latency.value
            for warp in found.change(value, added):
                delay = trip * (0.5 + self.s.random.random())
                self.turns[address] = time + delay
                self.go_on(warp, time, delay)

        return act

    def _on_cp(self, warp: Warp, time: float, event: Event, done: float) -> float:
        size, wavefronts, _ = event.data
        sm = warp.cta.sm
        there = sm.copies.request(time, size / self.machine.copy.value) + self.s.shaken(self.machine.global_latency.value)
        self.s.at(there, lambda now: self._written(sm, now, wavefronts))
        warp.copy_open = max(warp.copy_open, there + wavefronts)
        return done

    def _written(self, sm: Sm, time: float, wavefronts: int) -> None:
        sm.port.request(time, wavefronts)

    def _on_cp_commit(self, warp: Warp, time: float, event: Event, done: float) -> float:
        warp.copy_groups.append(warp.copy_open)
        warp.copy_open = 0.0
        return done

    def _on_cp_wait(self, warp: Warp, time: float, event: Event, done: float) -> float:
        (keep,) = event.data
        groups = warp.copy_groups
        awaited = groups[: len(groups) - keep] if keep else groups
        warp.copy_groups = groups[len(awaited) :]
        return -max([time + 1.0, *awaited])

    def _on_cp_arrive(self, warp: Warp, time: float, event: Event, done: float) -> float:
        rank, offset, count = event.data
        when = max([time + self.arrive, warp.copy_open, *warp.copy_groups])
        self.s.at(when, self._change(warp.cta, (rank, offset), count, 0))
        return done
