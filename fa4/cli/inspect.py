"""``fa4 inspect``: what a request is compiled to."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fa4.errors import ArgumentError

if TYPE_CHECKING:
    from fa4.inspection.report import Report

_SECTIONS = {
    "ptx": "PTX",
    "sass": "SASS (needs nvdisasm, the inspect extra)",
    "annotated": "SASS with the Python line above the instructions it became",
    "resources": "registers, spills, shared memory, blocks per SM",
    "histogram": "instructions by class and by loop",
    "source": "instructions per Python line",
}


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return text.lower() == "true"


def window(text: str) -> tuple[int | None, int | None]:
    """``L,R``; an empty side, or "none", is open."""
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not LEFT,RIGHT; for example 128,0 or 128,none")
    try:
        left, right = (None if part.strip().lower() in ("", "none") else int(part) for part in parts)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not two integers; for example 128,0 or 128,none") from None
    return left, right


# The options of a request: argument of fa4.inspect -> how its text is read.
_REQUEST: dict[str, Callable[[str], Any]] = {
    "arch": str,
    "head_dim": int,
    "head_dim_v": int,
    "dtype": str,
    "direction": str,
    "causal": _flag,
    "deterministic": _flag,
    "window": window,
    "softcap": float,
}


def add_command(commands: Any) -> None:
    """Add ``fa4 inspect``."""
    parser = commands.add_parser("inspect", help="show what a request is compiled to: PTX, SASS, resources, instruction counts")
    parser.add_argument("--arch", required=True, help="architecture, for example sm_80")
    parser.add_argument("--head-dim", required=True, type=int, metavar="D", help="head dim of q and k")
    parser.add_argument("--head-dim-v", type=int, metavar="DV", help="head dim of v (default: as q)")
    parser.add_argument("--dtype", default="bfloat16", help="element type (default: %(default)s)")
    parser.add_argument("--direction", default="forward", help="forward, backward, preprocess or postprocess (default: %(default)s)")
    parser.add_argument("--causal", action="store_true", help="causal mask")
    parser.add_argument("--deterministic", action="store_true", help="the deterministic kernel")
    parser.add_argument("--window", type=window, default=(None, None), metavar="L,R", help="sliding window; only which sides exist matters")
    parser.add_argument("--softcap", type=float, nargs="?", const=1.0, default=0.0, metavar="C", help="softcap; only its presence matters")
    section = parser.add_mutually_exclusive_group()
    for name, text in _SECTIONS.items():
        section.add_argument(f"--{name}", dest="section", action="store_const", const=name, help=f"show only: {text}")
    section.add_argument("--diff", metavar="OTHER", help="compare with another request: options that differ, as in head_dim=64,causal=true")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report, one section of it, or a comparison."""
    from fa4.cli.colour import highlight

    request = {name: getattr(arguments, name) for name in _REQUEST}
    other = None if arguments.diff is None else request | parse_changes(arguments.diff)
    report = _inspect(request)
    if other is not None:
        comparison = report.compare(_inspect(other))
        print(json.dumps(comparison.to_dict()) if arguments.json else comparison)
    elif arguments.json:
        print(json.dumps(_data(report, arguments.section)))
    else:
        print(highlight(_text(report, arguments.section), sys.stdout).rstrip("\n"))
    return 0


def parse_changes(text: str) -> dict[str, Any]:
    """``name=value,name=value`` as options of a request; a part without ``=`` belongs to the value before it (``window=64,0``).

    Raises:
        ArgumentError: not of this form, an unknown option, or a value that it cannot have.
    """
    pairs: list[list[str]] = []
    for part in text.split(","):
        if "=" in part:
            pairs.append([word.strip() for word in part.split("=", 1)])
        elif pairs:
            pairs[-1][1] += f",{part}"
        else:
            raise ArgumentError("--diff", text, f"{part!r} has no '='", "write option=value, for example head_dim=64,causal=true")
    changes = {}
    for option, value in pairs:
        name = option.removeprefix("--").replace("-", "_")
        if name not in _REQUEST:
            raise ArgumentError("--diff", text, f"{option!r} is not an option", f"options are {', '.join(_REQUEST)}")
        try:
            changes[name] = _REQUEST[name](value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ArgumentError("--diff", text, f"{option}: {error}", "for example head_dim=64,causal=true,window=128,0") from None
    return changes


def _inspect(request: dict[str, Any]) -> Report:
    from fa4.inspection.report import inspect

    return inspect(**{"window_size" if name == "window" else name: value for name, value in request.items()})


def _text(report: Report, section: str | None) -> str:
    from fa4.inspection import text

    if section is None:
        return str(report)
    if section == "resources":
        return text.resource_table(report.resources)
    if section == "histogram":
        return text.histogram_table(report.code, report.ptx_histogram)
    if section == "source":
        return text.source_table(report.source_lines, report.main_loop)
    return str(getattr(report, section))


def _data(report: Report, section: str | None) -> dict[str, Any]:
    everything = report.to_dict()
    if section is None:
        return everything
    if section in ("ptx", "resources"):
        return {section: everything[section]}
    if section == "histogram":
        code = everything["code"] or {}
        return {"sass": code.get("histogram"), "loops": code.get("loops"), "ptx": everything["ptx_histogram"]}
    if section == "source":
        return {"source_lines": [vars(row) for row in report.source_lines]}
    return {section: getattr(report, section)}
