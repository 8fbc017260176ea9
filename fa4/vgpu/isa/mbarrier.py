"""mbarrier instructions (PTX ISA 9.7.13.16): what a phase counts, and waiting for its end.

A try_wait that must wait parks its warp until the phase is complete. It returns False only when nothing else on the machine can run,
and in the random schedules now and then, as a time limit may run out on hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.engine import Issuer, Wait
from fa4.vgpu.errors import BarrierError, OutOfBoundsError
from fa4.vgpu.isa.registry import Mods, ending
from fa4.vgpu.mbarrier import Mbarrier
from fa4.vgpu.memory import WINDOW_SHIFT, WINDOWS, FaultError, spread
from fa4.vgpu.program import Op, Register, Sink

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]

SECTION = "9.7.13.16"


def shared_address(e: Emitter, op: Op, mods: Mods, operand: int, *spaces: str) -> str:
    """The address operand of an object in shared memory, with the rank of its CTA; generic where the instruction names no space."""
    space = mods.take("shared::cluster", "shared::cta", "shared")
    if space and space not in spaces:
        raise mods.unsupported(f"space {space}")
    a = op.operands[operand]
    if space:
        address = e.address(a, 32)
        return f"{e.helper(check_own)}(g, {address}, {e.masked})" if space != "shared::cluster" else address
    address = f"{e.helper(from_generic)}(g, {e.address(a, 64)}, {e.masked})"
    return address if "shared::cluster" in spaces else f"{e.helper(check_own)}(g, {address}, {e.masked})"


def check_own(g: Any, address: Array, mask: Array | None) -> Array:
    """Shared addresses that must lie in the CTA itself."""
    if g.clustered:
        bad = spread((address ^ g.base) >> np.uint32(24) != 0, g.n)
        bad = bad if mask is None else bad & mask
        if bad.any():
            rank = int(spread(address, g.n)[bad.argmax()]) >> 24
            raise FaultError(OutOfBoundsError, f"a shared::cta address of CTA {rank}, in CTA {g.cta.rank} of the cluster", bad)
    return address


def from_generic(g: Any, address: Array, mask: Array | None) -> Array:
    """Generic addresses, which must lie in shared memory, as shared ones."""
    bad = spread(address >> np.uint64(WINDOW_SHIFT) != WINDOWS["shared"] >> WINDOW_SHIFT, g.n)
    bad = bad if mask is None else bad & mask
    if bad.any():
        first = int(spread(address, g.n)[bad.argmax()])
        raise FaultError(OutOfBoundsError, f"generic address {first:#x} is not in shared memory", bad)
    return address.astype(np.uint32)


def by_warp(warps: int, keys: Array, mask: Array | None) -> Iterator[tuple[int, int, Array]]:
    """(warp of the gang, key, lanes of the warp), for every distinct key among the lanes of a warp that execute."""
    rows = None if keys.size == 1 else keys.reshape(-1, 32)
    for i in range(warps):
        lanes = _LANES if mask is None else np.flatnonzero(mask[32 * i : 32 * i + 32])
        if not lanes.size:
            continue
        if rows is None:
            yield i, int(keys[0]), lanes
            continue
        row = rows[i][lanes]
        first = row[0]
        if lanes.size == 1 or (row == first).all():
            yield i, int(first), lanes
        else:
            for key in np.unique(row):
                yield i, int(key), lanes[row == key]


_LANES = np.arange(32)


def mbarrier_at(g: Any, address: int, i: int, lanes: Array) -> Mbarrier:
    """The mbarrier at a shared address that lanes of warp ``i`` use."""
    try:
        found: Mbarrier = g.mbarrier(address)
    except FaultError as fault:
        raise FaultError(fault.error, fault.message, lane_mask(g, i, lanes)) from None
    return found


def lane_mask(g: Any, i: int, lanes: Array) -> Array:
    """Lanes of one warp among those of the gang."""
    mask = np.zeros(g.n, bool)
    mask[32 * i + lanes] = True
    return mask


def initialise(g: Any, address: Array, count: Array, mask: Array | None) -> None:
    """mbarrier.init."""
    counts = spread(count, g.n)
    for i, where, lanes in by_warp(g.warps, address, mask):
        cta, offset = g.shared_of(where)
        given = set(counts[32 * i + lanes].tolist())
        if len(given) > 1:
            message = f"lanes initialise the mbarrier at {offset:#x} with different counts: {sorted(given)}"
            raise FaultError(BarrierError, message, lane_mask(g, i, lanes))
        try:
            cta.mbarriers.init(offset, int(counts[32 * i + lanes[0]]))
            if g.cta.hazards is not None:
                g.cta.hazards.made_mbarrier(cta.mbarriers.at(offset), g.cta, g.first + i, g.site)
        except FaultError as fault:
            raise FaultError(fault.error, fault.message, lane_mask(g, i, lanes)) from None


@ending(
    "mbarrier.init",
    section=SECTION + ".9",
    forms="shared::cta or generic; by one lane, or by several with one count; an error where one is already",
)
def _init(e: Emitter, op: Op, mods: Mods) -> None:
    mods.type("b64")
    address = shared_address(e, op, mods, 0, "shared", "shared::cta")
    e.line(f"{e.helper(initialise)}(g, {address}, {e.source(op.operands[1], 'u32')}, {e.masked})")


def invalidate(g: Any, address: Array, mask: Array | None) -> None:
    """mbarrier.inval."""
    for i, where, lanes in by_warp(g.warps, address, mask):
        mbarrier = mbarrier_at(g, where, i, lanes)
        try:
            mbarrier.cta.mbarriers.invalidate(mbarrier.offset)
        except FaultError as fault:
            raise FaultError(fault.error, fault.message, lane_mask(g, i, lanes)) from None


@ending("mbarrier.inval", section=SECTION + ".10", forms="shared::cta or generic")
def _inval(e: Emitter, op: Op, mods: Mods) -> None:
    mods.type("b64")
    e.line(f"{e.helper(invalidate)}(g, {shared_address(e, op, mods, 0, 'shared', 'shared::cta')}, {e.masked})")


def transaction(g: Any, op: Op, address: Array, size: Array, mask: Array | None) -> None:
    """expect_tx and complete_tx, which only counts."""
    sizes = spread(size, g.n)
    for i, where, lanes in by_warp(g.warps, address, mask):
        mbarrier = mbarrier_at(g, where, i, lanes)
        total = int(sizes[32 * i + lanes].sum(dtype=np.int64))
        issuer = g.issuer(op, 32 * i + int(lanes[0]))
        try:
            if "expect_tx" in op.mods:
                mbarrier.expect_bytes(total, issuer)
            else:
                mbarrier.complete_bytes(total, issuer, None)
        except FaultError as fault:
            raise FaultError(fault.error, fault.message, lane_mask(g, i, lanes)) from None


@ending(
    "mbarrier.expect_tx", "mbarrier.complete_tx", section=SECTION + ".11, .12", forms="relaxed; shared::cta, shared::cluster or generic"
)
def _transaction(e: Emitter, op: Op, mods: Mods) -> None:
    mods.type("b64")
    mods.take("relaxed")
    mods.take("cta", "cluster")
    address = shared_address(e, op, mods, 0, "shared", "shared::cta", "shared::cluster")
    e.line(f"{e.helper(transaction)}(g, {e.fixed(op)}, {address}, {e.source(op.operands[1], 'u32')}, {e.masked})")


def arrive(g: Any, op: Op, address: Array, count: Array | None, size: Array | None, mask: Array | None) -> Array:
    """Each lane arrives, after it has expected ``size`` bytes; the state tokens of the phase before, one for each lane."""
    drop, complete = op.mods[0] == "arrive_drop", "noComplete" not in op.mods
    states = np.zeros(g.n, np.uint64)
    for i, where, lanes in by_warp(g.warps, address, mask):
        mbarrier = mbarrier_at(g, where, i, lanes)
        here = 32 * i + lanes
        issuer = Issuer(g.cta, g.first + i, int(lanes[0]), op)
        states[here] = mbarrier.state()
        try:
            if size is not None:
                mbarrier.expect_bytes(int(spread(size, g.n)[here].sum(dtype=np.int64)), issuer)
            total = lanes.size if count is None else int(spread(count, g.n)[here].sum(dtype=np.int64))
            mbarrier.arrive(total, issuer, _arriving(g, i, mbarrier, "relaxed" in op.mods), drop, complete)
        except FaultError as fault:
            raise FaultError(fault.error, fault.message, lane_mask(g, i, lanes)) from None
    return states


def _arriving(g: Any, i: int, mbarrier: Mbarrier, relaxed: bool) -> Array | None:
    """The clock with which warp ``i`` of a gang arrives."""
    hazards = g.cta.hazards
    if hazards is None:
        return None
    agent = hazards.warp(g.cta, g.first + i)
    hazards.use_mbarrier(mbarrier, agent, g.site)
    clock: Array = hazards.arrive(agent, relaxed)
    return clock


@ending(
    "mbarrier.arrive",
    "mbarrier.arrive_drop",
    section=SECTION + ".13, .14",
    forms="release relaxed, cta cluster; count, expect_tx, noComplete; shared::cta and generic, with state or _, shared::cluster with _",
)
def _arrive(e: Emitter, op: Op, mods: Mods) -> None:
    mods.type("b64")
    mods.take("release", "relaxed")
    mods.take("cta", "cluster")
    expect, incomplete = bool(mods.take("expect_tx")), bool(mods.take("noComplete"))
    remote = "shared::cluster" in mods.left
    state, _, *rest = op.operands
    if len(rest) > 1 or (expect and not rest) or (incomplete and not rest) or (remote and not isinstance(state, Sink)):
        raise mods.unsupported("operands")
    address = shared_address(e, op, mods, 1, "shared", "shared::cta", "shared::cluster")
    value = e.source(rest[0], "u32") if rest else "None"
    count, size = ("None", value) if expect else (value, "None")
    call = f"{e.helper(arrive)}(g, {e.fixed(op)}, {address}, {count}, {size}, {e.masked})"
    if isinstance(state, Sink):
        e.line(call)
    else:
        e.assign(state, "b64", e.temporary(call))


def wait_for_phase(g: Any, target: Register, address: Array, value: Array, how: tuple[bool, bool], mask: Array | None) -> None:
    """test_wait and try_wait; ``how`` says whether ``value`` is a parity or a token, and whether to wait."""
    by_parity, blocking = how
    if mask is None and by_parity and address[0] == address[-1] and value[0] == value[-1]:
        lone = address.size == 1 or bool((address == address[0]).all() and (value == value[0]).all())
        if lone and mbarrier_at(g, int(address[0]), 0, _LANES).phase & 1 != value[0] & 1:
            g.p[target.index][...] = True  # the usual case: everyone may go on
            if g.cta.hazards is not None:
                mbarrier = mbarrier_at(g, int(address[0]), 0, _LANES)
                for i in range(g.warps):
                    g.cta.hazards.waited(mbarrier, g.cta, g.first + i, g.site)
            return
    values = spread(value, g.n)
    for i in range(g.warps):
        here = slice(32 * i, 32 * i + 32)
        lanes = _LANES if mask is None else np.flatnonzero(mask[here])
        if not lanes.size:
            continue
        parts = []
        ready = True
        row = values[here]
        for _, where, some in by_warp(1, spread(address, g.n)[here], None if mask is None else mask[here]):
            mbarrier = mbarrier_at(g, where, i, some)
            for v in {int(x) for x in row[some]} if some.size > 1 else (int(row[some[0]]),):
                chosen = some[row[some] == v] if some.size > 1 else some
                part = _Part(mbarrier, v, by_parity, g, target, 32 * (g.first + i) + chosen)
                try:
                    ready &= part.write()
                except FaultError as fault:
                    raise FaultError(fault.error, fault.message, lane_mask(g, i, chosen)) from None
                parts.append(part)
        if not ready and not blocking:
            g.cta.warps[g.first + i].spins += 1
        if blocking and not ready and not g.cta.launch.scheduler.gives_up(g.cta.cluster.schedule):
            _park(g, i, parts)


class _Part:
    """Lanes of a warp that wait for the same phase of one mbarrier."""

    def __init__(self, mbarrier: Mbarrier, value: int, by_parity: bool, g: Any, target: Register, lanes: Array) -> None:
        self.mbarrier, self.by_parity, self.lanes = mbarrier, by_parity, lanes
        self.cta, self.site = g.cta, g.site
        self.row = g.cta.predicates[target.index]
        self.value = value & 1 if by_parity else value

    def ready(self) -> bool:
        mbarrier = self.mbarrier
        return mbarrier.phase & 1 != self.value if self.by_parity else mbarrier.completed(self.value)

    def write(self) -> bool:
        """Set the predicate to whether the phase is complete."""
        ready = self.ready()
        self.row[self.lanes] = ready
        if ready and self.cta.hazards is not None:
            self.cta.hazards.waited(self.mbarrier, self.cta, int(self.lanes[0]) // 32, self.site)
        return ready

    def __str__(self) -> str:
        parity = f", for the phase of parity {self.value}" if self.by_parity else ""
        return f"{self.mbarrier.describe()}{parity}"


def _park(g: Any, i: int, parts: list[_Part]) -> None:
    """Wait until all lanes have what they wait for."""

    def ready() -> bool:
        for part in parts:
            if not part.row[part.lanes[0]]:  # it stays so once the phase was complete
                part.write()
        return all(part.row[part.lanes[0]] for part in parts)

    g.block_until(i, Wait(ready, lambda: "; ".join(map(str, parts)), expire=lambda: None), *(part.mbarrier.signal for part in parts))


@ending(
    "mbarrier.test_wait",
    "mbarrier.try_wait",
    section=SECTION + ".16",
    forms="parity or state, acquire relaxed, cta cluster, suspend time hint; shared::cta or generic",
)
def _wait(e: Emitter, op: Op, mods: Mods) -> None:
    mods.type("b64")
    mods.take("acquire", "relaxed")
    mods.take("cta", "cluster")
    parity = bool(mods.take("parity"))
    target, _, value, *hint = op.operands
    if not isinstance(target, Register) or target.bits != 1 or len(hint) > (op.mods[0] == "try_wait"):
        raise mods.unsupported("operands")
    address = shared_address(e, op, mods, 1, "shared", "shared::cta")
    how = (parity, op.mods[0] == "try_wait")
    value_source = e.source(value, "u32" if parity else "u64")
    e.line(f"{e.helper(wait_for_phase)}(g, {e.fixed(target)}, {address}, {value_source}, {how}, {e.masked})")


@ending("mbarrier.pending_count", section=SECTION + ".17", forms="of a state token")
def _pending(e: Emitter, op: Op, mods: Mods) -> None:
    mods.type("b64")
    e.assign(op.operands[0], "u32", f"{e.source(op.operands[1], 'u64')}.astype(np.uint32)")


def arrive_after_copies(g: Any, op: Op, address: Array, counted: bool, mask: Array | None) -> None:
    """cp.async.mbarrier.arrive: each lane arrives when its earlier copies are complete; ``counted``: one of the expected arrivals."""
    for i, where, lanes in by_warp(g.warps, address, mask):
        mbarrier = mbarrier_at(g, where, i, lanes)
        here = np.zeros(32, bool)
        here[lanes] = True
        issuer = Issuer(g.cta, g.first + i, int(lanes[0]), op)
        if not counted:
            mbarrier.expect_more(lanes.size, issuer)
        finish = g.cta.copies.finisher(32 * (g.first + i), here)

        def run(mbarrier: Mbarrier = mbarrier, finish: Any = finish, count: int = lanes.size, issuer: Issuer = issuer) -> None:
            mbarrier.arrive(count, issuer, finish())

        g.cta.engine(("cp.async", g.first + i)).push(run, issuer)


@ending("cp.async.mbarrier.arrive", section=SECTION + ".15", forms="with and without noinc; shared::cta or generic")
def _arrive_copies(e: Emitter, op: Op, mods: Mods) -> None:
    mods.type("b64")
    counted = bool(mods.take("noinc"))
    address = shared_address(e, op, mods, 0, "shared", "shared::cta")
    e.line(f"{e.helper(arrive_after_copies)}(g, {e.fixed(op)}, {address}, {counted}, {e.masked})")
