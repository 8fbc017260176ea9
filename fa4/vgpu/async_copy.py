"""Copies to shared memory that complete as late as they may: when the thread that issued them waits (PTX ISA 9.7.9.25).

From its start to its completion every destination byte is marked: nobody may read or write it. The source is read at completion too, so
that a kernel that changes it in between computes with what it should not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.clocks import joined
from fa4.vgpu.errors import MisalignedError
from fa4.vgpu.memory import PENDING, WRITTEN, FaultError

if TYPE_CHECKING:
    from fa4.vgpu.state import Cta, Gang

Array = npt.NDArray[Any]


@dataclass
class _Copy:
    """One instruction: per thread destination, source, how many bytes exist, whether it is still to be done, and data read early."""

    to: Array
    source: Array
    valid: Array
    size: int
    todo: Array
    data: Array | None = None
    issued: Array | None = None  # clocks of the warps at the issue, see ``fa4.vgpu.hazards``
    site: int = 0


@dataclass(eq=False)
class _Group:
    """Copies that were committed together; ``number`` is per thread the group's number, -1 before its commit."""

    first: int
    number: Array
    copies: list[_Copy]


class Copies:
    """All copies of a CTA on their way."""

    def __init__(self, cta: Cta) -> None:
        self.cta, self.shared, self.hazards = cta, cta.shared, cta.hazards
        self.memory, self.early = cta.launch.memory, cta.launch.early
        self.committed = np.zeros(32 * cta.warp_count, np.int64)
        self.groups: list[_Group] = []

    def start(self, gang: Gang, addresses: tuple[Array, Array], size: int, valid: Array, mask: Array) -> None:
        """Begin a copy for the threads of a gang; bytes from ``valid`` to ``size`` become zero."""
        first = 32 * gang.first
        to, source = addresses
        chosen = to[mask]
        if not chosen.size:
            return
        index = self.shared.locate(chosen, size, mask)
        _data, state, _size = self.shared.view("u4", size // 4)
        assert state is not None
        present = mask & (valid > 0)
        misaligned = (source & np.uint64(size - 1)) != 0
        if (misaligned & mask).any():
            bad = misaligned & mask
            raise FaultError(MisalignedError, f"source {int(source[bad.argmax()]):#x} is not a multiple of {size}", bad)
        try:
            before = state[index]
        except IndexError:
            raise self.shared.outside(chosen, size, mask) from None
        self.shared.check_not_pending(before, chosen, mask)
        if present.any():
            self.check_source(source, valid, size, present)
        state[index] = np.uint32(PENDING * 0x01010101)
        self.shared.pending += int(mask.sum())
        last = self.groups[-1] if self.groups else None
        if last is None or last.first != first or len(last.number) != len(mask) or (last.number[mask] >= 0).any():
            last = _Group(first, np.full(len(mask), -1, np.int64), [])
            self.groups.append(last)
        copy = _Copy(to.copy(), source.copy(), valid, size, mask.copy())
        if self.early:
            copy.data = np.zeros((len(mask), size), np.uint8)
            copy.data[mask] = self.read(copy, mask)
        if self.hazards is not None:
            copy.issued, copy.site = self.hazards.issued(gang), gang.site
        last.copies.append(copy)

    def check_source(self, source: Array, valid: Array, size: int, mask: Array) -> None:
        """What will be read must exist."""
        if (valid[mask] == size).all():
            pieces = self.memory.pieces(source[mask], size, mask)
            if self.memory.sharing is not None:
                self.memory.sharing.access(pieces, source[mask], size, mask, write=False)
            return
        for lane in np.flatnonzero(mask):
            one = np.zeros_like(mask)
            one[lane] = True
            buffer = self.memory.find(int(source[lane]), int(valid[lane]))
            if buffer is None:
                raise self.memory.outside(source[one], int(valid[lane]), one)
            if self.memory.sharing is not None:
                self.memory.sharing.box(buffer, int(source[lane]), (int(valid[lane]),), (1,), write=False)

    def commit(self, first: int, mask: Array) -> None:
        """Close the group of each thread."""
        last = first + len(mask)
        for group in self.groups:
            here, there = _overlap(group, first, last)
            if here.stop > here.start:
                number = group.number[here]
                open_ = (number < 0) & mask[there]
                number[open_] = self.committed[first + there.start : first + there.stop][open_]
        self.committed[first:last] += mask

    def wait(self, first: int, keep: int | None, mask: Array, site: int = 0) -> None:
        """Complete all groups but the ``keep`` newest of each thread; None: everything, committed or not."""
        last = first + len(mask)
        for group in list(self.groups):
            here, there = _overlap(group, first, last)
            if here.stop <= here.start:
                continue
            number = group.number[here]
            done = mask[there].copy()
            if keep is not None:
                done &= (number >= 0) & (number < self.committed[first + there.start : first + there.stop] - keep)
            if not done.any():
                continue
            lanes = np.zeros(len(group.number), bool)
            lanes[here] = done
            for copy in group.copies:
                clock = self.complete(group.first, copy, lanes)
                if clock is not None and self.hazards is not None:
                    self.hazards.copies_waited(clock, site)
            self._forget(group)

    def _forget(self, group: _Group) -> None:
        """Remove a group of which nothing is left."""
        if group in self.groups and not any(copy.todo.any() for copy in group.copies):
            self.groups.remove(group)

    def finisher(self, first: int, mask: Array) -> Callable[[], Array | None]:
        """A function that completes what these threads have issued up to now, and gives the clock that their mbarrier hands on."""
        found = []
        for group in self.groups:
            here, there = _overlap(group, first, first + len(mask))
            if here.stop > here.start:
                lanes = np.zeros(len(group.number), bool)
                lanes[here] = mask[there]
                found += [(group, copy, lanes) for copy in group.copies]

        def finish() -> Array | None:
            clock = None
            for group, copy, lanes in found:
                for mine in (self.complete(group.first, copy, lanes) or {}).values():
                    clock = joined(clock, mine)
                self._forget(group)
            return clock

        return finish

    def complete(self, first: int, copy: _Copy, lanes: Array) -> dict[int, Array] | None:
        """The effect of one copy for some threads of those from ``first`` on; with hazards the clock behind it, by warp."""
        now = copy.todo & lanes
        if not now.any():
            return None
        data, state, _size = self.shared.view("u4", copy.size // 4)
        assert state is not None
        index = (copy.to[now] >> np.uint32(copy.size.bit_length() - 1)).astype(np.intp)
        rows = self.read(copy, now) if copy.data is None else copy.data[now]
        data[index] = rows.view(np.uint32) if copy.size > 4 else rows.view(np.uint32)[:, 0]
        state[index] = np.uint32(WRITTEN * 0x01010101)
        copy.todo &= ~now
        self.shared.pending -= int(now.sum())
        if copy.issued is None or self.hazards is None:
            return None
        return self.hazards.copied(self.cta, first // 32, (copy.issued, copy.site), (copy.to, copy.size), now)

    def read(self, copy: _Copy, lanes: Array) -> Array:
        """The bytes that a copy brings for some threads: what is there, then zeros."""
        vector, valid = copy.size // 4, copy.valid[lanes]
        full = valid == copy.size
        rows = np.zeros((len(valid), copy.size), np.uint8)
        if full.any():
            words = self.memory.load(copy.source[lanes][full], "u4", vector, None).reshape(-1, vector)
            rows[full] = words.view(np.uint8)
        for i in np.flatnonzero(~full & (valid > 0)):
            source, size = int(copy.source[lanes][i]), int(valid[i])
            buffer = self.memory.find(source, size)
            assert buffer is not None  # checked when the copy was issued
            rows[i, :size] = buffer.data[source - buffer.address : source - buffer.address + size]
        return rows


def _overlap(group: _Group, first: int, last: int) -> tuple[slice, slice]:
    """The threads [first, last) inside a group, and the group's threads inside them."""
    low, high = max(group.first, first), min(group.first + len(group.number), last)
    return slice(low - group.first, high - group.first), slice(low - first, high - first)
