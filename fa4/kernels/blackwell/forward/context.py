"""What the kernel hands to its roles, and positions in the ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4.config import BlackwellForwardConfig
from fa4.kernels.blackwell.forward.pipelines import Barriers
from fa4.kernels.blackwell.forward.storage import Shared
from fa4.kernels.common.mask import Band, KeyTiles
from fa4.kernels.common.score import ScoreScalars


class Slot(NamedTuple):
    """A place in the ring, and the parity of the phase in which it is used."""

    index: Int32
    phase: Int32


@cute.jit
def following(slot: Slot, stages: cutlass.Constexpr[int]) -> Slot:
    """The next slot; the parity flips where the ring starts again."""
    wraps = slot.index + 1 == stages
    return Slot(Int32(0) if wraps else slot.index + 1, slot.phase ^ 1 if wraps else slot.phase)


@dataclass(frozen=True)
class Work:
    """The query tiles of this CTA: ``first_row`` of (head, batch), and the key tiles that they visit, last one first."""

    first_row: Int32
    head: Int32
    head_kv: Int32
    batch: Int32
    band: Band
    tiles: KeyTiles

    @property
    def count(self) -> Int32:
        """Key tiles."""
        return self.tiles.end - self.tiles.begin


@dataclass(frozen=True)
class Context:
    """Everything a role needs. ``tmem`` is the address of the first column."""

    config: BlackwellForwardConfig
    head_dims: tuple[int, int]
    dtype: Any
    shared: Shared
    tmem: Int32
    work: Work
    scalars: ScoreScalars

    @property
    def barriers(self) -> Barriers:
        """The barriers."""
        return self.shared.barriers
