"""Colour for code on a terminal."""

from __future__ import annotations

import re
from typing import TextIO

from fa4._settings import no_colour

_RESET = "\x1b[0m"
# The first pattern that a line has decides: comments and source lines, spills, tensor-core products.
_STYLES = (
    (re.compile(r"^\s*//"), "\x1b[2m"),
    (re.compile(r"\b(STL|LDL)\b|^local\b"), "\x1b[31m"),
    (re.compile(r"\b[A-Z]*MMA\b|^\s*(wgmma\.|tcgen05\.)?mma\b"), "\x1b[32m"),
)


def highlight(text: str, stream: TextIO) -> str:
    """``text`` with spills, products and comments in colour, where ``stream`` is a terminal and NO_COLOR is not set."""
    if not stream.isatty() or no_colour():
        return text
    return "\n".join(map(_highlight_line, text.split("\n")))


def _highlight_line(line: str) -> str:
    style = next((style for pattern, style in _STYLES if pattern.search(line)), None)
    return line if style is None else f"{style}{line}{_RESET}"
