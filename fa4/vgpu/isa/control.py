"""Control flow, barriers and fences (PTX ISA 9.7.12, 9.7.13.1 to 9.7.13.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa4.vgpu import barrier
from fa4.vgpu.isa.registry import Mods, ending, instruction
from fa4.vgpu.isa.warp import check_members
from fa4.vgpu.program import Op, Tuple

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter


@ending("bra", section="9.7.12.3", forms="uni and not")
@ending("ret", "exit", section="9.7.12.6, 9.7.12.7", forms="uni and not; of an entry")
def _branch(e: Emitter, op: Op, mods: Mods) -> None:
    """Returns the lanes that jump, None where all do."""
    mods.take("uni")
    e.line(f"return {e.masked}")


@ending("brx", section="9.7.12.4", forms="idx, uni and not")
def _branch_index(e: Emitter, op: Op, mods: Mods) -> None:
    """Returns the number of the label for each lane, and the lanes that jump."""
    mods.take("uni")
    if not mods.take("idx"):
        raise mods.unsupported()
    e.line(f"return {e.source(op.operands[0], 'u32')}, {e.masked}")


@ending("bar", "barrier", section="9.7.13.1, 9.7.13.2", forms="sync arrive, red popc and or, with and without counts; bar.warp.sync")
def _barrier(e: Emitter, op: Op, mods: Mods) -> None:
    if mods.take("warp"):
        if not mods.take("sync"):
            raise mods.unsupported()
        e.line(f"{e.helper(check_members)}(g, {e.source(op.operands[0], 'u32')}, {e.masked})")
        return
    mods.take("cta")
    kind = mods.take("sync", "arrive", "red")
    aligned = bool(mods.take("aligned")) or op.name == "bar"
    operands = list(op.operands)
    value = result = "None"
    if kind == "red":
        function = mods.take("popc", "and", "or")
        target, predicate = operands.pop(0), operands.pop()
        mods.type("u32" if function == "popc" else "pred")
        value = e.source(predicate, "pred")
        result = f"({function!r}, {e.fixed(target)}, {value})"
    elif not kind:
        raise mods.unsupported()
    if isinstance(operands[0], Tuple) or len(operands) > 2 or (kind == "arrive" and len(operands) != 2):
        raise mods.unsupported()
    threads = e.source(operands[1], "u32") if len(operands) == 2 else "None"
    e.helper(barrier.execute)
    e.line(f"execute(g, {kind!r}, {aligned}, {e.source(operands[0], 'u32')}, {threads}, {e.masked}, {result})")


@instruction(
    "membar",
    "fence",
    section="9.7.13.3",
    forms="membar of every level; sc acq_rel acquire release mbarrier_init, proxy: async alias tensormap; all access is in one order",
)
def _fence(e: Emitter, op: Op, mods: Mods) -> None:
    if mods.take("proxy"):
        kind = mods.take("async", "alias", "tensormap::generic", "async::generic")
        if not kind:
            raise mods.unsupported()
        space = mods.take("global", "shared::cta", "shared::cluster")
        if kind.startswith("async") and space != "global":
            e.line(f"g.fence('proxy', {e.masked})")
    if mods.take("mbarrier_init"):
        e.line(f"g.fence('init', {e.masked})")
    how = mods.take("sc", "acq_rel", "acquire", "release")
    if how != "acquire" and "proxy" not in op.mods:
        e.line(f"g.fence('release', {e.masked})")
    mods.ignore("sync_restrict::")
    mods.take("cta", "cluster", "gpu", "gl", "sys")


@instruction("griddepcontrol", section="9.7.13.13", forms="launch_dependents wait, no effect: launches run one after the other")
def _dependents(e: Emitter, op: Op, mods: Mods) -> None:
    if not mods.take("launch_dependents", "wait"):
        raise mods.unsupported()


@instruction("trap", section="9.7.19.4", forms="an error")
def _trap(e: Emitter, op: Op, mods: Mods) -> None:
    e.line(f"g.trap({e.masked})")


@instruction("nanosleep", "pmevent", section="9.7.19.2, 9.7.19.3", forms="no effect")
def _nothing(e: Emitter, op: Op, mods: Mods) -> None:
    mods.ignore("u32", "mask")
    mods.types.clear()
