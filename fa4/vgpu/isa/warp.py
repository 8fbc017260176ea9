"""Instructions across the lanes of a warp (PTX ISA 9.7.9.5 to 9.7.9.7, 9.7.13.9 to 9.7.13.15)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu import numerics
from fa4.vgpu.errors import DivergenceError, UninitializedError
from fa4.vgpu.isa.registry import Mods, instruction
from fa4.vgpu.lexer import integer
from fa4.vgpu.memory import FaultError, spread
from fa4.vgpu.program import Immediate, Op, Operand, Tuple

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]
_WEIGHTS = np.uint32(1) << np.arange(32, dtype=np.uint32)
_LANES = np.arange(32)


def ballot(values: Array) -> Array:
    """Lanes where ``values`` (warps, 32) is true, as a bit mask for each warp."""
    return np.asarray((values * _WEIGHTS).sum(-1, dtype=np.uint32))


def check_members(g: Any, members: Array, mask: Array | None) -> None:
    """Every lane that a membermask names must be here, or have exited; and a lane here must name itself (PTX ISA 9.7.13.9)."""
    here = np.ones((g.warps, 32), bool) if mask is None else mask.reshape(-1, 32)
    named = (np.broadcast_to(members, g.n).reshape(-1, 32)[:, :, None] >> _LANES.astype(np.uint32) & np.uint32(1)).astype(bool)
    # named[w, i, j]: lane i names lane j
    missing = (named & ~here[:, None, :] & ~g.exited().reshape(-1, 1, 32)).any(2) & here
    if missing.any():
        w, lane = np.argwhere(missing)[0]
        absent = np.flatnonzero(named[w, lane] & ~here[w] & ~g.exited().reshape(-1, 32)[w]).tolist()
        raise FaultError(DivergenceError, f"lanes {absent} are in the mask of lanes to wait for, but are elsewhere", missing.reshape(-1))
    absent_self = ~named[:, _LANES, _LANES] & here
    if absent_self.any():
        raise FaultError(DivergenceError, "a lane executes this that is not in the mask itself", absent_self.reshape(-1))


def _members(e: Emitter, o: Operand) -> None:
    """Check the mask; nothing to do where all lanes are named and all are here."""
    everyone = isinstance(o, Immediate) and o.text in ("-1", "0xffffffff", "0xFFFFFFFF", "4294967295")
    if not (everyone and e.mask is None):
        e.line(f"{e.helper(check_members)}(g, {e.source(o, 'u32')}, {e.masked})")


@lru_cache(maxsize=256)
def _sources(mode: str, lane: int, control: int) -> tuple[Array, Array]:
    """The source of each lane, and whether it is in range, where lane and control are the same for all."""
    every = (np.full((1, 32), x, np.uint32) for x in (lane, control))
    j, valid = _source_lanes(mode, *every)
    return j[0], valid[0]


def _source_lanes(mode: str, lane: Array, control: Array) -> tuple[Array, Array]:
    """For each lane (warps, 32) the source, itself where that is out of range, and whether it is in range (PTX ISA 9.7.9.6)."""
    b = (lane & np.uint32(31)).astype(np.int64)
    segment = ((control >> np.uint32(8)) & np.uint32(31)).astype(np.int64)
    clamp = (control & np.uint32(31)).astype(np.int64)
    highest = (_LANES & segment) | (clamp & ~segment)
    lowest = _LANES & segment
    if mode == "up":
        j = _LANES - b
        valid = j >= highest
    elif mode == "down":
        j = _LANES + b
        valid = j <= highest
    elif mode == "bfly":
        j = _LANES ^ b
        valid = j <= highest
    else:
        j = lowest | (b & ~segment)
        valid = j <= highest
    return np.where(valid, j, _LANES), np.broadcast_to(valid, j.shape)


def shuffle(g: Any, mode: str, value: Array, lane: Array, control: Array, mask: Array | None) -> tuple[Array, Array]:
    """(values, whether the source lane was in range), lane by lane; out of range a lane keeps its own value."""
    n = g.warps
    values = np.broadcast_to(value, g.n).reshape(n, 32)
    index: Any
    if lane.size == control.size == 1:
        j, valid = _sources(mode, int(lane[0]), int(control[0]))
        index = (slice(None), j)
    else:
        j, valid = _source_lanes(mode, *(np.broadcast_to(x, g.n).reshape(n, 32) for x in (lane, control)))
        index = (np.arange(n)[:, None], j)
    if mask is not None:
        here = mask.reshape(n, 32)
        absent = ~here[index] & here
        if absent.any():
            raise FaultError(UninitializedError, "a shuffle reads from a lane that does not take part", absent.reshape(-1))
    return values[index].reshape(-1), np.broadcast_to(valid, (n, 32)).reshape(-1)


def shuffle_fixed(value: Array, index: Array) -> Array:
    """A shuffle whose pattern is known when the code is generated."""
    return value.reshape(-1, 32).take(index, axis=1).reshape(-1)


@instruction("shfl", section="9.7.9.6", forms="sync; up down bfly idx, b32, with or without a predicate result")
def _shfl(e: Emitter, op: Op, mods: Mods) -> None:
    mods.type("b32")
    if not mods.take("sync"):
        raise mods.unsupported("only shfl.sync")
    mode = mods.take("up", "down", "bfly", "idx")
    d, a, b, c, members = op.operands
    _members(e, members)
    targets = d.items if isinstance(d, Tuple) else (d,)
    value = e.source(a, "b32")
    if e.mask is None and len(targets) == 1 and isinstance(b, Immediate) and isinstance(c, Immediate) and value.startswith("u32"):
        fake = type("Warp", (), {"n": 32, "warps": 1})
        lane, control = (np.array([integer(o.text) & 0xFFFFFFFF], np.uint32) for o in (b, c))
        index, _ = shuffle(fake, mode, np.arange(32), lane, control, None)
        e.assign(targets[0], "b32", f"{e.helper(shuffle_fixed)}({value}, {e.fixed(index)})")
        return
    result = e.temporary(f"{e.helper(shuffle)}(g, {mode!r}, {value}, {e.source(b, 'u32')}, {e.source(c, 'u32')}, {e.masked})")
    e.assign(targets[0], "b32", f"{result}[0]")
    if len(targets) == 2:
        e.assign(targets[1], "pred", f"{result}[1]")


def vote(g: Any, mode: str, value: Array, mask: Array | None) -> Array:
    """One value for each lane of a warp."""
    here = np.ones((g.warps, 32), bool) if mask is None else mask.reshape(-1, 32)
    values = np.broadcast_to(value, g.n).reshape(-1, 32)
    any_, all_ = (values & here).any(1), (values | ~here).all(1)
    result = ballot(values & here) if mode == "ballot" else {"any": any_, "all": all_, "uni": all_ | ~any_}[mode]
    return np.repeat(result, 32)


@instruction("vote", section="9.7.13.9", forms="sync; all any uni of pred, ballot.b32")
def _vote(e: Emitter, op: Op, mods: Mods) -> None:
    type_ = mods.type("pred", "b32")
    mode = mods.take("all", "any", "uni", "ballot")
    if not mods.take("sync") or (mode == "ballot") != (type_ == "b32"):
        raise mods.unsupported()
    d, a, members = op.operands
    _members(e, members)
    e.assign(d, type_, f"{e.helper(vote)}(g, {mode!r}, {e.source(a, 'pred')}, {e.masked})")


def match(g: Any, mode: str, value: Array, mask: Array | None) -> tuple[Array, Array]:
    """Lanes with the same value as each lane (any), or all lanes where all values are equal, else none (all); and whether they are."""
    here = np.ones((g.warps, 32), bool) if mask is None else mask.reshape(-1, 32)
    values = np.broadcast_to(value, g.n).reshape(-1, 32)
    same = (values[:, :, None] == values[:, None, :]) & here[:, None, :]
    if mode == "any":
        return ballot(same).reshape(-1), np.ones(g.n, bool)
    equal = (same | ~here[:, None, :]).all(2)
    return np.where(equal, ballot(here)[:, None], np.uint32(0)).astype(np.uint32).reshape(-1), equal.reshape(-1)


@instruction("match", section="9.7.13.10", forms="any.sync all.sync of b32 b64")
def _match(e: Emitter, op: Op, mods: Mods) -> None:
    type_ = mods.type("b32", "b64")
    mode = mods.take("any", "all")
    if not mods.take("sync") or not mode:
        raise mods.unsupported()
    d, a, members = op.operands
    _members(e, members)
    result = e.temporary(f"{e.helper(match)}(g, {mode!r}, {e.source(a, type_)}, {e.masked})")
    for target, i in zip(d.items if isinstance(d, Tuple) else (d,), (0, 1), strict=False):
        e.assign(target, "pred" if i else "b32", f"{result}[{i}]")


def active_mask(g: Any, mask: Array | None) -> Array:
    """Lanes that execute together."""
    here = np.ones((g.warps, 32), bool) if mask is None else mask.reshape(-1, 32)
    return np.repeat(ballot(here), 32)


@instruction("activemask", section="9.7.13.11", forms="b32")
def _activemask(e: Emitter, op: Op, mods: Mods) -> None:
    mods.type("b32")
    e.assign(op.operands[0], "b32", f"{e.helper(active_mask)}(g, {e.masked})")


def reduce_warp(g: Any, name: str, value: Array, mask: Array | None) -> Array:
    """Add min max and or xor over the lanes here."""
    ufunc = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name]
    values = np.broadcast_to(value, g.n).reshape(-1, 32)
    rows = [row if mask is None else row[m] for row, m in zip(values, values if mask is None else mask.reshape(-1, 32), strict=True)]
    result = [ufunc.reduce(row, dtype=value.dtype) if row.size else value.dtype.type(0) for row in rows]
    return np.repeat(np.array(result, value.dtype), 32)


def reduce_float(g: Any, how: tuple[str, bool, bool], value: Array, mask: Array | None) -> Array:
    """Min or max of float32 over the lanes here; ``how`` says (name, of magnitudes, whether one NaN makes the result NaN)."""
    name, magnitude, nan = how
    values = np.abs(value) if magnitude else value
    fill = np.float32(np.nan if not nan else -np.inf if name == "max" else np.inf)  # what changes nothing
    rows = np.where(g.all if mask is None else mask, spread(values, g.n), fill).reshape(-1, 32)
    result = rows[:, 0]
    for column in range(1, 32):
        result = numerics.minmax(result, rows[:, column], nan, name == "max")
    return np.repeat(np.where(np.isnan(result), np.uint32(0x7FFFFFFF).view(np.float32), result), 32)


@instruction("redux", section="9.7.13.12", forms="sync; add min max of u32 s32, and or xor of b32, min max (abs, NaN) of f32")
def _redux(e: Emitter, op: Op, mods: Mods) -> None:
    type_ = mods.type("u32", "s32", "b32", "f32")
    name = mods.take("add", "min", "max", "and", "or", "xor")
    if not mods.take("sync") or not name or (type_ == "b32") != (name in ("and", "or", "xor")) or (type_ == "f32" and name == "add"):
        raise mods.unsupported()
    d, a, members = op.operands
    _members(e, members)
    if type_ == "f32":
        how = name, bool(mods.take("abs")), bool(mods.take("NaN"))
        e.assign(d, type_, f"{e.helper(reduce_float)}(g, {how}, {e.source(a, type_)}, {e.masked})")
    else:
        e.assign(d, type_, f"{e.helper(reduce_warp)}(g, {name!r}, {e.source(a, type_)}, {e.masked})")


def elect(g: Any, mask: Array | None) -> tuple[Array, Array]:
    """(number of the lowest lane here, whether a lane is it)."""
    here = np.ones((g.warps, 32), bool) if mask is None else mask.reshape(-1, 32)
    leader = here.argmax(1)
    return np.repeat(leader.astype(np.uint32), 32), (leader[:, None] == _LANES).reshape(-1)


@instruction("elect", section="9.7.13.15", forms="sync: the lowest lane")
def _elect(e: Emitter, op: Op, mods: Mods) -> None:
    if not mods.take("sync"):
        raise mods.unsupported()
    d, members = op.operands
    _members(e, members)
    result = e.temporary(f"{e.helper(elect)}(g, {e.masked})")
    targets = d.items if isinstance(d, Tuple) else (d,)
    if len(targets) == 2:
        e.assign(targets[0], "b32", f"{result}[0]")
    e.assign(targets[-1], "pred", f"{result}[1]")
