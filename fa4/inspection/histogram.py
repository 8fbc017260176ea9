"""Instructions counted by class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fa4.inspection.classes import CLASSES


@dataclass(frozen=True)
class Histogram:
    """How many instructions of each class (``fa4.inspection.classes.CLASSES``); classes without any are left out.

    ``other`` names the instructions that no class knows, and how many there are of each.
    """

    counts: Mapping[str, int]
    other: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All instructions."""
        return sum(self.counts.values())

    def __getitem__(self, kind: str) -> int:
        """Instructions of a class, 0 where there are none.

        Raises:
            KeyError: not a class.
        """
        if kind not in CLASSES:
            raise KeyError(f"{kind!r} is not one of {', '.join(CLASSES)}")
        return self.counts.get(kind, 0)


def count(opcodes: Iterable[str], classify: Callable[[str], str]) -> Histogram:
    """The histogram of instructions, given by opcode."""
    by_opcode = Counter(opcodes)
    by_class: Counter[str] = Counter()
    for opcode, number in by_opcode.items():
        by_class[classify(opcode)] += number
    other = {opcode: by_opcode[opcode] for opcode in sorted(by_opcode) if classify(opcode) == "other"}
    return Histogram({kind: by_class[kind] for kind in CLASSES if by_class[kind]}, other)
