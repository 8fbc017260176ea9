"""In which order a warp issues its instructions, and what each waits for: what replay takes besides the trace and the machine.

Two ways to get there: ``fa4.perfmodel.list_schedule``, a list schedule of the PTX, and ``fa4.perfmodel.machine_schedule``, the order that
ptxas chose with the stall counts and scoreboards that it wrote into the code. Neither has a number of a machine in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fa4.perfmodel.trace import Event

PIPES = ("none", "fma", "fma2", "alu", "mufu", "convert", "uniform", "lsu", "tmem load", "tmem store", "mma", "other")
"""Where an instruction is issued to. ``none``: it is no instruction of the machine, and only has an event."""


SILENT = frozenset(("tld", "tst", "twait", "fence", "regs", "wg_fence"))
"""Events that only say where a warp is: all that they ask of the machine is in their step."""


class Step(NamedTuple):
    """One instruction, as often as it is executed.

    ``stall`` clocks after it the warp may issue its next one. ``waits`` are numbers of scoreboards or registers that must be done before,
    ``sets`` those done when the result is there (``latency`` names it), ``frees`` those done when its operands are read. ``work`` counts
    what it takes of its pipe beyond one instruction: registers of a copy of tensor memory, FLOP of an mma. ``events``: how many events of
    the warp's stream it executes. ``spill``: it moves a register to or from the stack. ``taken``: it jumps.
    """

    pipe: str
    stall: int = 1
    waits: tuple[int, ...] = ()
    sets: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    latency: str = ""
    work: int = 1
    events: int = 0
    spill: bool = False
    taken: bool = False
    place: str = ""
    text: str = ""


@dataclass(frozen=True)
class WarpSchedule:
    """``steps`` are positions in the table of the schedule, ``events`` what those of them consume, in order."""

    steps: tuple[int, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Schedule:
    """What every warp of a trace executes, by (CTA, warp).

    ``slots`` is how many scoreboards or registers there are. ``unaligned`` are warps whose order is that of the PTX though this is a
    schedule of SASS, each with the reason. ``spills`` counts local loads and stores that a warp executes, the most of any.
    """

    kind: str
    table: tuple[Step, ...]
    warps: dict[tuple[int, int], WarpSchedule]
    slots: int
    unaligned: dict[tuple[int, int], str] = field(default_factory=dict)

    def flop(self, cta: int, warp: int) -> float:
        """FLOP of the products that a warp computes itself (mma.sync)."""
        return float(sum(self.table[s].work for s in self.warps[cta, warp].steps if self.table[s].pipe == "mma"))

    @property
    def spills(self) -> int:
        """Local loads and stores of the warp that has most."""
        spilling = {i for i, step in enumerate(self.table) if step.spill}
        return max((sum(s in spilling for s in warp.steps) for warp in self.warps.values()), default=0) if spilling else 0
