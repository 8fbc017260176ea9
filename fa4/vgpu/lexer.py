"""PTX text to tokens (PTX ISA 4.1 to 4.4)."""

from __future__ import annotations

import re
from typing import NamedTuple

from fa4.vgpu.errors import PtxSyntaxError

_TOKEN = re.compile(
    r"""
    [ \t\r\f]*
    (?:
      (?P<word>[A-Za-z_$%][\w$]*(?:(?:\.|::)\w+)*)
    | (?P<mark>[{}()\[\];,:@!+\-|<>=~])
    | (?P<newline>\n)
    | (?P<number>0[fF][0-9a-fA-F]{8}\b | 0[dD][0-9a-fA-F]{16}\b | 0[xX][0-9a-fA-F]+U?\b | 0[bB][01]+U?\b
      | \d+\.\d*(?:[eE][+-]?\d+)? | \d+[eE][+-]?\d+ | \d+U?\b)
    | (?P<directive>\.[A-Za-z_]\w*(?:::\w+)*)
    | (?P<comment>//[^\n]*|/\*.*?\*/)
    | (?P<string>"[^"\n]*")
    | (?P<end>\Z)
    | (?P<unknown>.)
    )
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
    line = 1
    for match in _TOKEN.finditer(text):
        kind, place = match.lastgroup, match.lastindex
        assert kind is not None
        assert place is not None
        if kind == "newline":
            line += 1
        elif kind == "comment":
            line += match[place].count("\n")
        elif kind == "unknown":
            raise PtxSyntaxError(f"PTX line {line}: unexpected {text[match.start(place) : match.start(place) + 20]!r}")
        elif kind != "end":
            tokens.append(Token(kind, match[place], line))
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
