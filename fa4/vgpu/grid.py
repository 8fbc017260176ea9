"""Clusters of a grid, run in one process: those that are resident together, the next as one ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fa4.vgpu.cluster import Cluster
from fa4.vgpu.engine import Engine
from fa4.vgpu.step import deadlock, expire, run_engine, run_warps

if TYPE_CHECKING:
    from fa4.vgpu.machine import Launch


def clusters_of(launch: Launch) -> int:
    """How many clusters the grid has."""
    x, y, z = (g // c for g, c in zip(launch.grid, launch.cluster, strict=True))
    return x * y * z


def run_clusters(launch: Launch, indices: Sequence[int]) -> None:
    """Run these clusters of the grid to their end; they start in this order, except those whose launch one that runs cancels.

    What a cluster does depends on no other, unless they communicate: its schedule is its own, see ``ClusterSchedule``.

    Raises:
        VgpuError: what is wrong with the kernel; its ``place`` says where.
    """
    scheduler = launch.scheduler
    room = max(1, launch.resident // (launch.cluster[0] * launch.cluster[1] * launch.cluster[2]))
    resident: list[Cluster] = []
    ended: list[Cluster] = []
    waiting = launch.waiting = deque(indices)
    while resident or waiting:
        while waiting and len(resident) < room:
            index = waiting.popleft()
            if ended:
                ended[-1].restart(index)
            resident.append(ended.pop() if ended else Cluster(launch, index))
            schedules = [cluster.schedule for cluster in resident]
        pick = scheduler.pick(schedules)
        if pick is None:
            ctas = [cta for cluster in resident for cta in cluster.ctas]
            if not expire(launch, ctas):
                raise deadlock(launch, ctas)
            continue
        cluster = pick.cta.cluster
        launch.ticks += 1
        cluster.ticks += 1
        if launch.memory.sharing is not None:
            launch.memory.sharing.enter(cluster.index)
        if isinstance(pick, Engine):
            run_engine(launch, pick)
            continue
        run_warps(launch, pick)
        if not pick.cta.live and not cluster.live:
            for engine in list(cluster.schedule.busy):
                while engine.queue:
                    run_engine(launch, engine)
            resident.remove(cluster)
            ended.append(cluster)
            schedules = [other.schedule for other in resident]
