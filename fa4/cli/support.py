"""``fa4 support``: what each architecture serves."""

from __future__ import annotations

import argparse
from typing import Any


def add_command(commands: Any) -> None:
    """Add ``fa4 support``."""
    parser = commands.add_parser("support", help="show what works on which backend and architecture")
    parser.set_defaults(run=run)


def run(_arguments: argparse.Namespace) -> int:
    """Print the support table."""
    from fa4._table import format_table
    from fa4.support_table import support_table

    header, rows = support_table()
    print(format_table(header, rows))
    return 0
