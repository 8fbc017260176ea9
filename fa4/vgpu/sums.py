"""The order in which floating-point numbers were added in global memory: what a sum that differs from run to run depends on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from fa4.vgpu.memory import Buffer, GlobalMemory

Array = npt.NDArray[Any]


class Addition(NamedTuple):
    """Numbers that one instruction of a CTA (its number in the grid) added to a buffer, from a byte offset on."""

    cta: int
    buffer: str
    offset: int
    data: Array


@dataclass
class Sums:
    """Additions of one launch in the order in which they happened, and the buffers that they went to as they were at its end.

    Put a list into ``Gpu.sums``, and every launch adds one. Recorded are ``cp.reduce.async.bulk`` and ``red`` and ``atom`` that add
    floating-point numbers to global memory; not those of a tensor map. ``about`` is for whoever launches, to say what was launched.
    """

    kernel: str
    additions: list[Addition] = field(default_factory=list)
    after: dict[str, Array] = field(default_factory=dict)
    about: Any = None

    def note(self, cta: int, buffer: Buffer, address: int, data: Array) -> None:
        """Remember an addition."""
        self.additions.append(Addition(cta, buffer.name, address - buffer.address, data.copy()))

    def put(self, put: Callable[[Array], None], where: tuple[int, Buffer, int], data: Array) -> None:
        """Do an addition and remember it; ``where`` is (CTA, buffer, address)."""
        put(data)
        self.note(*where, data)

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
