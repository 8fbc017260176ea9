"""The instruction table of the documentation, made from what is registered."""

from __future__ import annotations

from fa4.vgpu.isa import ENDINGS, FORMS


def instruction_page() -> str:
    """A page with one row for each group of instructions that share an emitter."""
    groups: dict[tuple[int, str, str], list[str]] = {}
    for form in (*FORMS.values(), *ENDINGS.values()):
        groups.setdefault((id(form.emit), form.section, form.forms), []).append(form.name)
    rows = []
    for (_, section, forms), names in groups.items():
        listed = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| {listed} | {forms.replace('|', '&#124;')} | {section} |")
    return "\n".join(
        [
            "# Instructions of the virtual GPU",
            "",
            "Made from the code (`python docs/build.py`). What is not here stops the kernel with an error that names it. Sections are",
            "those of the PTX ISA, version 8.8.",
            "",
            "| instruction | forms | section |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
    )
