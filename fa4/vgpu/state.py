"""The state of a CTA: registers, memories, warps; and a gang, a range of its warps that execute one block together."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from fa4.vgpu.async_copy import Copies
from fa4.vgpu.engine import RUNNING, Engine, Issuer, Signal, Wait, park
from fa4.vgpu.errors import OutOfBoundsError, TrapError, UninitializedError
from fa4.vgpu.mbarrier import Mbarrier, Mbarriers
from fa4.vgpu.memory import RANK_SHIFT, WINDOW_SHIFT, WINDOWS, WRITTEN, Block, FaultError, GlobalMemory, LocalMemory, spread

if TYPE_CHECKING:
    from fa4.vgpu.cluster import Cluster
    from fa4.vgpu.machine import Launch
    from fa4.vgpu.program import Op

Array = npt.NDArray[Any]
Dim3 = tuple[int, int, int]
Unit = TypeVar("Unit")

_KINDS = {8: ("u8", "s8"), 16: ("u16", "s16", "f16"), 32: ("u32", "s32", "f32"), 64: ("u64", "s64", "f64")}
_NAMES = {"u": "uint", "s": "int", "f": "float"}


@dataclass
class Warp:
    """Where the lanes of a warp are.

    ``at`` maps blocks to the lanes that are to execute them next; a converged warp has one entry with all its lanes. The lowest block
    runs first, so that lanes which fell behind catch up: they meet again where the compiler made their paths meet.
    """

    index: int
    at: dict[int, Array]
    full: bool = True
    state: int = RUNNING
    exited: Array = field(default_factory=lambda: np.zeros(32, bool))
    wait: Wait | None = None
    spins: int = 0  # looks at what others may write, since it was last given another priority
    block: int = 0  # the block to execute next: the lowest of ``at``


class Cta:
    """CTA ``rank`` of a cluster; when the cluster has ended, ``restart`` makes another one of it, with the same arrays."""

    def __init__(self, launch: Launch, cluster: Cluster, rank: int) -> None:
        self.launch, self.cluster, self.rank = launch, cluster, rank
        self.warp_count = -(-launch.threads // 32)
        lanes = 32 * self.warp_count
        self.rows = {bits: np.zeros((n, lanes), f"u{bits // 8}") for bits, n in launch.kernel.registers.items() if bits > 1}
        self.predicates = np.zeros((launch.kernel.registers.get(1, 0), lanes), bool)
        self.defined = np.zeros((len(launch.watch.rows), lanes), bool)
        self.shared = Block("shared", np.zeros(launch.shared_bytes, np.uint8), tracked=True, blank=launch.blank)
        self.local = LocalMemory(lanes, launch.kernel.local_bytes)
        self.specials = launch.specials()
        self.gangs: dict[tuple[int, int], Gang] = {}

    def restart(self) -> None:
        """Begin as a CTA of the cluster's place in the grid, with everything unwritten."""
        launch, size = self.launch, self.launch.cluster
        inside = self.rank % size[0], self.rank // size[0] % size[1], self.rank // (size[0] * size[1])
        x, y, z = (c * n + i for c, n, i in zip(self.cluster.id, size, inside, strict=True))
        self.id: Dim3 = (x, y, z)
        self.index = x + launch.grid[0] * (y + launch.grid[1] * z)
        for i, axis in enumerate("xyz"):
            self.specials[f"%ctaid.{axis}"][:] = self.id[i]
            self.specials[f"%clusterid.{axis}"][:] = self.cluster.id[i]
            self.specials[f"%cluster_ctaid.{axis}"][:] = inside[i]
        self.specials["%cluster_ctarank"][:] = self.rank
        tolerant = launch.blank == WRITTEN
        for values in self.rows.values():
            values.view(np.uint8)[:] = 0xFF if tolerant else 0xAA
        self.predicates[:] = False
        self.defined[:] = False
        for register, row in launch.watch.rows.items():
            self.defined[row] = tolerant and register.bits > 1
        self.shared.reset()
        self.local.block.reset()
        self.hazards = self.cluster.hazards
        self.copies = Copies(self)
        self.warps = [self._warp(i, launch.threads) for i in range(self.warp_count)]
        self.barriers: dict[int, Any] = {}
        self.mbarriers = Mbarriers(self)
        self.engines: dict[Hashable, Engine] = {}
        self.units: dict[type, Any] = {}
        self.live = self.warp_count
        self.picks = 0

    def engine(self, name: Hashable, ordered: bool = True) -> Engine:
        """The engine of this name."""
        found = self.engines.get(name)
        if found is None:
            found = self.engines[name] = Engine(self, name, ordered)
        return found

    def unit(self, kind: Callable[[Cta], Unit]) -> Unit:
        """The one ``kind(self)`` of this CTA."""
        if kind not in self.units:
            self.units[kind] = kind(self)  # type: ignore[index]
        found: Unit = self.units[kind]  # type: ignore[index]
        return found

    def _warp(self, index: int, threads: int) -> Warp:
        present = np.arange(32 * index, 32 * index + 32) < threads
        warp = Warp(index, {0: present}, full=bool(present.all()))
        warp.exited = ~present
        return warp

    def gang(self, first: int, last: int) -> Gang:
        """Warps [first, last) as one."""
        key = first, last
        if key not in self.gangs:
            self.gangs[key] = Gang(self, first, last)
        return self.gangs[key]


