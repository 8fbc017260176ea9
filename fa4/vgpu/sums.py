"""The order in which floating-point numbers were added in global memory: what a sum that differs from run to run depends on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from fa4.vgpu.global_hazards import Payload
    from fa4.vgpu.memory import Buffer, GlobalMemory

Array = npt.NDArray[Any]


class Addition(NamedTuple):
    """Numbers that one instruction of a CTA (its number in the grid) added to a buffer, from a byte offset on."""

    cta: int
    buffer: str
    offset: int
    data: Array


class Ordered(NamedTuple):
    """Where an addition stands in happens-before: its stamp in the clock of (cluster, agent), and what its issuer knew of each cluster."""

    cluster: int
    agent: int
    stamp: int
    known: Payload


@dataclass
class Sums:
    """Additions of one launch in the order in which they happened, and the buffers that they went to as they were at its end.

    Put a list into ``Gpu.sums``, and every launch adds one. Recorded are ``cp.reduce.async.bulk`` and ``red`` and ``atom`` that add
    floating-point numbers to global memory; not those of a tensor map. ``about`` is for whoever launches, to say what was launched.

    With ``checks="hazards"``, ``unordered`` is the first bulk addition which nothing orders behind the one before it to the same word:
    (that one, this one), by number. Additions are atomic, so it is no race; but in another run they may come the other way round.
    """

    kernel: str
    additions: list[Addition] = field(default_factory=list)
    after: dict[str, Array] = field(default_factory=dict)
    about: Any = None
    unordered: tuple[int, int] | None = None
    _orders: dict[int, Ordered] = field(default_factory=dict)
    _last: dict[str, Array] = field(default_factory=dict)

    def note(self, cta: int, buffer: Buffer, address: int, data: Array, order: Ordered | None = None) -> None:
        """Remember an addition that was done."""
        number = len(self.additions)
        addition = Addition(cta, buffer.name, address - buffer.address, data.copy())
        self.additions.append(addition)
        if order is None:
            return
        last = self._last.setdefault(buffer.name, np.full(-(-buffer.data.size // 4), -1, np.int32))
        words = last[addition.offset // 4 : (addition.offset + data.size) // 4]
        for before in np.unique(words[words >= 0]).tolist():
            other = self._orders[before]
            clock = order.known.get(other.cluster)
            if self.unordered is None and (clock is None or clock[0][other.agent] < other.stamp):
                self.unordered = before, number
        self._orders[number] = order
        words[:] = number

    def finish(self, memory: GlobalMemory) -> None:
        """The launch is over."""
        touched = {addition.buffer for addition in self.additions}
        self.after = {buffer.name: buffer.data.copy() for buffer in memory.buffers if buffer.name in touched}

    def to(self, buffer: str, offset: int) -> list[tuple[int, Array]]:
        """What was added to the 4 bytes at an offset, in order: (CTA, 4 bytes)."""
        found = []
        for addition in self.additions:
            begin = offset - addition.offset
            if addition.buffer == buffer and 0 <= begin < addition.data.size:
                found.append((addition.cta, addition.data[begin : begin + 4]))
        return found


def differences(left: Sums, right: Sums) -> tuple[str, Array] | None:
    """(buffer, byte offsets) of the words of 4 bytes at which sums of two runs of one launch differ; None where they do not."""
    for name, before in left.after.items():
        after = right.after.get(name)
        if after is not None and after.size == before.size:
            differing = np.flatnonzero(before[: before.size // 4 * 4].view(np.uint32) != after[: after.size // 4 * 4].view(np.uint32))
            if differing.size:
                return name, 4 * differing
    return None
