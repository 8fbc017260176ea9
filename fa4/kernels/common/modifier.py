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
from fa4.kernels.common.opaque import thread_index
from fa4.kernels.common.score import ScoreScalars
from fa4.problem import AttentionProblem

_DTYPES = {
    "float32": cutlass.Float32,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}


@dataclass(frozen=True)
class Modifiers:
    """The functions, None where there is none; their tensors; ``factor`` turns what S holds into a score in natural units."""

    score: Any
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
    def apply(self, S: cute.Tensor, query: tuple[Int32, Int32, Int32], first_key: Int32, masked: cutlass.Constexpr[bool]) -> None:
        """Scores of one ``query``, (batch, head, position), for neighbouring keys.

        Keys beyond the sequence, which only a ``masked`` tile has, take the index of the last one: their scores do not matter, but the
        functions read tensors with it.
        """
        for i in cutlass.range_constexpr(cute.size(S)):
            key = first_key + i
            if const_expr(masked):
                key = min(key, self.seqlens[1] - 1)
            S[i] = self.changed(S[i], query, key)

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
            row = min(first[0] + thread_row + steps[r, 0][0], self.seqlens[0] - 1)
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                key = first[1] + thread_column + steps[0, c][1]
                if const_expr(masked):
                    key = min(key, self.seqlens[1] - 1)
                S[r, c] = self.changed(S[r, c], (*at, row), key)

    @cute.jit
    def changed(self, value: Float32, query: tuple[Int32, Int32, Int32], key: Int32) -> Float32:
        """One score."""
        score = value
        if const_expr(self.score is not None):
            score = Float32(self.score(value * self.factor, *query, key, *self.score_aux))
        if const_expr(self.mask is not None):
            seen = Boolean(self.mask(*query, key, *self.mask_aux))
            score = score if seen else -Float32.inf
        return score


def modifiers(problem: AttentionProblem, scalars: ScoreScalars, seqlens: tuple[Int32, Int32]) -> Modifiers:
    """Those of a problem with what a call gives them."""
    score, mask = problem.score_mod, problem.mask_mod
    count = len(score.aux) if score else 0
    functions = score.function if score else None, mask.function if mask else None
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
