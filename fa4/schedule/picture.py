"""A Gantt chart of schedules as SVG: time to the right, one line per SM, one colour per head and sequence, waiting in grey."""

from __future__ import annotations

from collections.abc import Mapping

from fa4.schedule.simulation import Simulation

# Okabe and Ito's colours, each in two shades.
COLOURS = [
    *("#0072b2", "#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7"),
    *("#004b76", "#8f3f00", "#006b4e", "#9c6b00", "#2f7fae", "#8f4673"),
]
WAITING = "#bbbbbb"

_WIDTH, _HEIGHT = 900, 240  # of one chart, in pixels
_LEFT, _TOP, _GAP = 50, 34, 30


def gantt(simulations: Mapping[str, Simulation]) -> str:
    """One chart for each simulation, by title, on one time scale; the dashed line is the time below which no order can come."""
    longest = max((simulation.makespan for simulation in simulations.values()), default=0.0) or 1.0
    scale = _WIDTH / longest
    height = len(simulations) * (_TOP + _HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (title, simulation) in enumerate(simulations.items()):
        parts += [
            f'<g transform="translate({_LEFT} {number * (_TOP + _HEIGHT + _GAP) + _TOP})">',
            *_chart(title, simulation, scale),
            "</g>",
        ]
    return "\n".join([*parts, "</svg>\n"])


def _chart(title: str, simulation: Simulation, scale: float) -> list[str]:
    line = _HEIGHT / simulation.sms
    heads = 1 + max((span.tile.head for span in simulation.spans), default=0)
    paths: dict[str, list[str]] = {}
    for span in simulation.spans:
        colour = COLOURS[(span.tile.batch * heads + span.tile.head) % len(COLOURS)]
        left, right = scale * span.start, scale * span.end
        middle = right - scale * span.waiting  # where in a tile it waits is not shown, only how long
        for stroke, begin, end in ((colour, left, middle), (WAITING, middle, right)):
            width = end - begin - (0.3 if end - begin > 2 else 0.0)  # so that neighbours of one colour can be told apart
            if width > 0.05:
                paths.setdefault(stroke, []).append(f"M{begin:.1f} {(span.sm + 0.5) * line:.1f}h{width:.1f}")
    bound = scale * simulation.lower_bound
    below = _HEIGHT + 16
    return [
        f'<text y="-10">{title}: {simulation.makespan:g} steps, {100 * simulation.balance:.1f}% busy</text>',
        f'<g stroke-width="{line:.2f}">',
        *(f'<path stroke="{stroke}" d="{"".join(lines)}"/>' for stroke, lines in paths.items()),
        "</g>",
        f'<path d="M{bound:.4g} 0v{_HEIGHT}" stroke="black" stroke-dasharray="4 3"/>',
        f'<path d="M0 0v{_HEIGHT}h{_WIDTH}" stroke="black" fill="none"/>',
        f'<text x="-8" y="10" text-anchor="end">SM 0</text><text x="-8" y="{_HEIGHT}" text-anchor="end">{simulation.sms - 1}</text>',
        f'<text y="{below}">0</text><text x="{bound:.4g}" y="{below}" text-anchor="end">{simulation.lower_bound:.4g} steps</text>',
    ]
