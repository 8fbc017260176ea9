"""Loops over key tiles in a kernel's PTX."""

from __future__ import annotations

import re


def loops(ptx, *opcodes):
    """Bodies, in the order of the text, of the innermost loops that have an instruction which begins with one of ``opcodes``.

    A body is the lines from a label back to it. Loops of inline assembly, which wait, have labels of another kind.
    """
    lines = ptx.splitlines()
    wanted = re.compile(rf"(?:^|[\s;])(?:{'|'.join(map(re.escape, opcodes))})")
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\$L\w+):", line))}
    found = []
    for i, line in enumerate(lines):
        branch = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", line)
        begin = labels[branch[1]] if branch else i + 1
        if begin < i and any(wanted.search(text) for text in lines[begin : i + 1]):
            found.append((begin, i + 1))
    inner = [(a, b) for a, b in found if not any((a, b) != (c, d) and a <= c and d <= b for c, d in found)]
    return [lines[begin:end] for begin, end in sorted(inner)]
