"""The instruction table of the documentation, made from what is registered."""

from __future__ import annotations

from fa4.vgpu.isa import ENDINGS, FORMS, form_key

_COMPILED = (
    "add:float add:half add:int and bar barrier.cluster bra cp cp.async.bulk.commit_group cp.async.bulk.tensor "
    "cp.async.bulk.wait_group cp.reduce.async.bulk.tensor cvt cvta elect ex2:float fence ld ldmatrix lg2 mad:int mapa "
    "max:float max:int mbarrier.arrive mbarrier.init mbarrier.try_wait min:int mma mov mul:float mul:int neg:int not or "
    "rcp:float ret selp setp shfl shl shr st sub:float sub:int tcgen05.alloc tcgen05.commit tcgen05.dealloc tcgen05.ld "
    "tcgen05.mma tcgen05.relinquish_alloc_permit tcgen05.st tcgen05.wait::ld tcgen05.wait::st vote wgmma xor"
)
COMPILED = frozenset(_COMPILED.split())
"""Keys of the instructions that kernels of this project execute in the tests (tests/vgpu/test_witnesses.py)."""

_WITNESSED = (
    "add:float add:int add:packed and bar barrier barrier.cluster bra cp cp.async.bulk cp.async.bulk.commit_group "
    "cp.async.bulk.tensor cp.async.bulk.wait_group cp.async.mbarrier.arrive cp.reduce.async.bulk cvt cvta div:float div:int "
    "elect ex2:float fence fma:float fma:packed griddepcontrol ld lg2 mad:int mapa max:float max:int mbarrier.arrive "
    "mbarrier.init mbarrier.try_wait min:int mov mul:float mul:int mul:packed neg:float neg:int not or popc prefetch "
    "rcp:float red ret selp setmaxnreg setp shfl shl shr st stmatrix sub:float sub:int sub:packed tanh:float tcgen05.alloc "
    "tcgen05.commit tcgen05.dealloc tcgen05.ld tcgen05.mma tcgen05.relinquish_alloc_permit tcgen05.st tcgen05.wait::ld "
    "tcgen05.wait::st vote wgmma xor"
)
WITNESSED = frozenset(_WITNESSED.split())
"""Keys of the instructions that flash-attn-4's kernels execute in the tests (tests/vgpu/test_peer.py)."""

