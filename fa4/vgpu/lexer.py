"""PTX text to tokens (PTX ISA 4.1 to 4.4)."""

from __future__ import annotations

import re
from typing import NamedTuple

from fa4.vgpu.errors import PtxSyntaxError

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\f]+)
  | (?P<newline>\n)
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<string>"[^"\n]*")
  | (?P<number>0[fF][0-9a-fA-F]{8}\b | 0[dD][0-9a-fA-F]{16}\b | 0[xX][0-9a-fA-F]+U?\b | 0[bB][01]+U?\b
      | \d+\.\d*(?:[eE][+-]?\d+)? | \d+[eE][+-]?\d+ | \d+U?\b)
  | (?P<directive>\.[A-Za-z_]\w*(?:::\w+)*)
  | (?P<word>[A-Za-z_$%][\w$]*(?:(?:\.|::)\w+)*)
  | (?P<mark>[{}()\[\];,:@!+\-|<>=~])
    """,
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """``kind`` is string, number, directive, word or mark; ``line`` counts from 1."""

    kind: str
    text: str
    line: int


def tokenize(text: str) -> list[Token]:
    """Tokens without white space and comments.

    An opcode with its modifiers (``ld.global.L2::128B.v2.b32``) and a special register (``%tid.x``) are one word each.

    Raises:
        PtxSyntaxError: a character that begins no token.
    """
    text = text.rstrip("\0")  # dumps of the DSL may end in NUL bytes
    tokens = []
    line, position = 1, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise PtxSyntaxError(f"PTX line {line}: unexpected {text[position : position + 20]!r}")
        kind, word = str(match.lastgroup), match[0]
        if kind not in ("space", "newline", "comment"):
            tokens.append(Token(kind, word, line))
        line += word.count("\n")
        position = match.end()
    return tokens


def integer(text: str) -> int:
    """Value of an integer literal: decimal, hexadecimal, octal or binary, with or without U (PTX ISA 4.5.1)."""
    text = text.rstrip("U")
    if text[:2].lower() in ("0x", "0b"):
        return int(text, 0)
    return int(text, 8) if len(text) > 1 and text[0] == "0" else int(text)


def is_float(text: str) -> bool:
    """Whether a number literal is a floating-point one (PTX ISA 4.5.2)."""
    return text[:2].lower() in ("0f", "0d") or (text[:2].lower() != "0x" and any(c in text for c in ".eE"))
