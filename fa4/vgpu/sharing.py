"""Which clusters of a grid wrote and read each byte of global memory, so that a grid may run in several processes.

Clusters that touch disjoint bytes, or only read the same ones, cannot tell in which order they run. A byte that one cluster writes and
another writes or reads is communication, or a race, and the fault is raised where it shows: by whichever of the two comes second in a
process, or between processes by ``conflict``. Bytes are exact; buffers that nobody may write are not looked at.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.errors import SharedGlobalError
from fa4.vgpu.memory import Buffer, FaultError, lanes_at

Array = npt.NDArray[Any]
Pieces = list[tuple[Buffer, Array | None]]

REMEDY = "clusters that communicate need one process: use processes=1"


class Sharing:
    """What the clusters that one process runs did; in memory that other processes see.

    A byte has the number of the cluster that wrote it, counted from 1, 0 for none; and of the one that read it, ``several`` for more.
    """

    def __init__(self, buffers: Sequence[Buffer], clusters: int) -> None:
        self.several = clusters + 1
        self.kind = np.min_scalar_type(self.several)
        self.buffers = [buffer for buffer in buffers if buffer.writable and buffer.data.size]
        self.maps = {buffer.address: (self._zeros(buffer.data.size), self._zeros(buffer.data.size)) for buffer in self.buffers}
        self.me = self.kind.type(0)

    def _zeros(self, size: int) -> Array:
        """Bytes that are shared with processes that are made later; pages that nobody touches take no memory."""
        return np.frombuffer(mmap.mmap(-1, size * self.kind.itemsize), self.kind)

    def enter(self, cluster: int) -> None:
        """From now on a cluster acts."""
        self.me = self.kind.type(cluster + 1)

    def written(self, buffer: Buffer) -> Array:
        """Which bytes of a buffer were written."""
        return np.asarray(self.maps[buffer.address][0] != 0)

    def touched(self, buffer: Buffer) -> Array:
        """Which bytes of a buffer were written or read."""
        writers, readers = self.maps[buffer.address]
        return np.asarray((writers != 0) | (readers != 0))

    def access(self, pieces: Pieces, address: Array, size: int, mask: Array | None, write: bool) -> None:
        """``size`` bytes at each address, which lie in the buffers of ``pieces`` (see ``GlobalMemory.pieces``).

        Raises:
            FaultError: another cluster wrote one of them, or read one that is to be written.
        """
        for buffer, here in pieces:
            if buffer.address not in self.maps:
                continue
            chosen = address if here is None else address[here]
            skip = -buffer.address % size
            index = ((chosen - np.uint64(buffer.address + skip)) >> np.uint64(size.bit_length() - 1)).astype(np.intp)
            whole = skip + (buffer.data.size - skip) // size * size
            writers, readers = (numbers[skip:whole].reshape(-1, size) for numbers in self.maps[buffer.address])
            wrote, read = writers.take(index, axis=0), readers.take(index, axis=0)
            bad = self._foreign(wrote, read, write)
            if bad.any():
                row, byte = divmod(int(bad.argmax()), size)
                offset = int(chosen[row]) + byte - buffer.address
                lanes = lanes_at(np.asarray(bad.any(1)), mask) if here is None else mask
                raise self._fault(buffer, offset, (wrote[row, byte], read[row, byte]), write, lanes)
            if write:
                writers[index] = self.me
            else:
                readers[index] = self._readers(read)

    def box(self, buffer: Buffer, address: int, shape: tuple[int, ...], strides: tuple[int, ...], write: bool) -> None:
        """Bytes from ``address`` on, in a box with these strides.

        Raises:
            FaultError: as ``access``.
        """
        if buffer.address not in self.maps:
            return
        width = self.kind.itemsize
        where = (address - buffer.address) * width, tuple(stride * width for stride in strides)
        writers, readers = (np.ndarray(shape, self.kind, numbers.data, *where) for numbers in self.maps[buffer.address])
        bad = self._foreign(writers, readers, write)
        if bad.any():
            at = np.unravel_index(int(bad.argmax()), shape)
            offset = address - buffer.address + sum(int(i) * stride for i, stride in zip(at, strides, strict=True))
            raise self._fault(buffer, offset, (writers[at], readers[at]), write, None)
        if write:
            writers[...] = self.me
        else:
            readers[...] = self._readers(readers)

    def _foreign(self, writers: Array, readers: Array, write: bool) -> Array:
        """Where another cluster was, so that this one may not be there."""
        bad = (writers != 0) & (writers != self.me)
        return np.asarray(bad | ((readers != 0) & (readers != self.me)) if write else bad)

    def _readers(self, readers: Array) -> Array:
        """Who read these bytes, now that this cluster did too."""
        return np.asarray(np.where((readers == 0) | (readers == self.me), self.me, self.kind.type(self.several)))

    def _fault(self, buffer: Buffer, offset: int, numbers: tuple[Any, Any], write: bool, lanes: Array | None) -> FaultError:
        wrote, read = map(int, numbers)
        other = wrote if wrote not in (0, int(self.me)) else read
        who = "several clusters" if other == self.several else f"cluster {other - 1}"
        verb = "wrote" if other == wrote else "read"
        did = "written" if write else "read"
        message = f"offset {offset:#x} of buffer {buffer.name!r} is {did} by cluster {int(self.me) - 1}, and {who} {verb} it; {REMEDY}"
        return FaultError(SharedGlobalError, message, lanes)


def conflict(sharings: Sequence[Sharing]) -> SharedGlobalError | None:
    """What one process wrote and another wrote or read, where there is such a byte."""
    for buffer in sharings[0].buffers:
        written, touched = sharings[0].written(buffer), sharings[0].touched(buffer)
        for other in sharings[1:]:
            bad = (other.written(buffer) & touched) | (other.touched(buffer) & written)
            if bad.any():
                where = f"offset {int(bad.argmax()):#x} of buffer {buffer.name!r}"
                return SharedGlobalError(f"{where} is written by one cluster and used by another; {REMEDY}")
            written |= other.written(buffer)
            touched |= other.touched(buffer)
    return None