UNSUPPORTED = (
    ("add.cc", "with a carry", "add.cc.u32 %r1, %r2, %r3;"),
    ("addc", "", "addc.u32 %r1, %r2, %r3;"),
    ("subc", "", "subc.u32 %r1, %r2, %r3;"),
    ("madc", "", "madc.lo.u32 %r1, %r2, %r3, %r4;"),
    ("vadd", "and all video instructions", "vadd.u32.u32.u32 %r1, %r2, %r3;"),
    ("fns", "", "fns.b32 %r1, %r2, %r3, %r4;"),
    ("szext", "", "szext.clamp.u32 %r1, %r2, %r3;"),
    ("bmsk", "", "bmsk.clamp.b32 %r1, %r2, %r3;"),
    ("rcp", "approx.ftz.f64", "rcp.approx.ftz.f64 %d1, %d2;"),
    ("ld", "128 bits", "ld.global.b128 %d1, [%d2];"),
    ("atom", "128 bits", "atom.global.exch.b128 %d1, [%d2], %d3;"),
    ("multimem", "", "multimem.red.global.add.u32 [%d1], %r1;"),
    ("st.async", "to global memory", "st.async.release.global.u32 [%d1], %r1;"),
    ("st.bulk", "", "st.bulk.shared::cta [%r1], %d1, 0;"),
    ("ldmatrix", "8-bit matrices", "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1, %r2}, [%r3];"),
    ("mma", "f64", "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d1, %d2}, {%d3}, {%d4}, {%d1, %d2};"),
    ("mma", "4 bits", "mma.sync.aligned.m16n8k32.row.col.s32.s4.s4.s32 {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%r7}, {%r1, %r2, %r3, %r4};"),
    (
        "mma.sp",
        "sparse",
        "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%r7, %r8}, {%r1, %r2, %r3, %r4}, %r9, 0;",
    ),
    ("wmma", "", "wmma.load.a.sync.aligned.m16n16k16.row.f16 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%d1];"),
    (
        "wgmma.mma_async.sp",
        "sparse",
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%r1, %r2, %r3, %r4}, %d1, %d2, %r5, 0, %p1, 1, 1, 0, 0;",
    ),
    ("tcgen05.cp", "", "tcgen05.cp.cta_group::1.128x256b [%r1], %d1;"),
    ("tcgen05.shift", "", "tcgen05.shift.cta_group::1.down [%r1];"),
    ("tcgen05.mma.sp", "sparse", "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %d1, %d2, [%r2], %r3, %p1;"),
    ("tcgen05.mma.ws", "weight-stationary", "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %d1, %d2, %r3, %p1;"),
    (
        "tcgen05.mma",
        "block-scaled kinds",
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r1], %d1, %d2, %r3, [%r4], [%r5], %p1;",
    ),
    (
        "cp.async.bulk.tensor",
        "im2col",
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r1], [%d1, {%r2, %r3, %r4}], [%r5], {%h1};",
    ),
    (
        "cp.async.bulk.tensor",
        "gather4, scatter4",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes "
        "[%r1], [%d1, {%r2, %r3, %r4, %r6, %r7}], [%r5];",
    ),
    ("tensormap.replace", "", "tensormap.replace.tile.global_address.global.b1024.b64 [%d1], %d2;"),
    (
        "tensormap.cp_fenceproxy",
        "",
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%d1], [%r1], 128;",
    ),
    ("call", "calls of device functions", "call device_function;"),
    ("alloca", "", "alloca.u32 %r1, 16;"),
    ("stacksave", "and stackrestore", "stacksave.u32 %r1;"),
    ("tex", "", "tex.1d.v4.u32.s32 {%r1, %r2, %r3, %r4}, [%d1, {%r5}];"),
    ("txq", "", "txq.width.b32 %r1, [%d1];"),
    ("suld", "and all surface instructions", "suld.b.1d.b32.trap {%r1}, [%d1, {%r2}];"),
    ("istypep", "", "istypep.texref %p1, %d1;"),
)
"""(Instruction, form, an example that is refused) of what PTX has and the virtual GPU has not."""


def key_of(opcode: str) -> str:
    """The key with most modifiers that an opcode has, whether it ends a block or not; the empty string where there is none."""
    key, _ = max((form_key(opcode, forms) for forms in (FORMS, ENDINGS)), key=lambda found: (bool(found[0]), found[1]))
    return key


def instruction_page() -> str:
    """A page with one row for each group of instructions that share an emitter, and one for each that is not supported."""
    groups: dict[tuple[int, str, str], dict[str, str]] = {}
    for key, form in (*FORMS.items(), *ENDINGS.items()):
        groups.setdefault((id(form.emit), form.section, form.forms), {})[key] = form.name
    rows = []
    for (_, section, forms), names in groups.items():
        listed = ", ".join(f"`{name}`" for name in names.values())
        by = "unit test" if COMPILED.isdisjoint(names) else "compiled kernel"
        by = by if WITNESSED.isdisjoint(names) else "witness"
        rows.append(f"| {listed} | {forms.replace('|', '&#124;')} | {section} | {by} |")
    rows += [f"| `{name}` | {form} | | not supported |" for name, form, _ in UNSUPPORTED]
    return "\n".join(
        [
            "# Instructions of the virtual GPU",
            "",
            "Made from the code (`python docs/build.py`). What is not here, or not supported, stops the kernel with an error that",
            "names it. Sections are those of the PTX ISA, version 8.8. The last column says what executes an instruction of the row",
            "in the tests: a kernel that others wrote and ran on GPUs (*witness*: flash-attn-4), a kernel of this project that a",
            "compiler made, or the unit tests alone, which every instruction has.",
            "",
            "| instruction | forms | section | executed by |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )
