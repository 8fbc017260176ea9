"""User functions on scores inside a kernel: applied in registers, one score at a time, with indices of the whole tensors.

A kernel that has some visits the same key tiles as without: what ``mask_mod`` hides is -inf in every tile, and a row that it hides
altogether ends like one outside of the band. Aux tensors are read from device memory, wherever the functions index them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.runtime import make_fake_tensor

from fa4.kernels.common.fragments import by_row
from fa4.kernels.common.opaque import opaque, thread_index
from fa4.kernels.common.score import ScoreScalars
from fa4.problem import AttentionProblem

_DTYPES = {
    "float32": cutlass.Float32,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}

TOGETHER = 16
"""Scores that ``Modifiers.seen`` asks about at a time."""

Place = tuple[Int32, Int32, Int32, Int32]
"""What the functions are told of a score: batch, query head, query, key."""
ALONG_QUERIES, ALONG_KEYS = 0, 1
"""Along what the scores lie that a thread holds: places of ``Modifiers.seqlens``, and of a ``Place`` behind batch and head."""


@dataclass(frozen=True)
class Modifiers:
    """The functions, None where there is none; their tensors; ``factor`` turns what S holds into a score in natural units.

    ``gradient`` carries a gradient back through ``score``; only a backward kernel has it.
    """

    score: Any
    gradient: Any
    mask: Any
    score_aux: tuple[cute.Tensor, ...]
    mask_aux: tuple[cute.Tensor, ...]
    factor: Float32 | None
    seqlens: tuple[Int32, Int32]

    @property
    def present(self) -> bool:
        """Whether there are any."""
        return self.score is not None or self.mask is not None

    @cute.jit
    def existing(self, index: Int32, along: cutlass.Constexpr[int], masked: cutlass.Constexpr[bool]) -> Int32:
        """What the functions are told: what lies beyond the sequence, as only a ``masked`` tile has it, takes the index of the last one.

        Such scores do not matter, but the functions read tensors with it.
        """
        return min(index, self.seqlens[along] - 1) if const_expr(masked) else index

    @cute.jit
    def moved(self, first: Place, by: Int32, along: cutlass.Constexpr[int], masked: cutlass.Constexpr[bool]) -> Place:
        """The place so many queries or keys behind ``first``."""
        batch, head, query, key = first
        if const_expr(along == ALONG_QUERIES):
            query = self.existing(query + by, along, masked)
        else:
            key = self.existing(key + by, along, masked)
        return batch, head, query, key

    @cute.jit
    def change(
        self,
        S: cute.Tensor,
        first: Place,
        along: cutlass.Constexpr[int],
        masked: cutlass.Constexpr[bool],
        slope: Any = None,
    ) -> None:
        """Let ``score`` change neighbouring scores, and ``gradient`` the slopes of what comes before it, where these are given.

        Both at once for each score: what is computed for the one is there for the other, and no score is kept.
        """
        for i in cutlass.range_constexpr(cute.size(S)):
            place = self.moved(first, Int32(i), along, masked)
            if const_expr(slope is not None):
                slope[i] = Float32(self.gradient(slope[i], S[i] * self.factor, *place, *self.score_aux))
            S[i] = self.changed(S[i], place)

    @cute.jit
    def seen(self, first: Place, along: cutlass.Constexpr[int], masked: cutlass.Constexpr[bool]) -> Int32:
        """What ``mask`` says of 32 neighbouring scores, a bit for each.

        It needs no scores, so that it is asked before they take registers; in a loop, whose trips each have their own addresses.
        """
        word = Int32(0)
        for trip in cutlass.range(32 // TOGETHER, unroll=1):  # the last ones first
            begin, bits = self.moved(self.moved(first, Int32(32 - TOGETHER), along, False), -trip * TOGETHER, along, False), Int32(0)
            for i in cutlass.range_constexpr(TOGETHER):
                visible = Boolean(self.mask(*self.moved(begin, Int32(i), along, masked), *self.mask_aux))
                bits = bits | (Int32(1 << i) if visible else Int32(0))
            word = word << TOGETHER | bits
        return opaque(word)

    @cute.jit
    def apply_tile(
        self,
        acc_S: cute.Tensor,
        tiled_mma: cute.TiledMma,
        tile: cutlass.Constexpr[tuple[int, int]],
        at: tuple[Int32, Int32],
        first: tuple[Int32, Int32],
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """The same for an mma.sync accumulator; ``at`` is (batch, head), ``first`` the first (row, key) of the tile.

        Rows beyond the sequence take the index of the last one.
        """
        coords = cute.make_identity_tensor(tile)
        thread_row, thread_column = tiled_mma.get_slice(thread_index()).partition_C(coords)[0]
        steps = by_row(tiled_mma.get_slice(0).partition_C(coords))
        S = by_row(acc_S)
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            row = self.existing(first[0] + thread_row + steps[r, 0][0], ALONG_QUERIES, True)
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                place = (*at, row, self.existing(first[1] + thread_column + steps[0, c][1], ALONG_KEYS, masked))
                S[r, c] = self.changed(S[r, c], place)
                if const_expr(self.mask is not None):
                    S[r, c] = S[r, c] if Boolean(self.mask(*place, *self.mask_aux)) else -Float32.inf

    @cute.jit
    def changed(self, value: Float32, place: Place) -> Float32:
        """What ``score`` makes of one score."""
        if const_expr(self.score is not None):
            return Float32(self.score(value * self.factor, *place, *self.score_aux))
        return value


def modifiers(problem: AttentionProblem, scalars: ScoreScalars, seqlens: tuple[Int32, Int32]) -> Modifiers:
    """Those of a problem with what a call gives them."""
    score, mask = problem.score_mod, problem.mask_mod
    count = len(score.aux) if score else 0
    functions = score.function if score else None, score.gradient if score else None, mask.function if mask else None
    return Modifiers(*functions, scalars.aux[:count], scalars.aux[count:], scalars.factor, seqlens)


def aux_arguments(problem: AttentionProblem) -> tuple[Any, ...]:
    """Arguments for ``cute.compile``: tensors of dynamic shapes and strides, the last one 1."""
    functions = [each for each in (problem.score_mod, problem.mask_mod) if each]
    tensors = []
    for dtype, rank in (aux for each in functions for aux in each.aux):
        shape = tuple(cute.sym_int() for _ in range(rank))
        strides = *(cute.sym_int64() for _ in range(rank - 1)), 1
        tensors.append(make_fake_tensor(_DTYPES[dtype], shape, strides, assumed_align=_DTYPES[dtype].width // 8))
    return tuple(tensors)
