"""From an executed instruction and its operands to an event: what it asks of the machine, without any time.

An mbarrier is (rank of its CTA in the cluster, offset in that CTA's shared memory). Kinds, and what their data are:

    init      mbarrier, count                      wait, test   mbarrier, parity
    arrive    mbarrier, count, bytes expected      expect       mbarrier, bytes
    bar       number, threads (0: all), whether the warp only arrives
    cluster_arrive, cluster_wait                   bulk_commit, cp_commit, wg_commit, wg_fence
    mma       cta_group, M, N, K, bytes of an element, whether A is in tensor memory
    commit    offset, ranks of the CTAs            tld, tst     registers a thread
    load      (bytes, CTA that gets them, mbarrier) for each copy
    store     bytes, whether they are added        bulk_wait    groups that may be left, whether reading the source is enough
    copy      bytes, CTA, mbarrier (to another CTA's shared memory)
    lds, sts  wavefronts, bytes, wavefronts without conflicts
    ldg, stg, atom  sectors of 32 bytes
    poll      address, value found                 signal       address, value, whether it is added
    cp        bytes, wavefronts, sectors, wavefronts without conflicts
    cp_wait, wg_wait  groups that may be left
    ask       (bytes, CTA that gets them, mbarrier) for each copy of the answer to a request for a cluster
    cp_arrive mbarrier, count                      wgmma        N, K, bytes of an element, whether A is in registers
    fence, twait, regs                             nothing
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.isa.bulk import MULTICAST
from fa4.vgpu.launch_control import ANSWER_BYTES
from fa4.vgpu.memory import RANK_SHIFT
from fa4.vgpu.observe import Values, looks
from fa4.vgpu.program import Address, Op, Tuple
from fa4.vgpu.tensor_map import MAP_BYTES, decode
from fa4.vgpu.tensor_multiply import decode_instruction

if TYPE_CHECKING:
    from fa4.vgpu.machine import Launch

Array = npt.NDArray[Any]
Data = tuple[int, ...]
Decoded = tuple[str, Data]

_OFFSET = (1 << RANK_SHIFT) - 1
_BANKS = 32
_SECTOR = 32
_SHAPE_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


class Decoder:
    """Decodes what one launch executes."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.ops = launch, launch.kernel.ops
        self._how: dict[int, Callable[[Op, int, int, Values], Decoded | None] | None] = {}
        self._wavefronts: dict[tuple[int, bytes], tuple[int, int]] = {}
        self._boxes: dict[int, int] = {}

    def decode(self, number: int, rank: int, lanes: int, values: Values) -> Decoded | None:
        """The event, or None where there is nothing to tell; ``rank`` is that of the CTA."""
        op = self.ops[number]
        if number not in self._how:
            self._how[number] = self._decoder(op)
        how = self._how[number]
        return None if how is None else how(op, rank, lanes, values)

    def _decoder(self, op: Op) -> Callable[[Op, int, int, Values], Decoded | None] | None:
        head = ".".join((op.name, *op.mods[:1]))
        if op.name == "cp":
            head = "cp.bulk" if op.mods[:2] == ("async", "bulk") else "cp.reduce" if op.mods[0] == "reduce" else "cp.async"
        found = _DECODERS.get(head) or _DECODERS.get(op.name)
        return None if found is None else found.__get__(self)

    # mbarriers and barriers

    def _init(self, op: Op, rank: int, lanes: int, values: Values) -> Decoded:
        return "init", (*mbarrier(_one(values[0])), _one(values[1]))

    def _arrive(self, op: Op, rank: int, lanes: int, values: Values) -> Decoded:
        given = values[2] if len(values) > 2 else None
        total = 0 if given is None else _total(given, lanes)
        where = mbarrier(_one(values[1]))
        if "expect_tx" in op.mods:
            return "arrive", (*where, lanes, total)
        return "arrive", (*where, lanes if given is None else total, 0)

    def _expect(self, op: Op, rank: int, lanes: int, values: Values) -> Decoded:
        return "expect", (*mbarrier(_one(values[0])), _total(values[1], lanes))

    def _wait(self, op: Op, rank: int, lanes: int, values: Values) -> Decoded:
        kind = "test" if op.mods[0] == "test_wait" else "wait"
        value = _one(values[2])
        return kind, (*mbarrier(_one(values[1])), value & 1 if "parity" in op.mods else value >> 32 & 1)

    def _bar(self, op: Op, rank: int, lanes: int, values: Values) -> Decoded | None:
        if "cluster" in op.mods:
            return ("cluster_arrive" if "arrive" in op.mods else "cluster_wait"), ()
        position = 1 if "red" in op.mods else 0
        threads = _one(values[position + 1]) if len(values) > position + 1 and values[position + 1] is not None else 0
        return "bar", (_one(values[position]), 0 if "red" in op.mods else threads, int("arrive" in op.mods))

    # Tensor core and tensor memory

    def _mma(self, op: Op, rank: int, lanes: int, values: Values) -> Decoded:
        group = 2 if "cta_group::2" in op.mods else 1
        kind = next(m for m in op.mods if m.startswith("kind::")).removeprefix("kind::")
        form = decode_instruction(_one(values[3]), kind, group)
        return "mma", (group, form.m, form.n, form.k, 32 // form.k, int(isinstance(op.operands[1], Address)))

    def _commit(self, op: Op, rank: int, lanes: int, values: Values) -> Decoded:
        to, offset = mbarrier(_one(values[0]))
        if len(values) > 1 and values[1] is not None:
            bits = _one(values[1])
            return "commit", (offset, *(i for i in range(16) if bits >> i & 1))
        return "commit", (offset, to)

    def _tensor_memory(self, op: Op, rank: int, lanes: int, values: Values) -> Decoded:
        shape = next(m for m in op.mods if m in _SHAPE_REGISTERS)
        times = next(int(m[1:]) for m in op.mods if re.fullmatch(r"x\d+", m))
        return ("tld" if op.mods[0] == "ld" else "tst"), (_SHAPE_REGISTERS[shape] * times,)

    def _nothing(self, op: Op, rank: int, lanes: int, values: Values) -> Decoded:
        return {"tcgen05": "twait", "fence": "fence"}.get(op.name, "regs"), ()

    def _wgmma(self, op: Op, rank: int, lanes: int, values: Values) -> Decoded | None:
        what = op.mods[0]
        if what == "mma_async":
            shape = next(m for m in op.mods if m.startswith("m64n"))
            n, k = (int(x) for x in shape.removeprefix("m64n").split("k"))
            return "wgmma", (n, k, 32 // k, int(isinstance(op.operands[1], Tuple)))
        if what == "wait_group":
            return "wg_wait", (_one(values[0]),)
        return {"commit_group": "wg_commit", "fence": "wg_fence"}[what], ()

    # Copies

    def _bulk(self, op: Op, rank: int, lanes: int, values: Values) -> Decoded | None:
        if "commit_group" in op.mods:
            return "bulk_commit", ()
        if "wait_group" in op.mods:
            return "bulk_wait", (_one(values[0]), int("read" in op.mods))
        if "prefetch" in op.mods:
            return None
        tensor, loads = "tensor" in op.mods, any(m.startswith("mbarrier::complete_tx") for m in op.mods)
        if not loads:
            if tensor:  # lanes that ask for the same box are one request: SASS issues it from uniform registers
                requests = {(_at(values[0], lane), _at(values[1], lane)) for lane in range(lanes)}
                size = sum(self._box(map_) for map_, _ in requests)
            else:
                size = _total(values[2], lanes)
            return "store", (size, int(op.mods[0] == "reduce"))
        signal, several = (values[2], 3) if tensor else (values[3], 4)
        if "shared::cta" in op.mods[3:] and "global" not in op.mods:
            where = mbarrier(_one(signal))
            return "copy", (_total(values[2], lanes), where[0], *where)
        data: list[int] = []
        for lane in range(lanes):
            to = _at(values[0], lane) >> RANK_SHIFT
            teller, offset = mbarrier(_at(signal, lane))
            size = self._box(_at(values[1], lane)) if tensor else _at(values[2], lane)
            mask = _at(values[several], lane) if MULTICAST in op.mods else 1 << to
            pair = "cta_group::2" in op.mods
            for cta in (i for i in range(16) if mask >> i & 1):
                data += [size, cta, (cta & ~1 | teller & 1) if pair else cta, offset]
        return "load", tuple(data)

    def _ask(self, op: Op, rank: int, lanes: int, values: Values) -> Decoded | None:
        if "try_cancel" not in op.mods:
            return None
        x, y, z = self.launch.cluster
        _, offset = mbarrier(_one(values[1]))
        ranks = range(x * y * z) if "multicast::cluster::all" in op.mods else [rank]
        return "ask", tuple(number for to in ranks for number in (ANSWER_BYTES, to, to, offset))

    def _cp_async(self, op: Op, rank: int, lanes: int, values: Values) -> Decoded | None:
        words = set(op.mods)
        if "commit_group" in words:
            return "cp_commit", ()
        if "wait_group" in words or "wait_all" in words:
            return "cp_wait", (_one(values[0]) if values else 0,)
        if "mbarrier" in words:
            return "cp_arrive", (*mbarrier(_one(values[0])), lanes if "noinc" in words else 0)
        size = _one(values[2])
        sectors = _sectors(_spread(values[1], lanes), size)
        actual, ideal = self._conflicts(_spread(values[0], lanes), size)
        return "cp", (size * lanes, actual, sectors, ideal)

    def _box(self, address: int) -> int:
        """Bytes of a box of the tensor map at an address."""
        if address not in self._boxes:
            self._boxes[address] = decode(self.launch.read(address, MAP_BYTES)).box_bytes
        return self._boxes[address]

    def _st_async(self, op: Op, rank: int, lanes: int, values: Values) -> Decoded:
        where = mbarrier(_one(values[2]))
        return "copy", (lanes * _width(op), where[0], *where)

    # Loads and stores

    def _memory(self, op: Op, rank: int, lanes: int, values: Values) -> Decoded | None:
        position = 0 if op.name in ("st", "red") else 1
        address, size = values[position], _width(op)
        if address is None:
            return None
        if any(m.startswith("shared") for m in op.mods):
            if op.name in ("atom", "red"):
                return "sts", (lanes, size * lanes, lanes)
            actual, ideal = self._conflicts(_spread(address, lanes), size)
            return ("lds" if op.name == "ld" else "sts"), (actual, size * lanes, ideal)
        if looks(op):
            return "poll", (_one(address), -1 if values[0] is None else _one(values[0]))
        if op.name in ("atom", "red") or "release" in op.mods:
            value = values[position + 1]
            if value is not None and lanes == 1:
                return "signal", (_one(address), _one(value), int("add" in op.mods))
        kind = {"ld": "ldg", "st": "stg"}.get(op.name, "atom")
        return kind, (_sectors(_spread(address, lanes), size),)

    def _matrices(self, op: Op, rank: int, lanes: int, values: Values) -> Decoded:
        count = next(int(m[1:]) for m in op.mods if m in ("x1", "x2", "x4"))
        address = _spread(values[1 if op.name == "ldmatrix" else 0], lanes)[: 8 * count]
        actual, ideal = self._conflicts(address, 16)
        return ("lds" if op.name == "ldmatrix" else "sts"), (actual, 128 * count, ideal)

    def _conflicts(self, address: Array, size: int) -> tuple[int, int]:
        """Wavefronts of an access to shared memory: the most different words that lanes want of one bank, and as few as these words need.

        Lanes that want the same word are served together. ``size`` is bytes a lane.
        """
        first = int(address[0])
        key = size, (address.astype(np.int64) - first + (first & 127)).tobytes()
        found = self._wavefronts.get(key)
        if found is None:
            words = (address.astype(np.int64)[:, None] + np.arange(0, max(size, 4), 4)).reshape(-1) >> 2
            different = np.unique(words)
            found = self._wavefronts[key] = int(np.bincount(different % _BANKS).max()), -(-len(different) // _BANKS)
        return found


def mbarrier(address: int) -> tuple[int, int]:
    """(rank of the CTA, offset) of a shared or generic address."""
    low = address & 0xFFFFFFFF
    return low >> RANK_SHIFT, low & _OFFSET


def _one(values: Array | None) -> int:
    assert values is not None
    return int(values[0])


def _at(values: Array | None, lane: int) -> int:
    assert values is not None
    return int(values[lane if values.size > 1 else 0])


def _spread(values: Array | None, lanes: int) -> Array:
    assert values is not None
    return values if values.size == lanes else np.broadcast_to(values, lanes)


def _total(values: Array | None, lanes: int) -> int:
    assert values is not None
    return int(values.astype(np.int64).sum()) if values.size > 1 else int(values[0]) * lanes


def _width(op: Op) -> int:
    """Bytes of a lane."""
    bits = next((int(m[1:]) for m in reversed(op.mods) if re.fullmatch(r"[busf]\d+", m)), 32)
    if op.mods and op.mods[-1].endswith("x2"):
        bits = 2 * int(re.sub(r"\D", "", op.mods[-1][:-2]) or 16)
    vector = next((int(m[1:]) for m in op.mods if m in ("v2", "v4", "v8")), 1)
    return max(bits // 8, 1) * vector


def access_words(op: Op) -> int:
    """Words of 4 bytes of a lane of an access to shared memory, at least one; of ldmatrix and stmatrix the number of matrices."""
    if op.name in ("ldmatrix", "stmatrix"):
        return next(int(m[1:]) for m in op.mods if m in ("x1", "x2", "x4"))
    return max(_width(op) // 4, 1)


def _sectors(address: Array, size: int) -> int:
    """Sectors of 32 bytes that an access of global memory touches."""
    first = address.astype(np.uint64) // _SECTOR
    last = (address.astype(np.uint64) + np.uint64(size - 1)) // _SECTOR
    return len(np.unique(np.concatenate([first, last])))


_DECODERS: dict[str, Any] = {
    "mbarrier.init": Decoder._init,
    "mbarrier.arrive": Decoder._arrive,
    "mbarrier.arrive_drop": Decoder._arrive,
    "mbarrier.expect_tx": Decoder._expect,
    "mbarrier.try_wait": Decoder._wait,
    "mbarrier.test_wait": Decoder._wait,
    "bar": Decoder._bar,
    "barrier": Decoder._bar,
    "tcgen05.mma": Decoder._mma,
    "tcgen05.commit": Decoder._commit,
    "tcgen05.ld": Decoder._tensor_memory,
    "tcgen05.st": Decoder._tensor_memory,
    "tcgen05.wait::ld": Decoder._nothing,
    "tcgen05.wait::st": Decoder._nothing,
    "wgmma": Decoder._wgmma,
    "cp.bulk": Decoder._bulk,
    "cp.reduce": Decoder._bulk,
    "cp.async": Decoder._cp_async,
    "clusterlaunchcontrol": Decoder._ask,
    "st.async": Decoder._st_async,
    "red.async": Decoder._st_async,
    "ld": Decoder._memory,
    "st": Decoder._memory,
    "atom": Decoder._memory,
    "red": Decoder._memory,
    "ldmatrix": Decoder._matrices,
    "stmatrix": Decoder._matrices,
    "fence": Decoder._nothing,
    "setmaxnreg": Decoder._nothing,
}
