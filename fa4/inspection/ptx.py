"""Instructions in PTX text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fa4.inspection.classes import ptx_class
from fa4.inspection.histogram import Histogram, count

_COMMENT = re.compile(r"//.*|/\*.*?\*/")
_LINE_DIRECTIVE = re.compile(r"^\s*\.(?:loc|file|version|target|address_size|maxn\w+|minn\w+|reqn\w+)\b.*$", re.MULTILINE)
_PREFIX = re.compile(r"^(?:[{}\s]|[\w$%]+:(?!:))+")
_INSTRUCTION = re.compile(r"^(?:@!?[\w%$]+\s+)?([a-z]\w*(?:\.[\w:]+)*)")


def opcodes(ptx: str) -> Iterator[str]:
    """The opcode of each instruction, inline assembly included (PTX ISA, Syntax: statements end in ``;``)."""
    code = _LINE_DIRECTIVE.sub("", _COMMENT.sub("", ptx))
    for statement in code.split(";"):
        match = _INSTRUCTION.match(_PREFIX.sub("", statement))
        if match:  # else a directive, which begins with a dot
            yield match[1]


def histogram(ptx: str) -> Histogram:
    """Instructions by class, all of the module's functions together."""
    return count(opcodes(ptx), ptx_class)
