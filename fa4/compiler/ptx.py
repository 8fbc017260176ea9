"""What PTX text says about where it came from: the line table, and paths made independent of this installation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FILE = re.compile(r'^(\s*\.file\s+(\d+)\s+")([^"]*)(".*)$', re.MULTILINE)
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")


@dataclass(frozen=True)
class SourceLine:
    """From line ``ptx_line`` (counted from 1) on, PTX implements ``line`` and ``column`` of ``file``."""

    ptx_line: int
    file: str
    line: int
    column: int


def line_table(ptx: str) -> tuple[SourceLine, ...]:
    """One row for each ``.loc`` directive, in order (PTX ISA 8.8, debugging directives)."""
    files = {match[2]: match[3] for match in _FILE.finditer(ptx)}
    rows = []
    for number, text in enumerate(ptx.splitlines(), start=1):
        match = _LOC.match(text)
        if match:
            rows.append(SourceLine(number, files.get(match[1], "?"), int(match[2]), int(match[3])))
    return tuple(rows)


def relative_paths(ptx: str, root: Path) -> str:
    """``.file`` names below ``root`` made relative to it, so that PTX does not depend on where the package is installed."""

    def shorten(match: re.Match[str]) -> str:
        path = Path(match[3])
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else match[3]
        return f"{match[1]}{name}{match[4]}"

    return _FILE.sub(shorten, ptx)
