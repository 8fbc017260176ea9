"""The ``fa4`` command. ``fa4 --help`` and ``fa4 demo`` need core dependencies only."""

# PYTHON_ARGCOMPLETE_OK
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import fa4
from fa4.errors import Fa4Error


def build_parser() -> argparse.ArgumentParser:
    """The parser of every subcommand; each sets ``run``, a function of the parsed arguments that returns an exit status."""
    from fa4.cli import cache, compile, demo, doctor, inspect, model, schedule, support, verify, vgpu

    parser = argparse.ArgumentParser(prog="fa4", description="FlashAttention-4 as a Python CuTe-DSL kernel framework.")
    parser.add_argument("--version", action="version", version=f"fa4 {fa4.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (demo, verify, vgpu, support, inspect, model, schedule, compile, cache, doctor):
        module.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an ``Fa4Error`` becomes one line on stderr and exit status 2."""
    parser = build_parser()
    try:  # tab completion, with the cli extra
        import argcomplete
    except ImportError:
        pass
    else:
        argcomplete.autocomplete(parser)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except Fa4Error as error:
        print(f"fa4: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        sys.stderr.close()
        return 1
    return status
