"""From the cycles of a few tiles to the time of a whole problem: tiles over SMs in the order in which a schedule hands them out."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fa4.arch import ARCHS
from fa4.errors import ModelError
from fa4.perfmodel.machine import Machine
from fa4.schedule import Schedule, TileProblem, simulate


@dataclass(frozen=True)
class Sample:
    """What one CTA (or cluster) took: ``steps`` of all its ``tiles``, from its launch to the end of its last store."""

    steps: float
    tiles: int
    cycles: float


@dataclass(frozen=True)
class TileCost:
    """Cycles of a CTA.

    ``start`` is for its launch, its first loads and its last stores, ``step`` for each pair of blocks, ``turn`` for each tile after the
    first. ``wait`` is from a tile's turn at rows of dQ until the next one's, where tiles take turns.
    """

    start: float
    step: float
    turn: float = 0.0
    wait: float = 0.0

    def cycles(self, steps: float, tiles: int = 1) -> float:
        """Of a CTA with so many tiles, and steps in all of them together."""
        return self.start + self.step * steps + self.turn * (tiles - 1)


def fit(samples: Sequence[Sample]) -> TileCost:
    """Least squares; exact where there are as many samples as numbers.

    Raises:
        ModelError: too few samples, or all of one kind.
    """
    persistent = any(s.tiles > 1 for s in samples)
    rows = np.array([[1.0, s.steps, s.tiles - 1.0][: 2 + persistent] for s in samples])
    if np.linalg.matrix_rank(rows) < rows.shape[1]:
        remedy = "replay traces of two lengths, and one with several tiles where the kernel is persistent"
        raise ModelError("samples", [(s.steps, s.tiles) for s in samples], "do not determine the cost of a tile", remedy)
    solution, *_ = np.linalg.lstsq(rows, np.array([s.cycles for s in samples]), rcond=None)
    return TileCost(*(float(x) for x in solution))


def makespan(cost: TileCost, schedule: Schedule, workers: int) -> float:
    """Cycles until the last CTA is done, ``workers`` CTAs (or clusters) at a time."""
    problem = schedule.problem
    lengths: dict[tuple[int, int], int] = {}

    def steps(index: int) -> int:
        tile = schedule.tile(index)
        key = tile.block, tile.batch if problem.packed else 0
        if key not in lengths:
            lengths[key] = len(problem.steps(tile.block, tile.batch))
        return lengths[key]

    if schedule.order == "persistent":
        first = range(min(workers, problem.tiles))
        shares = (range(w, problem.tiles, workers) for w in first)
        return max((cost.cycles(sum(map(steps, share)), len(share)) for share in shares), default=0.0)
    # In the dynamic order a CTA starts once; that it asks for its next tile a little before the end of this one does not count.
    begin, each = (cost.start - cost.turn, cost.turn) if schedule.order == "dynamic" else (0.0, cost.start)
    free = [begin] * workers
    for index in range(problem.tiles):
        heapq.heappush(free, heapq.heappop(free) + each + cost.step * steps(index))
    return max(free) if problem.tiles else 0.0


def attention_flop(problem: TileProblem) -> float:
    """FLOP as benchmarks count them: 2 for each multiply-add of the products, pairs that a causal mask hides counted as a half of all."""
    pairs = 0.0
    for batch in range(problem.batch):
        seqlen_q, seqlen_k = problem.length(batch)
        pairs += seqlen_q * seqlen_k * (0.5 if problem.window[1] == 0 else 1.0)
        if not problem.packed:
            pairs *= problem.batch
            break
    d, dv = problem.head_dims
    products = 3 * d + 2 * dv if problem.backward else d + dv
    return 2.0 * pairs * problem.heads * products


def streaming_cycles(problem: TileProblem, machine: Machine) -> float:
    """Cycles of what the backward pass does before and after its main kernel, both bound by device memory.

    Before: O and dO are read, a number a row is written, and dQ's float32 accumulator is cleared. After: that is read, and dQ written.
    """
    if not problem.backward:
        return 0.0
    rows = sum(problem.length(b)[0] for b in range(problem.batch)) * problem.heads
    d, dv = problem.head_dims
    moved = rows * (2 * 2 * dv + 2 * 4 + 4 * d + 4 * d + 2 * d)
    return moved / machine.dram.value * machine.clock.value + 2 * machine.launch.value


def waiting(cost: TileCost, schedule: Schedule, workers: int) -> float:
    """By what factor waiting for each other makes the tiles of a deterministic backward slower, by ``fa4.schedule.simulate``."""
    arch = ARCHS["sm_100a"]  # of which only the number of SMs counts here
    arch = replace(arch, sm_count=replace(arch.sm_count, value=workers))
    return simulate(schedule, arch, True, turn=cost.wait / cost.step).makespan / simulate(schedule, arch).makespan


def problem_cycles(cost: TileCost, schedule: Schedule, machine: Machine, each: float = 1, deterministic: bool = False) -> float:
    """Cycles of a whole call: its main kernel on all SMs, and what goes before and after.

    ``each`` is how many CTAs, or clusters of them, an SM holds: 1/2 for a pair, which takes two SMs. Tiles of a ``deterministic``
    backward wait for each other.
    """
    workers = int(machine.sms.value * each)
    main = makespan(cost, schedule, workers)
    if deterministic and schedule.problem.backward:
        main *= waiting(cost, schedule, workers)
    return main + streaming_cycles(schedule.problem, machine)
