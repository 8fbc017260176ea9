"""Make the generated files of the documentation: `python docs/build.py`, or with `--check` only compare.

A generated file has an entry in DOCUMENTS: its path under docs/, and the function that returns its text. Figures are SVG without
dates or random names, so that the same matplotlib draws the same bytes; another version may differ in details.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent

COLOURS = {"standard": "#444444", "FlashAttention-1": "#d55e00", "FlashAttention-2": "#0072b2"}
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fa4",  # names of clip paths and markers come from this instead of a random number
    "svg.fonttype": "none",  # text stays text: small, searchable, and not tied to one font file
    "figure.facecolor": "white",  # not transparent: legible in dark viewers too
    "axes.facecolor": "white",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "axes.titlesize": 10,
    "legend.fontsize": 8,
}


def new_figure(columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """Return a figure of ``size`` inches and its ``columns`` axes, side by side, without touching any display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(1, columns)


def svg(draw: Callable[[], Any]) -> str:
    """Return what ``draw`` returns, a figure, as the text of an SVG file."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        buffer = io.StringIO()
        draw().savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def steady(value: float) -> float:
    """Round to 4 digits, so that the last bits of a sum, which differ between machines, do not move a point."""
    return float(f"{value:.3e}")


def memory_traffic() -> Any:
    """Draw traffic and the largest intermediate by sequence length: lines are formulas, points are counts."""
    from fa4.reference import flash1_operand_traffic, flash2_operand_traffic, standard_intermediate_traffic, standard_operand_traffic
    from fa4.reference.experiments import TILES, traffic

    d = 128
    formulas: dict[str, Callable[[int], int]] = {
        "standard": lambda n: standard_operand_traffic(n, d) + standard_intermediate_traffic(n),
        "FlashAttention-1": lambda n: flash1_operand_traffic(n, d, TILES.columns),
        "FlashAttention-2": lambda n: flash2_operand_traffic(n, d, TILES.rows),
    }
    labels = {
        "standard": "standard: $4Nd + 4N^2$",
        "FlashAttention-1": "FlashAttention-1: $2Nd + 3N^2d/B_c$",
        "FlashAttention-2": "FlashAttention-2: $2Nd + 2N^2d/B_r$",
    }
    lengths = [2**i for i in range(8, 17)]
    counted = {n: traffic(n, d) for n in lengths if n <= 4096}

    figure, (left, right) = new_figure(2, (10.0, 4.2))
    for name, formula in formulas.items():
        left.plot(lengths, [formula(n) for n in lengths], color=COLOURS[name], label=labels[name])
        points = [ledgers[name].operands + ledgers[name].intermediates for ledgers in counted.values()]
        left.plot(list(counted), points, "o", color=COLOURS[name], markersize=5)
    left.set(title="Device-memory traffic of one head, $d = B_r = B_c = 128$\n(lines: formulas; points: counted by the ledgers)")
    left.set(xlabel="sequence length N (tokens)", ylabel="elements read or written")

    tile = TILES.rows * TILES.columns
    right.plot(lengths, [n * n for n in lengths], color=COLOURS["standard"], label="standard: $N^2$")
    right.plot(lengths, [tile for _ in lengths], color=COLOURS["FlashAttention-2"], label="tiled: $B_r B_c$")
    for name in ("standard", "FlashAttention-2"):
        right.plot(
            list(counted), [ledgers[name].largest_intermediate for ledgers in counted.values()], "o", color=COLOURS[name], markersize=5
        )
    right.set(title="Largest piece of S that exists at one time", xlabel="sequence length N (tokens)", ylabel="elements of one head")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend()
    return figure


def error_by_variant() -> Any:
    """Draw the error of FP8 by remedy, that of emulated exp2 by share, and the rescales that a threshold skips."""
    from fa4.reference.experiments import FP8_VARIANTS, bfloat16_error, emulation_errors, fp8_errors, skipped_share

    figure, (fp8, emulation, rescales) = new_figure(3, (13.0, 4.2))
    runs = [fp8_errors(seed) for seed in range(3)]
    means = [steady(math.sqrt(sum(run[name] ** 2 for run in runs) / len(runs))) for name in FP8_VARIANTS]
    bars = fp8.bar(list(FP8_VARIANTS), means, color=["#444444", "#56b4e9", "#e69f00", "#009e73"])
    fp8.bar_label(bars, fmt="%.4f")
    fp8.margins(y=0.1)
    fp8.grid(axis="x", visible=False)
    fp8.set(
        title="FlashAttention-3, FP8: inputs with outliers", xlabel="scales and rotation", ylabel="RMS error of the output (units of V)"
    )

    shares = tuple(i / 8 for i in range(1, 9))
    for tau, marker, colour in ((0.0, "s", "#d55e00"), (8.0, "o", "#0072b2")):
        errors = [steady(error) for error in emulation_errors(shares, tau).values()]
        emulation.plot([100 * s for s in shares], errors, marker=marker, color=colour, label=f"float64 with emulated exp2, tau = {tau:g}")
    emulation.axhline(steady(bfloat16_error()), color="#444444", linestyle="--", label="exact output rounded to bfloat16")
    emulation.set_yscale("log")
    emulation.set_ylim(1e-5, 1e-2)
    emulation.legend()
    emulation.set(
        title="FlashAttention-4: emulated exp2",
        xlabel="share of a row's exponentials emulated (%)",
        ylabel="relative RMS error of the output",
    )

    thresholds = [0.5 * i for i in range(1, 25)]
    for deviation, colour in ((1.0, "#0072b2"), (3.0, "#009e73"), (6.0, "#d55e00")):
        skipped = [steady(100 * skipped_share(tau, deviation)) for tau in thresholds]
        rescales.plot(thresholds, skipped, color=colour, label=f"scores with standard deviation {deviation:g}")
    rescales.axvline(8.0, color="#444444", linestyle="--", label="tau = 8")
    rescales.legend(loc="lower right")
    rescales.set(
        title="FlashAttention-4: rescales skipped", xlabel="threshold tau (log2 units)", ylabel="rescales skipped (%)", ylim=(0, 102)
    )
    return figure


def support_table() -> str:
    """Return the page of what works where."""
    from fa4.support_table import support_page

    return support_page()


def architectures() -> str:
    """Return the page of compile targets and their figures."""
    from docs._architectures import architectures_page

    return architectures_page()


def virtual_gpu_instructions() -> str:
    """Return the page of instructions that the virtual GPU executes."""
    from fa4.vgpu.isa.table import instruction_page

    return instruction_page()


def exp2_figure(name: str) -> str:
    """Return a figure of the page on exp2."""
    from docs import _exp2

    return svg(lambda: getattr(_exp2, name)(new_figure))


def schedule_chart(name: str) -> str:
    """Return a chart of the page on schedules."""
    from docs import _schedules

    return str(getattr(_schedules, name)())


def blackwell_timeline() -> str:
    """Return the picture of who does what in the Blackwell forward; compiles the kernel and runs it on the virtual GPU."""
    from docs import _timeline

    return str(_timeline.blackwell_forward())


DOCUMENTS: dict[str, Callable[[], str]] = {
    "support.md": support_table,
    "architectures.md": architectures,
    "virtual-gpu-instructions.md": virtual_gpu_instructions,
    "images/memory-traffic.svg": lambda: svg(memory_traffic),
    "images/error-by-variant.svg": lambda: svg(error_by_variant),
    "images/exp2-error.svg": lambda: exp2_figure("error_by_degree"),
    "images/exp2-cycles.svg": lambda: exp2_figure("cycles_by_share"),
    "images/schedule-causal.svg": lambda: schedule_chart("causal"),
    "images/schedule-deterministic.svg": lambda: schedule_chart("deterministic"),
    "images/blackwell-timeline.svg": blackwell_timeline,
}


def build(documents: dict[str, Callable[[], str]], folder: Path, check: bool) -> list[str]:
    """Write each document under ``folder``, or only compare if ``check``; return the names of those that differed."""
    changed = []
    for name, make in documents.items():
        path = folder / name
        text = make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        changed.append(name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return changed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status, 1 if ``--check`` found a file that differs."""
    parser = argparse.ArgumentParser(description="Make the generated files of the documentation.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to make; default all: {', '.join(DOCUMENTS)}")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs from what would be made")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(DOCUMENTS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(DOCUMENTS)}")
    chosen = {name: make for name, make in DOCUMENTS.items() if not options.names or name in options.names}
    changed = build(chosen, DOCS, options.check)
    for name in changed:
        print(f"docs/{name} {'is out of date: run python docs/build.py' if options.check else 'written'}")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is imported: tiles are too small for more threads
    sys.path.insert(0, str(DOCS.parent))  # run from a checkout that is not installed
    sys.exit(main())
