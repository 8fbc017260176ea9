"""What a launch did, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Report:
    """Counts of one launch, or of all launches of a machine.

    ``instructions`` are warp instructions. ``by_opcode`` has full opcodes, ``by_class`` their first words, ``by_warp`` the warps of a CTA
    summed over CTAs, ``by_source`` source lines ("" without a line table). ``bytes`` are what lanes asked for, by memory space.
    ``seconds`` is the time of the host.
    """

    instructions: int
    by_opcode: dict[str, int]
    by_class: dict[str, int]
    by_warp: tuple[int, ...]
    by_source: dict[str, int]
    bytes: dict[str, int]
    ctas: int
    steps: int
    seconds: float


class Observer(Protocol):
    """Told what happens, in program order for each warp."""

    def block(self, cta: int, warp: int, block: int, lanes: int) -> None:
        """A warp begins a basic block with so many lanes."""

    def event(self, cta: int, warp: int, kind: str, fields: dict[str, Any]) -> None:
        """A warp executes an instruction that synchronises."""
