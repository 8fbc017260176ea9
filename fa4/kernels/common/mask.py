"""Which keys a query sees: the range of key tiles of a query tile, and the mask inside a tile.

With ``offset = Sk - Sq`` query i sees key j where ``i + offset - window_left <= j <= i + offset + window_right``. A kernel gets the two
sums that do not depend on i, ``left_limit = offset - window_left`` and ``right_limit = offset + window_right + 1``, so that row i sees
the half-open range ``[i + left_limit, i + right_limit)``, cut to ``[0, Sk)``. ``band_limits`` clamps the bounds so that no sum leaves
32 bits while ``Sq + Sk`` plus one tile is below 2**31.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from fa4.kernels.common.fragments import by_row
from fa4.kernels.common.opaque import thread_index


@cute.jit
def band_limits(
    seqlen_q: Int32, seqlen_k: Int32, window_left: Int32 | None, window_right: Int32 | None
) -> tuple[Int32 | None, Int32 | None]:
    """``(left_limit, right_limit)`` of a call, None where the side is open.

    A bound beyond ``[-Sq, Sk]`` on the left or ``[-Sk, Sq]`` on the right hides every key or none, as the clamped one does.
    """
    left_limit = None
    right_limit = None
    if const_expr(window_left is not None):
        left_limit = seqlen_k - seqlen_q - min(max(window_left, -seqlen_q), seqlen_k)
    if const_expr(window_right is not None):
        right_limit = seqlen_k - seqlen_q + min(max(window_right, -seqlen_k), seqlen_q) + 1
    return left_limit, right_limit


@dataclass(frozen=True)
class KeyTiles:
    """Key tiles ``[begin, end)`` that a query tile visits; each of its rows sees all of ``[full_begin, full_end)``.

    ``begin <= full_begin <= full_end <= end``; ``begin == end`` where no row sees any key.
    """

    begin: Int32
    full_begin: Int32
    full_end: Int32
    end: Int32


@dataclass(frozen=True)
class Band:
    """The visible keys of one sequence, see the module. ``None`` limits are open sides, known at compile time."""

    seqlen_q: Int32
    seqlen_k: Int32
    left_limit: Int32 | None
    right_limit: Int32 | None

    @cute.jit
    def first_key(self, row: Int32) -> Int32:
        """First key that ``row`` sees, in ``[0, Sk]``; meaningful together with ``end_key``."""
        key = Int32(0)
        if const_expr(self.left_limit is not None):
            key = min(max(row + self.left_limit, 0), self.seqlen_k)
        return key

    @cute.jit
    def end_key(self, row: Int32) -> Int32:
        """One past the last key that ``row`` sees, in ``[0, Sk]``."""
        key = self.seqlen_k
        if const_expr(self.right_limit is not None):
            key = min(max(row + self.right_limit, 0), self.seqlen_k)
        return key

    @cute.jit
    def key_tiles(self, first_row: Int32, tile_m: cutlass.Constexpr[int], tile_n: cutlass.Constexpr[int]) -> KeyTiles:
        """Tiles that the rows ``[first_row, first_row + tile_m)`` below Sq need.

        Both ends of a row's range grow with the row, so the last row decides where the tiles end; on the left it is the first row. All
        divisions are of numbers in ``[0, Sk]``, where rounding towards zero is rounding down.
        """
        last_row = min(first_row + tile_m, self.seqlen_q) - 1
        first_key, end_key = self.first_key(first_row), self.end_key(last_row)
        begin = first_key // tile_n
        end = begin
        if end_key > first_key:
            end = cute.ceil_div(end_key, tile_n)
        return self.full_for(KeyTiles(begin, begin, begin, end), first_row, tile_m, tile_n)

    @cute.jit
    def full_for(self, tiles: KeyTiles, first_row: Int32, tile_m: cutlass.Constexpr[int], tile_n: cutlass.Constexpr[int]) -> KeyTiles:
        """The same tiles, with the full range of the rows ``[first_row, first_row + tile_m)`` below Sq.

        The first of them decides where the tiles that all see end, the last one where they begin.
        """
        last_row = min(first_row + tile_m, self.seqlen_q) - 1
        full_end = min(max(self.end_key(first_row) // tile_n, tiles.begin), tiles.end)
        full_begin = min(cute.ceil_div(self.first_key(last_row), tile_n), full_end)
        full_begin = max(full_begin, tiles.begin)
        return KeyTiles(tiles.begin, full_begin, full_end, tiles.end)

    @cute.jit
    def hide(
        self, acc_S: cute.Tensor, tile: cutlass.Constexpr[tuple[int, int]], tiled_mma: cute.TiledMma, first_row: Int32, first_key: Int32
    ) -> None:
        """Set the scores of keys that a row does not see to -inf.

        A thread's columns are compile-time constants from its first one, so that per row the bounds become two numbers to compare
        constants with.
        """
        tidx = thread_index()
        coords = cute.make_identity_tensor(tile)
        thread_row, thread_column = tiled_mma.get_slice(tidx).partition_C(coords)[0]
        steps = by_row(tiled_mma.get_slice(0).partition_C(coords))
        S = by_row(acc_S)
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            row = first_row + thread_row + steps[r, 0][0]
            end = self.end_key(row) - first_key - thread_column
            begin = self.first_key(row) - first_key - thread_column
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                column = steps[0, c][1]
                hidden = Boolean(end <= column)
                if const_expr(self.left_limit is not None):
                    hidden = hidden | (begin > column)
                S[r, c] = -Float32.inf if hidden else S[r, c]


@cute.jit
def ones_from(bit: Int32) -> Int32:
    """A word whose bits from ``bit`` on are set; all of them below 0, none from 32 on (PTX shifts clamp, those of the DSL need not)."""
    return cute.arch.inline_ptx("shl.b32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[Int32(-1), max(bit, 0)])
