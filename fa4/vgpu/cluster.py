"""Clusters: CTAs that are on the machine together, reach each other's shared memory and have a barrier (PTX ISA 9.7.13.5)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.clocks import joined
from fa4.vgpu.engine import Signal, Wait, park
from fa4.vgpu.errors import BarrierError, DivergenceError
from fa4.vgpu.hazards import Hazards
from fa4.vgpu.memory import FaultError
from fa4.vgpu.scheduler import ClusterSchedule
from fa4.vgpu.state import Cta, Dim3, Gang

if TYPE_CHECKING:
    from fa4.vgpu.machine import Launch

Array = npt.NDArray[Any]
Key = tuple[int, int]  # rank of the CTA, warp

_NOBODY = np.zeros(32, bool)


class Cluster:
    """CTAs by rank (x fastest); when all have ended, ``restart`` makes another cluster of them. Without clusters: one CTA."""

    def __init__(self, launch: Launch, index: int) -> None:
        self.launch = launch
        x, y, z = launch.cluster
        self.ctas = [Cta(launch, self, rank) for rank in range(x * y * z)]
        self.restart(index)

    def restart(self, index: int) -> None:
        """Begin as cluster ``index`` of the grid."""
        self.index = index
        self.id: Dim3 = cluster_id(self.launch, index)
        self.ticks = 0  # steps of its own
        self.schedule = ClusterSchedule(self.launch.scheduler.schedule, self.launch.scheduler.seed, index, self.ctas)
        self.barrier = ClusterBarrier(self)
        self.hazards = None if self.launch.checks == "basic" else Hazards(self)
        for cta in self.ctas:
            cta.restart()

    @property
    def live(self) -> bool:
        """Whether a warp of it has not exited."""
        return any(cta.live for cta in self.ctas)


def cluster_id(launch: Launch, index: int) -> Dim3:
    """The place of a cluster in the grid of clusters."""
    nx, ny = launch.grid[0] // launch.cluster[0], launch.grid[1] // launch.cluster[1]
    return index % nx, index // nx % ny, index // (nx * ny)


class ClusterBarrier:
    """``barrier.cluster``: every thread arrives, and then waits, once in each phase; threads that exit count as arrived."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.phase = 0
        self.arrived: dict[Key, Array] = {}
        self.unwaited: dict[Key, Array] = {}
        self.signal = Signal()
        self.gathered: Array | None = None
        self.published: Array | None = None

    def arrive(self, gang: Gang, aligned: bool, relaxed: bool, mask: Array | None) -> None:
        """Lanes of a gang arrive; where ``relaxed`` that orders nothing but what a fence has released.

        Raises:
            FaultError: a lane arrives twice without waiting, or not all lanes of a warp do where the instruction is aligned.
        """
        for i, lanes in self._warps(gang, aligned, mask):
            key = gang.cta.rank, gang.first + i
            arrived = self.arrived.get(key, _NOBODY)
            again = lanes & (arrived | self.unwaited.get(key, _NOBODY))
            if again.any():
                raise FaultError(BarrierError, "barrier.cluster.arrive again without barrier.cluster.wait in between", _at(gang, i, again))
            self.arrived[key] = arrived | lanes
            hazards = self.cluster.hazards
            if hazards is not None:
                self.gathered = joined(self.gathered, hazards.arrive(hazards.warp(gang.cta, key[1]), relaxed))
        self.check()

    def check(self) -> None:
        """Complete the phase where every thread that has not exited arrived."""
        if not self.arrived:
            return
        for cta in self.cluster.ctas:
            for warp in cta.warps:
                if not (warp.exited | self.arrived.get((cta.rank, warp.index), _NOBODY)).all():
                    return
        self.unwaited, self.arrived = self.arrived, {}
        self.published, self.gathered = self.gathered, None
        self.phase += 1
        self.cluster.launch.progress += 1
        self.signal.notify()

    def wait(self, gang: Gang, aligned: bool, mask: Array | None) -> None:
        """Park the warps of a gang until the phase in which they arrived is complete.

        Raises:
            FaultError: a lane waits that did not arrive, or not all lanes of a warp do where the instruction is aligned.
        """
        for i, lanes in self._warps(gang, aligned, mask):
            key = gang.cta.rank, gang.first + i
            arrived = self.arrived.get(key, _NOBODY)
            absent = lanes & ~(arrived | self.unwaited.get(key, _NOBODY))
            if absent.any():
                raise FaultError(BarrierError, "barrier.cluster.wait without barrier.cluster.arrive", _at(gang, i, absent))
            after = self.phase + bool((lanes & arrived).any())
            wait = Wait(partial(self._reached, after), self.describe, partial(self._waited, key, lanes, gang.site))
            park(gang.cta.warps[gang.first + i], wait, self.signal)

    def _reached(self, phase: int) -> bool:
        return self.phase >= phase

    def _waited(self, key: Key, lanes: Array, site: int) -> None:
        self.unwaited[key] = self.unwaited[key] & ~lanes
        if self.cluster.hazards is not None and self.published is not None:
            hazards = self.cluster.hazards
            hazards.follow(hazards.warp(self.cluster.ctas[key[0]], key[1]), self.published, site)

    def _warps(self, gang: Gang, aligned: bool, mask: Array | None) -> list[tuple[int, Array]]:
        """(warp of the gang, lanes that execute)."""
        found = []
        for i in range(gang.warps):
            active = ~gang.cta.warps[gang.first + i].exited
            lanes = active if mask is None else mask[32 * i : 32 * i + 32]
            if not lanes.any():
                continue
            if aligned and (lanes != active).any():
                missing = np.flatnonzero(active & ~lanes).tolist()
                raise FaultError(DivergenceError, f"lanes {missing} of the warp do not execute this barrier together", _at(gang, i, lanes))
            found.append((i, lanes))
        return found

    def describe(self) -> str:
        """What the barrier has and what it lacks, for the table of a deadlock."""
        missing = []
        for cta in self.cluster.ctas:
            warps = [w.index for w in cta.warps if not (w.exited | self.arrived.get((cta.rank, w.index), _NOBODY)).all()]
            if warps:
                missing.append(f"warps {warps} of CTA {cta.id}")
        return f"the barrier of cluster {self.cluster.id}: {', '.join(missing)} did not arrive"


def _at(gang: Gang, i: int, lanes: Array) -> Array:
    faulty = np.zeros(gang.n, bool)
    faulty[32 * i : 32 * i + 32] = lanes
    return faulty
