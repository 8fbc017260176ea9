"""Memory: flat arrays of bytes with exact bounds, alignment checks, and for shared and local memory a state for every byte.

A generic address says in its top byte which window it lies in; global addresses are the addresses of the registered buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.errors import LaunchError, MisalignedError, OutOfBoundsError, PendingCopyError, UninitializedError, VgpuError

if TYPE_CHECKING:
    from fa4.vgpu.engine import Issuer
    from fa4.vgpu.sharing import Sharing

Array = npt.NDArray[Any]

WINDOW_SHIFT = 56
WINDOWS = {"global": 0, "shared": 1 << 56, "local": 2 << 56, "param": 3 << 56, "const": 4 << 56}

RANK_SHIFT = 24
"""Where a shared address has the rank of its CTA in the cluster."""

UNWRITTEN, PENDING, WRITTEN = 0x00, 0x55, 0xFF
"""States of a byte: nothing written yet, an asynchronous copy is on its way, valid."""


class FaultError(Exception):
    """A fault in some lane, raised while a block runs; the machine turns it into an error that says where."""

    def __init__(self, error: type[VgpuError], message: str, lanes: Array | None = None) -> None:
        super().__init__(message)
        self.error, self.message, self.lanes = error, message, lanes
        self.issuer: Issuer | None = None  # who is to blame, where it is not who executes


def _view(data: Array, dtype: str, vector: int) -> Array:
    size = np.dtype(dtype).itemsize * vector
    whole = data[: data.size // size * size].view(dtype)
    return whole.reshape(-1, vector) if vector > 1 else whole


def spread(values: Array, lanes: int) -> Array:
    """One value a lane; ``np.broadcast_to`` costs more than most instructions, so it is called only where it does something."""
    return values if values.shape == (lanes,) else np.broadcast_to(values, lanes)


def lanes_at(bad: Array, mask: Array | None) -> Array:
    """Faulty lanes among all lanes, where ``bad`` has an entry for each lane of the mask only."""
    if mask is None:
        return bad
    lanes = np.zeros(mask.shape, bool)
    lanes[mask] = bad
    return lanes


class Block:
    """One stretch of memory that begins at address 0: shared memory of a CTA, parameters, constants.

    ``state`` has a byte for each byte, None where everything counts as written; ``blank`` is what it begins with.
    """

    def __init__(self, name: str, data: Array, tracked: bool, writable: bool = True, blank: int = UNWRITTEN) -> None:
        self.name, self.data, self.writable, self.blank = name, data, writable, blank
        self.state = np.zeros_like(data) if tracked else None
        self.pending = 0
        self.views: dict[tuple[str, int], tuple[Array, Array | None, int]] = {}

    def reset(self) -> None:
        """Forget everything: bytes of 0xFF, which are NaN in every floating-point type."""
        self.data[:] = 0xFF
        self.pending = 0
        if self.state is not None:
            self.state[:] = self.blank

    def view(self, dtype: str, vector: int) -> tuple[Array, Array | None, int]:
        """Data and state seen as elements or vectors, and the size of one."""
        key = dtype, vector
        if key not in self.views:
            unsigned = f"u{np.dtype(dtype).itemsize}"
            state = None if self.state is None else _view(self.state, unsigned, vector)
            self.views[key] = _view(self.data, dtype, vector), state, np.dtype(dtype).itemsize * vector
        return self.views[key]

    def locate(self, address: Array, size: int, mask: Array | None) -> Array:
        """Element indices of aligned addresses; bounds are checked where the index is used."""
        if size > 1 and int(np.bitwise_or.reduce(address)) & (size - 1):
            bad = (address & address.dtype.type(size - 1)) != 0
            first = int(address[bad.argmax()])
            raise FaultError(MisalignedError, f"{self.name} address {first:#x} is not a multiple of {size}", lanes_at(bad, mask))
        return np.asarray((address >> address.dtype.type(size.bit_length() - 1)).astype(np.intp))

    def outside(self, address: Array, size: int, mask: Array | None) -> FaultError:
        """The error of an access that leaves this memory."""
        bad = (address.astype(np.float64) + size) > self.data.size
        first = int(address[bad.argmax()])
        message = f"{size} bytes at {self.name} address {first:#x}, which has {self.data.size:#x} bytes"
        if self.name == "shared" and first >> RANK_SHIFT:
            message = f"{size} bytes at a shared address that is not of this CTA: another rank in its upper byte"
        return FaultError(OutOfBoundsError, message, lanes_at(bad, mask))

    def check_state(self, state: Array, address: Array, mask: Array | None) -> None:
        """Every byte about to be read must be written."""
        if np.bitwise_and.reduce(state, axis=None) == ~state.dtype.type(0):
            return
        rows = np.ascontiguousarray(state).view(np.uint8).reshape(len(address), -1)
        bad = (rows != WRITTEN).any(1)
        lane = int(bad.argmax())
        byte = int((rows[lane] != WRITTEN).argmax())
        where = f"byte {int(address[lane]) + byte:#x} of {self.name} memory"
        if rows[lane, byte] == PENDING:
            raise FaultError(
                PendingCopyError, f"{where} is read before the asynchronous copy to it has been waited for", lanes_at(bad, mask)
            )
        raise FaultError(UninitializedError, f"{where} is read, but was never written", lanes_at(bad, mask))

    def load(self, address: Array, dtype: str, vector: int, mask: Array | None) -> Array:
        """Elements (lanes of the mask) or vectors (lanes, vector)."""
        if mask is not None and address.size == mask.size:
            address = address[mask]
        data, state, size = self.view(dtype, vector)
        index = self.locate(address, size, mask)
        try:
            value = data.take(index, axis=0)
        except IndexError:
            raise self.outside(address, size, mask) from None
        if state is not None:
            self.check_state(state.take(index, axis=0), address, mask)
        return value

    def store(self, address: Array, value: Array, dtype: str, vector: int, mask: Array | None) -> None:
        """Write elements, or vectors (lanes, vector); of lanes with equal addresses the last wins, as one must."""
        if mask is not None:
            address = address[mask] if address.size == mask.size else np.repeat(address, int(mask.sum()))
            value = value[mask] if len(value) == mask.size else value
        data, state, size = self.view(dtype, vector)
        index = self.locate(address, size, mask)
        if not self.writable:
            raise FaultError(OutOfBoundsError, f"a write to {self.name} memory, which is read-only", mask)
        try:
            if self.pending and state is not None:
                self.check_not_pending(state[index], address, mask)
            data[index] = value
        except IndexError:
            raise self.outside(address, size, mask) from None
        if state is not None:
            state[index] = ~state.dtype.type(0)

    # Stretches of bytes, for bulk copies

    def stretch(self, start: int, size: int) -> slice:
        """Bytes from ``start`` on.

        Raises:
            FaultError: they leave this memory.
        """
        if start < 0 or start + size > self.data.size:
            message = f"{size} bytes at {self.name} address {start:#x}, which has {self.data.size:#x} bytes"
            raise FaultError(OutOfBoundsError, message)
        return slice(start, start + size)

    def begin(self, start: int, size: int) -> None:
        """An asynchronous copy will write here: until then nobody may touch it.

        Raises:
            FaultError: it leaves this memory, or another copy is to write here.
        """
        here = self.stretch(start, size)
        assert self.state is not None
        if self.pending and (self.state[here] == PENDING).any():
            raise FaultError(
                PendingCopyError, f"{size} bytes at {self.name} address {start:#x}: an asynchronous copy to them is on its way"
            )
        self.state[here] = PENDING
        self.pending += 1

    def finish(self, start: int, data: Array) -> None:
        """The copy writes."""
        here = slice(start, start + data.size)
        assert self.state is not None
        self.data[here] = data
        self.state[here] = WRITTEN
        self.pending -= 1

    def read(self, start: int, size: int) -> Array:
        """A copy of bytes, all of which must be written.

        Raises:
            FaultError: they leave this memory, or are not.
        """
        here = self.stretch(start, size)
        self.check_written(start, size)
        return np.array(self.data[here])

    def check_written(self, start: int, size: int) -> None:
        """Bytes that a copy is to read must be written.

        Raises:
            FaultError: they leave this memory, or are not.
        """
        here = self.stretch(start, size)
        if self.state is not None:
            self.check_state(self.state[here].reshape(1, -1), np.array([start]), None)

    def check_not_pending(self, state: Array, address: Array, mask: Array | None) -> None:
        """Nothing may be written where an asynchronous copy still has to write."""
        rows = np.ascontiguousarray(state).view(np.uint8).reshape(len(address), -1)
        bad = (rows == PENDING).any(1)
        if bad.any():
            where = f"{self.name} address {int(address[bad.argmax()]):#x}"
            raise FaultError(PendingCopyError, f"{where} is written while an asynchronous copy to it is on its way", lanes_at(bad, mask))


class Buffer:
    """A registered piece of global memory."""

    def __init__(self, address: int, data: Array, name: str, writable: bool) -> None:
        self.address, self.data, self.name, self.writable = address, data, name, writable
        self.views: dict[tuple[str, int], tuple[int, Array]] = {}

    @property
    def end(self) -> int:
        """One past the last address."""
        return self.address + self.data.size

    def view(self, dtype: str, vector: int) -> tuple[int, Array]:
        """(address of the first aligned element, elements or vectors)."""
        key = dtype, vector
        if key not in self.views:
            size = np.dtype(dtype).itemsize * vector
            skip = -self.address % size
            self.views[key] = self.address + skip, _view(self.data[skip:], dtype, vector)
        return self.views[key]


class GlobalMemory:
    """All registered buffers."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.last: Buffer | None = None
        self.sharing: Sharing | None = None  # where several processes run the clusters of a grid

    def register(self, buffer: Buffer) -> None:
        """Add a buffer.

        Raises:
            LaunchError: it overlaps another one, or lies in a generic window.
        """
        if buffer.address < 0 or buffer.end > 1 << WINDOW_SHIFT:
            raise LaunchError(f"buffer {buffer.name!r} at {buffer.address:#x} is no global address")
        for other in self.buffers:
            if buffer.address < other.end and other.address < buffer.end and buffer.data.size and other.data.size:
                raise LaunchError(f"buffer {buffer.name!r} overlaps {other.name!r}")
        self.buffers.append(buffer)

    def remove(self, address: int) -> None:
        """Forget the buffer that begins at ``address``."""
        self.buffers = [b for b in self.buffers if b.address != address]
        self.last = None

    def find(self, address: int, size: int) -> Buffer | None:
        """The buffer that holds all of ``size`` bytes."""
        return next((b for b in self.buffers if b.address <= address and address + size <= b.end), None)

    def outside(self, address: Array, size: int, mask: Array | None) -> FaultError:
        """The error for addresses in no buffer; it names the nearest one."""
        bad = np.array([self.find(int(a), size) is None for a in address])
        first = int(address[bad.argmax()])
        near = min(self.buffers, key=lambda b: max(b.address - first, first - b.end + 1), default=None)
        hint = "no buffer is registered"
        if near is not None:
            hint = f"the nearest buffer is {near.name!r}, {near.address:#x} to {near.end:#x}, offset {first - near.address:+d}"
        return FaultError(
            OutOfBoundsError, f"{size} bytes at global address {first:#x} are outside every buffer; {hint}", lanes_at(bad, mask)
        )

    def pieces(self, address: Array, size: int, mask: Array | None) -> list[tuple[Buffer, Array | None]]:
        """The buffers that the addresses lie in, each with the lanes that use it (None: all)."""
        if int(np.bitwise_or.reduce(address)) & (size - 1):
            bad = (address & np.uint64(size - 1)) != 0
            first = int(address[bad.argmax()])
            raise FaultError(MisalignedError, f"global address {first:#x} is not a multiple of {size}", lanes_at(bad, mask))
        low, high = int(address.min()), int(address.max())
        last = self.last
        if last is not None and last.address <= low and high + size <= last.end:
            return [(last, None)]
        buffer = self.find(low, size)
        if buffer is not None and high + size <= buffer.end:
            self.last = buffer
            return [(buffer, None)]
        found = []
        todo = np.ones(address.shape, bool)
        while todo.any():
            buffer = self.find(int(address[todo.argmax()]), size)
            if buffer is None:
                raise self.outside(address, size, mask)
            here = todo & (address >= np.uint64(buffer.address)) & (address <= np.uint64(buffer.end - size))
            found.append((buffer, here))
            todo &= ~here
        return found

    def load(self, address: Array, dtype: str, vector: int, mask: Array | None) -> Array:
        """Elements (lanes of the mask) or vectors (lanes, vector)."""
        if mask is not None and address.size == mask.size:
            address = address[mask]
        size = np.dtype(dtype).itemsize * vector
        if not address.size:
            return np.zeros((0, vector) if vector > 1 else 0, dtype)
        pieces = self.pieces(address, size, mask)
        if self.sharing is not None:
            self.sharing.access(pieces, address, size, mask, write=False)
        if pieces[0][1] is None:
            start, view = pieces[0][0].view(dtype, vector)
            return view.take(_index(address, start, size), axis=0)
        value = np.zeros((len(address), vector) if vector > 1 else len(address), dtype)
        for buffer, here in pieces:
            start, view = buffer.view(dtype, vector)
            value[here] = view[_index(address[here], start, size)]
        return value

    def store(self, address: Array, value: Array, dtype: str, vector: int, mask: Array | None) -> None:
        """Write elements, or vectors (lanes, vector)."""
        if mask is not None:
            address = address[mask] if address.size == mask.size else np.repeat(address, int(mask.sum()))
            value = value[mask] if len(value) == mask.size else value
        size = np.dtype(dtype).itemsize * vector
        if not address.size:
            return
        pieces = self.pieces(address, size, mask)
        if self.sharing is not None:
            self.sharing.access(pieces, address, size, mask, write=True)
        for buffer, here in pieces:
            if not buffer.writable:
                raise FaultError(OutOfBoundsError, f"a write to buffer {buffer.name!r}, which is read-only", mask)
            start, view = buffer.view(dtype, vector)
            if here is None:
                view[_index(address, start, size)] = value
            else:
                view[_index(address[here], start, size)] = value[here] if len(value) == len(here) else value


def _index(address: Array, start: int, size: int) -> Array:
    return np.asarray(((address - np.uint64(start)) >> np.uint64(size.bit_length() - 1)).astype(np.intp))


class LocalMemory:
    """Local memory of the threads of a CTA: the same addresses, a row of bytes for each."""

    def __init__(self, threads: int, size: int) -> None:
        self.size = size
        self.block = Block("local", np.zeros(threads * size, np.uint8), tracked=True)

    def flat(self, address: Array, size: int, threads: Array, mask: Array | None) -> Array:
        """Addresses in the common block."""
        address = np.broadcast_to(address, threads.shape).astype(np.uint64)
        chosen = address if mask is None else address[mask]
        bad = (chosen > np.uint64(max(self.size - size, 0))) | (size > self.size)
        if bad.any():
            first = int(chosen[bad.argmax()])
            raise FaultError(
                OutOfBoundsError, f"{size} bytes at local address {first:#x}; a thread has {self.size} bytes", lanes_at(bad, mask)
            )
        return np.asarray(address + threads.astype(np.uint64) * np.uint64(self.size))
