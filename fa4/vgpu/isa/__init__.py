"""The instruction set: one family a module, each instruction registered with its section of the PTX ISA.

``emit`` writes the code of one instruction, ``emit_end`` that of one that ends a block, ``group`` decides which instructions of a block
are executed together.
"""

from __future__ import annotations

from fa4.vgpu.isa import (
    arithmetic,
    async_copy,
    atomic,
    bits,
    bulk,
    cluster,
    control,
    convert,
    floating,
    half,
    launch_control,
    loadstore,
    matrix,
    mbarrier,
    move,
    predicate,
    registers,
    store_async,
    tcgen05,
    tensor,
    warp,
    wgmma,
)
from fa4.vgpu.isa.matrix import emit_group, group
from fa4.vgpu.isa.move import special_register
from fa4.vgpu.isa.registry import ENDINGS, FORMS, Form, Mods, emit, emit_end, form_key

__all__ = ["ENDINGS", "FORMS", "Form", "Mods", "emit", "emit_end", "emit_group", "form_key", "group", "special_register"]

FAMILIES = (
    arithmetic,
    bits,
    floating,
    half,
    convert,
    predicate,
    move,
    loadstore,
    atomic,
    warp,
    control,
    async_copy,
    matrix,
    wgmma,
    tcgen05,
    mbarrier,
    cluster,
    registers,
    bulk,
    tensor,
    store_async,
    launch_control,
)
