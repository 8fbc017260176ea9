"""The instruction table of the documentation, made from what is registered."""

from __future__ import annotations

from fa4.vgpu.isa import ENDINGS, FORMS

_KEYS = (
    "add:float add:half add:int and bar barrier.cluster bra cp cp.async.bulk.commit_group cp.async.bulk.tensor "
    "cp.async.bulk.wait_group cp.reduce.async.bulk.tensor cvt cvta elect ex2:float fence ld ldmatrix lg2 mad:int mapa "
    "max:float max:int mbarrier.arrive mbarrier.init mbarrier.try_wait min:int mma mov mul:float mul:int neg:int not or "
    "rcp:float ret selp setp shfl shl shr st sub:float sub:int tcgen05.alloc tcgen05.commit tcgen05.dealloc tcgen05.ld "
    "tcgen05.mma tcgen05.relinquish_alloc_permit tcgen05.st tcgen05.wait::ld tcgen05.wait::st vote wgmma xor"
)
WITNESSED = frozenset(_KEYS.split())
"""Keys of the instructions that kernels from a compiler execute in the tests (tests/vgpu/test_witnesses.py)."""


def instruction_page() -> str:
    """A page with one row for each group of instructions that share an emitter."""
    groups: dict[tuple[int, str, str], list[str]] = {}
    witnessed: set[tuple[int, str, str]] = set()
    for key, form in (*FORMS.items(), *ENDINGS.items()):
        group = id(form.emit), form.section, form.forms
        groups.setdefault(group, []).append(form.name)
        if key in WITNESSED:
            witnessed.add(group)
    rows = []
    for group, names in groups.items():
        _, section, forms = group
        listed = ", ".join(f"`{name}`" for name in names)
        by = "compiled kernel" if group in witnessed else "unit test"
        rows.append(f"| {listed} | {forms.replace('|', '&#124;')} | {section} | {by} |")
    return "\n".join(
        [
            "# Instructions of the virtual GPU",
            "",
            "Made from the code (`python docs/build.py`). What is not here stops the kernel with an error that names it. Sections are",
            "those of the PTX ISA, version 8.8. The last column says whether the tests execute an instruction of the row in a kernel that",
            "a compiler made, beside the unit tests that every instruction has.",
            "",
            "| instruction | forms | section | executed by |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )
