"""Tensor memory of a CTA (PTX ISA 9.7.16.1): 128 lanes of 512 columns of 32 bits, and its allocation.

An address has the lane in its upper half and the column in its lower. Columns must be allocated before they are used. Everything
unwritten reads as 0xFF bytes: NaN. Warp w may touch lanes 32 (w % 4) to 32 (w % 4) + 31.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.engine import Signal, Wait
from fa4.vgpu.errors import DivergenceError, TensorMemoryError
from fa4.vgpu.memory import FaultError

if TYPE_CHECKING:
    from fa4.vgpu.state import Cta, Gang

Array = npt.NDArray[Any]
LANES, COLUMNS = 128, 512
QUADRANT = 32
"""Lanes that one warp may touch."""


@dataclass(eq=False)
class _Request:
    """An allocation that a warp asks for: columns, and where in shared memory the address goes."""

    count: int
    to: int
    warp: int
    site: int
    granted: bool = False


class TensorMemory:
    """``data[column, lane]`` as uint32, the same bytes as float32 in ``floats``."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.data = np.full((COLUMNS, LANES), 0xFFFFFFFF, np.uint32)
        self.floats = self.data.view(np.float32)
        self.owned = np.zeros(COLUMNS, bool)
        self.allocations: dict[int, int] = {}
        self.requests: list[_Request] = []
        self.leaving: set[int] = set()
        self.permit = True
        self.group = 0
        self.signal = Signal()

    @property
    def peer(self) -> TensorMemory:
        """Tensor memory of the other CTA of the pair.

        Raises:
            FaultError: there is none.
        """
        rank, ctas = self.cta.rank ^ 1, self.cta.cluster.ctas
        if rank >= len(ctas):
            raise FaultError(TensorMemoryError, f"cta_group::2 needs a pair of CTAs; the cluster has {len(ctas)}")
        return ctas[rank].unit(TensorMemory)

    def use_group(self, group: int) -> None:
        """All tcgen05 instructions of a kernel must have the same cta_group (9.7.16.5).

        Raises:
            FaultError: this one has another.
        """
        if self.group not in (0, group):
            raise FaultError(TensorMemoryError, f"cta_group::{group} in a CTA that uses cta_group::{self.group}")
        self.group = group

    def allocate(self, gang: Gang, i: int, count: int, to: int, group: int) -> None:
        """tcgen05.alloc by warp ``i`` of a gang, which waits until ``count`` columns are free, with a pair in both CTAs alike.

        Raises:
            FaultError: a count that is no power of two from 32 to 512, or the CTA gave up its right to allocate.
        """
        self.use_group(group)
        if count not in (32, 64, 128, 256, 512):
            raise FaultError(TensorMemoryError, f"tcgen05.alloc of {count} columns: must be a power of two from 32 to 512")
        if not self.permit:
            raise FaultError(TensorMemoryError, "tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        request = _Request(count, to, gang.first + i, gang.site)
        self.requests.append(request)
        self._grant(group)
        gang.block_until(i, Wait(partial(getattr, request, "granted"), partial(self.describe, request, group)), self.signal)

    def _grant(self, group: int) -> None:
        """Serve requests in order, as far as there is room."""
        members = [self] if group == 1 else [self, self.peer]
        while all(m.requests for m in members):
            count = self.requests[0].count
            if any(m.requests[0].count != count for m in members):
                raise FaultError(TensorMemoryError, f"the CTAs of a pair allocate {[m.requests[0].count for m in members]} columns")
            free = ~np.logical_or.reduce([m.owned for m in members])
            start = next((c for c in range(0, COLUMNS - count + 1, 32) if free[c : c + count].all()), None)
            if start is None:
                return
            for m in members:
                m._take(start)

    def _take(self, start: int) -> None:
        request = self.requests.pop(0)
        self.owned[start : start + request.count] = True
        self.allocations[start] = request.count
        self.cta.shared.store(np.array([request.to], np.uint32), np.array([start], np.uint32), "u4", 1, None)
        if self.cta.hazards is not None:
            self.cta.hazards.tensor.allocated(self.cta, request.warp, request.to, request.site)
        request.granted = True
        self.cta.launch.progress += 1
        self.signal.notify()

    def describe(self, request: _Request, group: int) -> str:
        """What an allocation waits for, for the table of a deadlock."""
        who = "" if group == 1 else ", in both CTAs of the pair together"
        return f"{request.count} columns of tensor memory{who}; {int(self.owned.sum())} are allocated"

    def release(self, start: int, count: int, group: int) -> None:
        """tcgen05.dealloc; columns of a pair are free when both CTAs gave them up.

        Raises:
            FaultError: there is no such allocation.
        """
        self.use_group(group)
        if self.allocations.get(start) != count or start in self.leaving:
            known = ", ".join(f"{n} from {s:#x}" for s, n in self.allocations.items() if s not in self.leaving) or "none"
            raise FaultError(TensorMemoryError, f"tcgen05.dealloc of {count} columns from {start:#x}; allocated are: {known}")
        members = [self] if group == 1 else [self, self.peer]
        self.leaving.add(start)
        if all(start in m.leaving for m in members):
            for m in members:
                m.leaving.remove(start)
                m.owned[start : start + m.allocations.pop(start)] = False
            self._grant(group)

    def check(self, column: int, count: int, what: str) -> None:
        """Columns about to be used must exist and be allocated.

        Raises:
            FaultError: they are not.
        """
        if column + count > COLUMNS:
            raise FaultError(TensorMemoryError, f"{what}: columns {column} to {column + count - 1}; there are {COLUMNS}")
        if not self.owned[column : column + count].all():
            missing = column + int((~self.owned[column : column + count]).argmax())
            raise FaultError(TensorMemoryError, f"{what}: column {missing} of columns {column} to {column + count - 1} is not allocated")


# tcgen05.ld and tcgen05.st


@dataclass(frozen=True)
class Access:
    """A shape of tcgen05.ld or st with its repetitions; ``split``: columns between the halves of 16x32bx2; ``packed``: 16-bit elements."""

    shape: str
    times: int
    packed: bool = False
    split: int = 0

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return self.times * {"16x128b": 2, "16x256b": 4}.get(self.shape, 1)


@lru_cache
def positions(access: Access) -> tuple[Array, Array]:
    """Lane and column, relative to the address, of register k of thread t, each (registers, 32) (9.7.16.2.3)."""
    k, t = np.ogrid[: access.registers, :32]
    if access.shape == "32x32b":
        lane, column = t + 0 * k, k + 0 * t
    elif access.shape == "16x64b":
        lane, column = t // 4 + 8 * (t % 2) + 0 * k, 2 * k + t // 2 % 2
    elif access.shape == "16x128b":
        lane, column = t // 4 + 8 * (k % 2), 4 * (k // 2) + t % 4
    elif access.shape == "16x256b":
        lane, column = t // 4 + 8 * (k // 2 % 2), 8 * (k // 4) + 2 * (t % 4) + k % 2
    else:
        lane, column = t % 16 + 0 * k, k + t // 16 * access.split
    return lane, column * (2 if access.packed else 1)


def columns_of(access: Access) -> int:
    """How many columns an access reaches over."""
    return int(positions(access)[1].max()) + (2 if access.packed else 1)


def pieces(gang: Gang, address: Array, access: Access, warps: Array | None) -> Iterator[tuple[slice, int, int]]:
    """(lanes of the gang, first lane of tensor memory, column): warps that follow each other in tensor memory come together.

    Raises:
        FaultError: lanes of a warp disagree about the address, or it is one that the warp may not touch.
    """
    memory = gang.cta.unit(TensorMemory)
    rows = np.broadcast_to(address, gang.n).reshape(-1, 32)
    if (rows != rows[:, :1]).any():
        raise FaultError(DivergenceError, "the tensor memory address differs between lanes of a warp", (rows != rows[:, :1]).reshape(-1))
    bases = rows[:, 0].tolist()
    span = columns_of(access)
    i = 0
    while i < gang.warps:
        if warps is not None and not warps[i]:
            i += 1
            continue
        lane, column = bases[i] >> 16, bases[i] & 0xFFFF
        home = (gang.first + i) % 4 * QUADRANT
        if lane != home and not (access.shape != "32x32b" and lane == home + 16):
            message = f"tensor memory lane {lane}; warp {gang.first + i} reaches lanes {home} to {home + QUADRANT - 1}"
            raise FaultError(TensorMemoryError, message, _warp_lanes(gang, i))
        last = i + 1
        if access.shape == "32x32b" and not access.packed:
            while (
                last < gang.warps and warps is None and bases[last] == (lane + 32 * (last - i)) << 16 | column and (gang.first + last) % 4
            ):
                last += 1
        try:
            memory.check(column, span, f"tensor memory from {bases[i]:#x}")
        except FaultError as fault:
            raise FaultError(fault.error, fault.message, _warp_lanes(gang, i)) from None
        yield slice(32 * i, 32 * last), lane, column
        i = last


def _warp_lanes(gang: Gang, i: int) -> Array:
    lanes = np.zeros(gang.n, bool)
    lanes[32 * i : 32 * i + 32] = True
    return lanes


def load(gang: Gang, access: Access, rows: Any, address: Array, warps: Array | None) -> None:
    """tcgen05.ld: registers ``rows`` (a slice where they follow each other, else their numbers)."""
    data = gang.cta.unit(TensorMemory).data
    for lanes, lane, column in pieces(gang, address, access, warps):
        if gang.cta.hazards is not None:
            gang.cta.hazards.tensor.loaded(gang, lanes, lane, (column, columns_of(access)), rows)
        if access.shape == "32x32b" and not access.packed:
            gang.R32[rows, lanes] = data[column : column + access.times, lane : lane + lanes.stop - lanes.start]
            continue
        down, across = positions(access)
        values = data[column + across, lane + down]
        if access.packed:
            values = values & np.uint32(0xFFFF) | data[column + across + 1, lane + down] << np.uint32(16)
        gang.R32[rows, lanes] = values


def store(gang: Gang, access: Access, rows: Any, address: Array, warps: Array | None) -> None:
    """tcgen05.st; with unpacking the upper halves of the columns become 0 (the ISA leaves them open)."""
    data = gang.cta.unit(TensorMemory).data
    for lanes, lane, column in pieces(gang, address, access, warps):
        values = gang.R32[rows, lanes]
        if gang.cta.hazards is not None:
            gang.cta.hazards.tensor.stored(gang, lanes, lane, (column, columns_of(access)))
        if access.shape == "32x32b" and not access.packed:
            data[column : column + access.times, lane : lane + lanes.stop - lanes.start] = values
            continue
        down, across = positions(access)
        if access.packed:
            data[column + across + 1, lane + down] = values >> np.uint32(16)
            values = values & np.uint32(0xFFFF)
        data[column + across, lane + down] = values
