"""Cluster launch control: a running cluster cancels the launch of one that has not started, to do its work (PTX ISA 9.7.13.18).

What the 16 bytes of an answer mean is not documented. Here the low 64 bits say all: x of the cancelled cluster's first CTA in the lowest
31, then y and z in 16 each, and in the highest whether there was one; the high 64 are a constant, by which answers are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.bulk import ANSWERS, start_load
from fa4.vgpu.cluster import Cluster, cluster_id
from fa4.vgpu.errors import LaunchControlError
from fa4.vgpu.memory import FaultError, spread

if TYPE_CHECKING:
    from fa4.vgpu.engine import Issuer
    from fa4.vgpu.machine import Launch
    from fa4.vgpu.program import Kernel
    from fa4.vgpu.state import Cta

Array = npt.NDArray[Any]

ANSWER_BYTES = 16

_MARK = 0x6465_6C6C_6563_6E61
_FIELDS = {"x": (0, 31), "y": (31, 16), "z": (47, 16)}
"""(First bit, bits) of the coordinates."""
_CANCELLED = 63


class Requests:
    """What a CTA knows of its requests: ``failed`` when it has seen that it gets no more."""

    def __init__(self, _: Cta) -> None:
        self.failed = False


def cancels(kernel: Kernel) -> bool:
    """Whether clusters may cancel the launch of others: then what each does depends on all, and one process runs them."""
    return any(op.name == "clusterlaunchcontrol" and "try_cancel" in op.mods for op in kernel.ops)


def request(cta: Cta, where: int, signal: int, multicast: bool, issuer: Issuer) -> None:
    """Ask for a cluster: the answer goes to offset ``where``, and tells the mbarrier at ``signal``, in the CTA or in all of its cluster.

    Which cluster it is, the next one that would start, is decided when the first answer is written. It may fail although there are clusters
    left, as it does on hardware for the sake of a kernel of higher priority (CUDA Programming Guide, Cluster Launch Control): see
    ``Scheduler.gives_up``.

    Raises:
        FaultError: the CTA saw a request fail, or a CTA that is to get the answer has ended.
    """
    if cta.unit(Requests).failed:
        raise FaultError(LaunchControlError, "a request after the CTA has seen one fail, which leaves the result undefined")
    ctas = cta.cluster.ctas if multicast else [cta]
    ended = [other.id for other in ctas if not other.live]
    if ended:
        raise FaultError(LaunchControlError, f"the answer goes to all CTAs of the cluster, of which {ended[0]} has ended")
    answer = _Answer(cta.cluster)
    for other in ctas:
        start_load(other, (where, ANSWER_BYTES), (other, signal), answer.fetch, issuer, kind=ANSWERS)


class _Answer:
    """What one request gets: decided once, the same for all CTAs."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.words: Array | None = None

    def fetch(self) -> Array:
        """The 16 bytes."""
        if self.words is None:
            launch = self.cluster.launch
            found = bool(launch.waiting) and not launch.scheduler.gives_up(self.cluster.schedule)
            self.words = np.array([encoded(launch, launch.waiting.popleft() if found else None), _MARK], np.uint64)
        return self.words.view(np.uint8)


def encoded(launch: Launch, cluster: int | None) -> int:
    """The low 64 bits of an answer."""
    if cluster is None:
        return 0
    bits = 1 << _CANCELLED
    for axis, place, size in zip("xyz", cluster_id(launch, cluster), launch.cluster, strict=True):
        bits |= place * size << _FIELDS[axis][0]
    return bits


def is_canceled(g: Any, low: Array, high: Array, mask: Array | None) -> Array:
    """Whether answers are of requests that cancelled a launch."""
    _check(g, high != _MARK, "what is queried is no answer of clusterlaunchcontrol.try_cancel", mask)
    found = np.asarray(low >> np.uint64(_CANCELLED) != 0)
    refused = spread(~found, g.n)
    if (refused if mask is None else refused & mask).any():
        g.cta.unit(Requests).failed = True
    return found


def first_ctaid(g: Any, low: Array, high: Array, axes: str, mask: Array | None) -> list[Array]:
    """Coordinates of the first CTA of the cancelled cluster."""
    _check(g, high != _MARK, "what is queried is no answer of clusterlaunchcontrol.try_cancel", mask)
    _check(g, low >> np.uint64(_CANCELLED) == 0, "the first CTA of a request that failed: it cancelled nothing", mask)
    fields = [_FIELDS[axis] for axis in axes]
    return [np.asarray(low >> np.uint64(first) & np.uint64((1 << bits) - 1)).astype(np.uint32) for first, bits in fields]


def _check(g: Any, bad: Array, message: str, mask: Array | None) -> None:
    bad = spread(bad, g.n)
    bad = bad if mask is None else bad & mask
    if bad.any():
        raise FaultError(LaunchControlError, message, bad)
