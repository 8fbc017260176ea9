"""Asynchronous copies of sm_80 (PTX ISA 9.7.9.25): completed as late as the instruction that waits for them allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa4.vgpu.isa.registry import Mods, instruction
from fa4.vgpu.lexer import integer
from fa4.vgpu.program import Immediate, Op, Register

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter


@instruction(
    "cp",
    section="9.7.9.25.3",
    forms="async.ca (4 8 16) async.cg (16) shared.global, src-size, ignore-src; commit_group, wait_group, wait_all",
)
def _copy(e: Emitter, op: Op, mods: Mods) -> None:
    if not mods.take("async"):
        raise mods.unsupported()
    if mods.take("commit_group"):
        e.line(f"g.commit_copies({e.masked})")
    elif mods.take("wait_all"):
        e.line(f"g.wait_copies(None, {e.masked})")
    elif mods.take("wait_group"):
        count = op.operands[0]
        if not isinstance(count, Immediate):
            raise mods.unsupported()
        e.line(f"g.wait_copies({integer(count.text)}, {e.masked})")
    else:
        _start(e, op, mods)


def _start(e: Emitter, op: Op, mods: Mods) -> None:
    cache = mods.take("ca", "cg")
    spaces = mods.take("shared", "shared::cta"), mods.take("global")
    hint = mods.take("L2::cache_hint")
    mods.ignore("L2::")
    if not cache or not all(spaces):
        raise mods.unsupported()
    to, source, size, *rest = op.operands
    if hint:
        rest.pop()
    if not isinstance(size, Immediate) or integer(size.text) not in ((16,) if cache == "cg" else (4, 8, 16)) or len(rest) > 1:
        raise mods.unsupported("copy size")
    valid = ignore = "None"
    if rest and isinstance(rest[0], Register) and rest[0].bits == 1:
        ignore = e.source(rest[0], "pred")
    elif rest:
        valid = e.source(rest[0], "u32")
    e.count("cp.async", integer(size.text))
    e.line(f"g.start_copy(({e.address(to, 32)}, {e.address(source, 64)}), {integer(size.text)}, {valid}, {ignore}, {e.masked})")
