"""What an order leads to: time, balance, waiting and L2 traffic, in steps of one pair of blocks. A model, not a measurement."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fa4.arch import Arch
from fa4.errors import UnsupportedError
from fa4.schedule.order import Schedule, l2_budget
from fa4.schedule.tiles import Tile, TileProblem

TURN = 0.25
"""Steps from a tile's turn at adding to rows of dQ until the next tile's: an assumption; ``fa4.perfmodel`` replays how long it takes."""

MAX_TILES = 1_000_000
_MAX_ACCESSES = 200_000


class Span(NamedTuple):
    """A tile on an SM, from ``start`` to ``end`` in steps; ``waiting`` of them spent on waiting for other tiles."""

    tile: Tile
    sm: int
    start: float
    end: float
    waiting: float = 0.0


@dataclass(frozen=True)
class Simulation:
    """Spans by tile number, and what follows from them.

    Attributes:
        spans: when and where each tile ran.
        sms: SMs of the GPU, or clusters of them, one tile each at a time.
        problem: what ran.
        l2_bytes: size of the L2.
    """

    spans: tuple[Span, ...]
    sms: int
    problem: TileProblem
    l2_bytes: int

    @cached_property
    def l2_reuse(self) -> float:
        """Share of the operand reads that L2 serves, 0 to 1: a model that keeps what was read last."""
        return _l2_reuse(self.problem, self.spans, self.l2_bytes)

    @property
    def makespan(self) -> float:
        """Steps until the last tile is done."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def total(self) -> float:
        """Steps of all tiles together, without waiting."""
        return sum(span.end - span.start - span.waiting for span in self.spans)

    @property
    def waiting(self) -> float:
        """Steps spent on waiting, all SMs together."""
        return sum(span.waiting for span in self.spans)

    @property
    def lower_bound(self) -> float:
        """No order is faster: the work is spread evenly, or the longest tile takes longer."""
        return max(self.total / self.sms, max((span.end - span.start - span.waiting for span in self.spans), default=0.0))

    @property
    def occupancy(self) -> float:
        """Share of the SMs that have any tile at all, 0 to 1."""
        return len({span.sm for span in self.spans}) / self.sms

    @property
    def balance(self) -> float:
        """Work of the average SM that has any, as a share of the makespan, 0 to 1."""
        return self.total / (len({span.sm for span in self.spans}) * self.makespan) if self.spans else 1.0


def simulate(schedule: Schedule, arch: Arch, deterministic: bool = False, cluster: int = 1, turn: float = TURN) -> Simulation:
    """Run a schedule: a free SM takes the next tile, or, in the persistent order, the one that lies as many tiles on as there are SMs.

    ``deterministic``: in the backward pass, tiles add to the dQ of a query block in the order of their numbers, ``turn`` steps apart.
    ``cluster`` SMs compute a tile together; ``sms`` and ``sm`` of the result then count clusters.

    Raises:
        UnsupportedError: more than a million tiles, or a deterministic forward pass, which has nothing to wait for.
    """
    problem, sms = schedule.problem, int(arch.sm_count) // cluster
    if problem.tiles > MAX_TILES:
        raise UnsupportedError("problem", problem.tiles, f"more than {MAX_TILES} tiles are not simulated one by one", "use a shorter one")
    if deterministic and not problem.backward:
        raise UnsupportedError("deterministic", True, "only tiles of the backward pass wait for each other", "pass a backward problem")
    free = [(0.0, sm) for sm in range(sms)]
    ready: dict[tuple[int, int, int], float] = {}
    spans = []
    for index in range(problem.tiles):
        tile = schedule.tile(index)
        at, sm = free[index % sms] if schedule.order == "persistent" else heapq.heappop(free)
        waited = 0.0
        end = at + problem.cost(tile.block, tile.batch)
        if deterministic:
            end, waited = _take_turns(problem, tile, at, (ready, turn))
        spans.append(Span(tile, sm, at, end, waited))
        if schedule.order == "persistent":
            free[sm] = (end, sm)
        else:
            heapq.heappush(free, (end, sm))
    return Simulation(tuple(spans), sms, problem, int(arch.l2))


def simulate_heads(problem: TileProblem, arch: Arch) -> Simulation:
    """FlashAttention-1's way: one thread block computes all tiles of a head (arXiv 2307.08691, section 3.2, tells the story).

    Each is one span, by its first tile; ``l2_reuse`` says nothing of it.
    """
    heads = [Tile(0, head, batch) for batch in range(problem.batch) for head in range(problem.heads)]
    costs = [sum(problem.cost(block, tile.batch) for block in range(problem.blocks(tile.batch))) for tile in heads]
    placed = list_schedule(costs, int(arch.sm_count))
    spans = tuple(Span(tile, sm, start, start + cost) for tile, cost, (sm, start) in zip(heads, costs, placed, strict=True))
    return Simulation(spans, int(arch.sm_count), problem, int(arch.l2))


def list_schedule(costs: Sequence[float], machines: int) -> list[tuple[int, float]]:
    """(machine, start) of each job, when each goes in turn to the machine that is free first (Graham 1966)."""
    free = [(0.0, machine) for machine in range(machines)]
    placed = []
    for cost in costs:
        start, machine = heapq.heappop(free)
        placed.append((machine, start))
        heapq.heappush(free, (start + cost, machine))
    return placed


def _take_turns(problem: TileProblem, tile: Tile, at: float, turns: tuple[dict[tuple[int, int, int], float], float]) -> tuple[float, float]:
    """When a tile that starts ``at`` ends, and how long it waited; ``turns`` says when it is whose turn next, and how long one lasts."""
    ready, turn = turns
    waited = 0.0
    at += problem.cost(tile.block, tile.batch) - len(problem.steps(tile.block, tile.batch))
    for step in problem.steps(tile.block, tile.batch):
        key = (tile.batch, tile.head, step)
        late = max(0.0, ready.get(key, 0.0) - (at + 1))
        waited += late
        at += 1 + late
        ready[key] = at + turn
    return at, waited


def _l2_reuse(problem: TileProblem, spans: Sequence[Span], l2_bytes: int) -> float:
    """Share of reads that find their block in L2, which keeps the blocks that were read last.

    Where there are too many reads, neighbouring steps count as one.
    """
    reads = sum(len(problem.steps(span.tile.block, span.tile.batch)) for span in spans)
    width = max(1, -(-reads // _MAX_ACCESSES))
    accesses = []
    for span in spans:
        steps = problem.steps(span.tile.block, span.tile.batch)
        for step in range(steps.start // width * width, steps.stop, width):
            accesses.append((span.start + step - steps.start, span.tile.batch, span.tile.head // problem.group, step))
    accesses.sort()
    block_bytes = width * problem.tile[not problem.backward] * sum(problem.head_dims) * 2
    capacity = max(1, l2_budget(l2_bytes) // block_bytes)
    kept: OrderedDict[tuple[int, int, int], None] = OrderedDict()
    hits = 0
    for _, *block in accesses:
        key = (block[0], block[1], block[2])
        if key in kept:
            hits += 1
            kept.move_to_end(key)
        else:
            kept[key] = None
            if len(kept) > capacity:
                kept.popitem(last=False)
    return hits / len(accesses) if accesses else 0.0