class Gang:
    """What generated code works on: register views of a range of warps, and everything an instruction can do to the machine."""

    def __init__(self, cta: Cta, first: int, last: int) -> None:
        self.cta, self.first, self.last = cta, first, last
        self.warps = last - first
        self.n = 32 * self.warps
        here = slice(32 * first, 32 * last)
        for bits, kinds in _KINDS.items():
            rows = cta.rows.get(bits)
            for kind in kinds:
                views = [] if rows is None else list(rows.view(_NAMES[kind[0]] + kind[1:])[:, here])
                setattr(self, kind, views)
        self.R32 = cta.rows.get(32, np.zeros((0, cta.predicates.shape[1]), np.uint32))[:, here]
        wide = cta.rows.get(64, np.zeros((0, cta.predicates.shape[1]), np.uint64))[:, here]
        self.x2 = list(wide.view(np.float32))
        self.LO, self.HI, self.P = wide.view(np.uint32)[:, 0::2], wide.view(np.uint32)[:, 1::2], cta.predicates[:, here]
        self.lo, self.hi, self.p = list(self.LO), list(self.HI), list(self.P)
        self.D = list(cta.defined[:, here])
        self.site = 0
        self.S = {name: values[here] if len(values) > 1 else values for name, values in cta.specials.items()}
        self.threads = np.arange(here.start, here.stop)
        self.all = np.ones(self.n, bool)
        self.approx_seed = cta.launch.approx_seed
        self.memory: GlobalMemory = cta.launch.memory
        self.clustered = cta.launch.clustered
        self.base = np.array([cta.rank << RANK_SHIFT], np.uint32)

    def exited(self) -> Array:
        """Lanes that have exited."""
        return np.concatenate([w.exited for w in self.cta.warps[self.first : self.last]])

    def count(self, space: str, size: int, mask: Array) -> None:
        """Account for an access by some lanes."""
        self.cta.launch.bytes[space] = self.cta.launch.bytes.get(space, 0) + size * int(np.count_nonzero(mask))

    def clock(self, name: str, bits: int) -> Array:
        """A clock that counts what the cluster executed, in blocks: it grows, but it is no time."""
        ticks = self.cta.cluster.ticks
        value = ticks >> 32 if name in ("%clock_hi", "%globaltimer_hi") else ticks
        return np.array([value & (2**bits - 1)], f"u{bits // 8}")

    def look(self) -> None:
        """The warps look at global memory for what others may have written; a loop that waits does so again and again."""
        for warp in self.cta.warps[self.first : self.last]:
            warp.spins += 1

    def trap(self, mask: Array | None) -> None:
        """The kernel gave up."""
        if mask is None or mask.any():
            raise FaultError(TrapError, "the kernel executed trap", mask)

    def check_defined(self, row: int, name: str, mask: Array | None) -> None:
        """A watched register must have been written in every lane that reads it."""
        bad = ~self.D[row] if mask is None else ~self.D[row] & mask
        if bad.any():
            raise FaultError(UninitializedError, f"register {name} is read, but was never written", bad)

    # Waiting and asynchronous operations: see ``fa4.vgpu.engine``

    def block_until(self, i: int, wait: Wait, *signals: Signal) -> None:
        """Park warp ``i`` of the gang until ``wait.ready()``."""
        park(self.cta.warps[self.first + i], wait, *signals)

    def issuer(self, op: Op | None, lane: int) -> Issuer:
        """Lane ``lane`` of the gang, as the one that issues an operation."""
        return Issuer(self.cta, self.first + lane // 32, lane % 32, op)

    def mbarrier(self, address: int) -> Mbarrier:
        """The mbarrier at a shared address, in whatever CTA of the cluster.

        Raises:
            FaultError: no such CTA, or no mbarrier there.
        """
        cta, offset = self.shared_of(address)
        return cta.mbarriers.at(offset)

    # Memory

    def own(self, address: Array) -> Array:
        """Own shared addresses without the rank of the CTA; those of other CTAs become too large."""
        return address - self.base if self.clustered else address

    def shared_of(self, address: int) -> tuple[Cta, int]:
        """The CTA of the cluster that a shared address lies in, and the offset in its shared memory.

        Raises:
            FaultError: the cluster has no such CTA.
        """
        rank, ctas = address >> RANK_SHIFT, self.cta.cluster.ctas
        if rank >= len(ctas):
            raise FaultError(OutOfBoundsError, f"shared address {address:#x} is of CTA {rank} of a cluster of {len(ctas)}")
        if not ctas[rank].live:
            raise FaultError(OutOfBoundsError, f"shared address {address:#x} is of CTA {rank} of the cluster, which has ended")
        return ctas[rank], address & (1 << RANK_SHIFT) - 1

    def bytes_at(self, address: int, size: int) -> bytes:
        """Bytes at a generic address in global, constant or parameter memory.

        Raises:
            FaultError: it lies elsewhere, or they leave their buffer.
        """
        return self.cta.launch.read(address, size)

    def _by_cta(self, address: Array, mask: Array | None) -> list[tuple[Cta, Array, Array]]:
        """Shared addresses of any CTA of the cluster: (CTA, offsets, lanes)."""
        chosen = self.all if mask is None else mask
        ranks, offsets = address >> np.uint32(RANK_SHIFT), address & np.uint32((1 << RANK_SHIFT) - 1)
        found = []
        for rank in np.unique(ranks[chosen]):
            lanes = chosen & (ranks == rank)
            if rank >= len(self.cta.cluster.ctas):
                raise FaultError(
                    OutOfBoundsError, f"shared::cluster address of CTA {rank} of a cluster of {len(self.cta.cluster.ctas)}", lanes
                )
            if not self.cta.cluster.ctas[rank].live:
                raise FaultError(OutOfBoundsError, f"shared::cluster address of CTA {rank} of the cluster, which has ended", lanes)
            found.append((self.cta.cluster.ctas[rank], offsets, lanes))
        return found

    def load(self, space: str, address: Array, dtype: str, vector: int, mask: Array | None) -> Array:
        """Loaded elements of the lanes of ``mask``."""
        if space == "shared":
            own = self.own(address)
            value = self.cta.shared.load(own, dtype, vector, mask)
            if self.cta.hazards is not None:
                self.cta.hazards.access(self, self.cta, own, np.dtype(dtype).itemsize * vector, mask, False)
            return value
        if space == "global":
            everywhere = spread(address, self.n)
            value = self.memory.load(everywhere, dtype, vector, mask)
            if self.cta.hazards is not None:
                self.cta.hazards.foreign.access(self, everywhere, np.dtype(dtype).itemsize * vector, mask, None)
            return value
        if space in ("param", "const"):
            return self.cta.launch.constants[space].load(address, dtype, vector, mask)
        if space == "local":
            size = np.dtype(dtype).itemsize * vector
            return self.cta.local.block.load(self.cta.local.flat(address, size, self.threads, mask), dtype, vector, mask)
        address = spread(address, self.n)
        value = np.zeros((self.n, vector) if vector > 1 else self.n, dtype)
        if space == "shared::cluster":
            for cta, offset, lanes in self._by_cta(address, mask):
                value[lanes] = cta.shared.load(offset, dtype, vector, lanes)
                if self.cta.hazards is not None:
                    self.cta.hazards.access(self, cta, offset, np.dtype(dtype).itemsize * vector, lanes, False)
            return value if mask is None else value[mask]
        top = (address >> np.uint64(WINDOW_SHIFT)).astype(np.int64)
        for name, lanes in self._windows(top, self.all if mask is None else mask):
            value[lanes] = self.load(name, _inside(address, name), dtype, vector, lanes)
        return value if mask is None else value[mask]

    def store(self, space: str, address: Array, value: Array, dtype: str, vector: int, mask: Array | None) -> None:
        """Store one element a lane."""
        dtype_value = value.view(dtype) if value.dtype.itemsize == np.dtype(dtype).itemsize else value.astype(dtype)
        if space == "shared":
            own = spread(self.own(address), self.n)
            self.cta.shared.store(own, dtype_value, dtype, vector, mask)
            if self.cta.hazards is not None:
                self.cta.hazards.access(self, self.cta, own, np.dtype(dtype).itemsize * vector, mask, True)
        elif space == "shared::cluster":
            for cta, offset, lanes in self._by_cta(spread(address, self.n), mask):
                cta.shared.store(offset, dtype_value, dtype, vector, lanes)
                if self.cta.hazards is not None:
                    self.cta.hazards.access(self, cta, offset, np.dtype(dtype).itemsize * vector, lanes, True)
        elif space == "global":
            everywhere = spread(address, self.n)
            if self.cta.hazards is not None:
                self.cta.hazards.foreign.access(self, everywhere, np.dtype(dtype).itemsize * vector, mask, dtype_value)
            self.memory.store(everywhere, dtype_value, dtype, vector, mask)
        elif space == "local":
            size = np.dtype(dtype).itemsize * vector
            self.cta.local.block.store(self.cta.local.flat(address, size, self.threads, mask), dtype_value, dtype, vector, mask)
        elif space in ("param", "const"):
            self.cta.launch.constants[space].store(address, dtype_value, dtype, vector, mask)
        else:
            address = spread(address, self.n)
            top = (address >> np.uint64(WINDOW_SHIFT)).astype(np.int64)
            for name, lanes in self._windows(top, self.all if mask is None else mask):
                self.store(name, _inside(address, name), dtype_value, dtype, vector, lanes)

    def _windows(self, top: Array, lanes: Array) -> list[tuple[str, Array]]:
        """Generic addresses by window; what lies in none counts as global, which finds no buffer there."""
        known = {base >> WINDOW_SHIFT: "shared::cluster" if name == "shared" else name for name, base in WINDOWS.items()}
        return [(known.get(int(t), "global"), lanes & (top == t)) for t in np.unique(top[lanes])]

    # Asynchronous copies

    def start_copy(self, addresses: tuple[Array, Array], size: int, valid: Array | None, ignore: Array | None, mask: Array | None) -> None:
        """cp.async."""
        to, source = spread(self.own(addresses[0]), self.n), spread(addresses[1], self.n)
        count = np.full(self.n, size, np.int64) if valid is None else np.broadcast_to(valid, self.n).astype(np.int64).clip(0, size)
        if ignore is not None:
            count = np.where(ignore, 0, count)
        self.cta.copies.start(self, (to, source), size, count, self.all if mask is None else mask)

    def commit_copies(self, mask: Array | None) -> None:
        """cp.async.commit_group."""
        self.cta.copies.commit(32 * self.first, self.all if mask is None else mask)

    def fence(self, kind: str, mask: Array | None) -> None:
        """A fence: "proxy", "release", or "init", of mbarriers that were made."""
        if self.cta.hazards is not None:
            self.cta.hazards.fence(self, kind, mask)

    def wait_copies(self, keep: int | None, mask: Array | None) -> None:
        """cp.async.wait_group and wait_all."""
        self.cta.copies.wait(32 * self.first, keep, self.all if mask is None else mask, self.site)


def _inside(address: Array, space: str) -> Array:
    """A generic address as one of its space."""
    inside = address - np.uint64(WINDOWS[space.removesuffix("::cluster")])
    return np.asarray(inside if space == "global" else inside.astype(np.uint32))
