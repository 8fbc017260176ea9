"""``python -m fa4.emulate_exp``: derive the coefficients again, or measure their error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fa4.emulate_exp.coefficients import COEFFICIENTS, CONTINUOUS
from fa4.errors import Fa4Error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status, 1 where derived coefficients differ from those in use."""
    parser = argparse.ArgumentParser(prog="python -m fa4.emulate_exp", description="exp2 on the multiply-add units.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--report", action="store_true", help="measure the error over every float32 number (minutes)")
    what.add_argument("--derive", action="store_true", help="find the coefficients again and compare (minutes)")
    parser.add_argument("--stride", type=int, default=1, help="measure one number in so many (default: all)")
    parser.add_argument("--degree", type=int, choices=sorted(COEFFICIENTS), action="append", help="derive this degree only")
    options = parser.parse_args(arguments)
    if options.stride < 1:
        parser.error(f"--stride {options.stride}: must be at least 1")
    if options.derive:
        return derive(options.degree or sorted(COEFFICIENTS))
    from fa4.emulate_exp.report import report

    try:
        print(report(options.stride))
    except Fa4Error as error:
        print(f"fa4: {error}", file=sys.stderr)
        return 2
    return 0


def derive(degrees: Sequence[int]) -> int:
    """Print the coefficients found, and whether they are those in use."""
    from fa4.emulate_exp.derive import derive, derive_continuous

    status = 0
    for degree in degrees:
        status |= _compare(f"degree {degree}", derive(degree), COEFFICIENTS[degree])
        if degree in CONTINUOUS:
            status |= _compare(f"degree {degree}, continuous", derive_continuous(), CONTINUOUS[degree])
    return status


def _compare(name: str, found: tuple[float, ...], used: tuple[float, ...]) -> bool:
    """Print one line of ``derive``; whether they differ."""
    verdict = "as in use" if found == used else f"IN USE: {used}"
    print(f"{name}: {', '.join(map(repr, found))}\n  {verdict}", flush=True)
    return found != used


if __name__ == "__main__":
    sys.exit(main())
