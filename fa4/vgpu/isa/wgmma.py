"""Asynchronous multiplications of a warpgroup on sm_90a (PTX ISA 9.7.15)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.isa.matrix import register_rows, whole_warps
from fa4.vgpu.isa.registry import Mods, instruction
from fa4.vgpu.lexer import integer
from fa4.vgpu.program import Immediate, Op, Operand, Tuple
from fa4.vgpu.warpgroup import WARPS, Multiplications, WgmmaForm

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter

Array = npt.NDArray[Any]

_ACCUMULATORS = {"f16": ("f32", "f16"), "bf16": ("f32",), "tf32": ("f32",), "e4m3": ("f32", "f16"), "e5m2": ("f32", "f16")}
_K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
_INTEGER_N = {8, 16, 24, 32, *range(48, 257, 16)}


def form_of(mods: Mods, options: tuple[bool, ...], from_registers: bool) -> WgmmaForm:
    """The form; ``options`` are the immediates behind scale-d: negate A and B, transpose A (descriptors only) and B."""
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", next((m for m in mods.left if m.startswith("m64n")), ""))
    if shape is None or len(mods.types) != 3:
        raise mods.unsupported("a shape and three types are needed")
    mods.take(shape[0])
    clamp = bool(mods.take("satfinite"))
    d, a, b = mods.types
    n, k = int(shape[1]), int(shape[2])
    integers = {a, b} <= {"s8", "u8"}
    if integers:
        good = d == "s32" and n in _INTEGER_N and not options
    else:
        good = d in _ACCUMULATORS.get(a, ()) and (a == b or {a, b} == {"e4m3", "e5m2"}) and n % 8 == 0 and 8 <= n <= 256 and not clamp
        transposable = a in ("f16", "bf16")
        good = good and len(options) == (2 + (1 if from_registers else 2) * transposable)
    if not good or _K.get(a) != k:
        raise mods.unsupported()
    negate_a, negate_b, *rest = options or (False, False)
    first, second, *_ = (False, *rest, False) if from_registers else (*rest, False, False)
    return WgmmaForm(n, d, a, b, (first, second), (negate_a, negate_b), clamp)


def _flag(mods: Mods, o: Operand, values: dict[int, bool]) -> bool:
    if not isinstance(o, Immediate) or integer(o.text) not in values:
        raise mods.unsupported(f"immediates must be among {sorted(values)}")
    return values[integer(o.text)]


def start_multiply(
    g: Any, form: WgmmaForm, rows: tuple[Array, Array | None], values: tuple[Array, Array, Array], mask: Array | None
) -> None:
    """wgmma.mma_async."""
    for gang in gangs(g, mask):
        here = slice(32 * (gang.first - g.first), 32 * (gang.last - g.first))
        a, b, scale = (np.broadcast_to(v, g.n)[here] for v in values)
        g.cta.unit(Multiplications).issue(gang, form, rows, (a, b, scale))


def gangs(g: Any, mask: Array | None) -> list[Any]:
    """The gang, or where some of its warps do not take part, one for each that does."""
    warps = whole_warps(g, mask)
    if warps is None:
        return [g]
    found = [g.cta.gang(g.first + i, g.first + i + 1) for i in np.flatnonzero(warps).tolist()]
    for gang in found:
        gang.site = g.site
    return found


def fence_multiplies(g: Any, mask: Array | None) -> None:
    """wgmma.fence."""
    for gang in gangs(g, mask):
        g.cta.unit(Multiplications).fence(gang)


def commit_multiplies(g: Any, mask: Array | None) -> None:
    """wgmma.commit_group."""
    for gang in gangs(g, mask):
        g.cta.unit(Multiplications).commit(gang.first, gang.last)


def wait_multiplies(g: Any, keep: int, mask: Array | None) -> None:
    """wgmma.wait_group."""
    for gang in gangs(g, mask):
        g.cta.unit(Multiplications).wait(gang, keep)


@instruction(
    "wgmma",
    section="9.7.15.5.2, 9.7.15.7",
    forms="fence, commit_group, wait_group; mma_async of f16 bf16 (into f32, f16 for f16), tf32, e4m3 e5m2 (into f32 f16), s8 u8 "
    "(satfinite), A by descriptor or in registers, every N, scale-d, scale-a, scale-b, transposed 16-bit operands; swizzles of "
    "sm_90 descriptors without base offset",
)
def _wgmma(e: Emitter, op: Op, mods: Mods) -> None:
    what = mods.take("mma_async", "fence", "commit_group", "wait_group")
    if not what or not mods.take("sync") or not mods.take("aligned"):
        raise mods.unsupported()
    if what == "fence":
        e.line(f"{e.helper(fence_multiplies)}(g, {e.masked})")
    elif what == "commit_group":
        e.line(f"{e.helper(commit_multiplies)}(g, {e.masked})")
    elif what == "wait_group":
        (count,) = op.operands
        if not isinstance(count, Immediate):
            raise mods.unsupported()
        e.line(f"{e.helper(wait_multiplies)}(g, {integer(count.text)}, {e.masked})")
    else:
        _multiply(e, op, mods)


def _multiply(e: Emitter, op: Op, mods: Mods) -> None:
    d, a, b, scale, *rest = op.operands
    signs, flags = {1: False, -1: True}, {0: False, 1: True}
    options = tuple(_flag(mods, o, signs if i < 2 else flags) for i, o in enumerate(rest))
    form = form_of(mods, options, isinstance(a, Tuple))
    result = register_rows(mods, e.items(d))
    if len(result) != form.n // (4 if form.accumulator == "f16" else 2):
        raise mods.unsupported("number of result registers")
    factor, value = "None", e.constant(0, "uint64")
    if isinstance(a, Tuple):
        rows = register_rows(mods, a.items)
        if len(rows) != WARPS:
            raise mods.unsupported("A needs four registers")
        factor = e.fixed(rows)
    else:
        value = e.source(a, "b64")
    values = f"({value}, {e.source(b, 'b64')}, {e.source(scale, 'pred')})"
    e.line(f"{e.helper(start_multiply)}(g, {e.fixed(form)}, ({e.fixed(result)}, {factor}), {values}, {e.masked})")
