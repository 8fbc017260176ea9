"""Which slot of the ring K and V of a key tile lie in.

They take turns, K first, in slots that hold either. With ``v_apart`` K takes turns with K in two slots, and V has the third, which is as
large as V, to itself: where D is larger than Dv three slots fit so, and K of the next key tile comes while this one is multiplied by.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fa4.config import BlackwellForwardConfig
from fa4.kernels.common.barrier import Slot, following


@cute.jit
def value_slot(config: cutlass.Constexpr[BlackwellForwardConfig], K: Slot, first: cutlass.Constexpr[int]) -> Slot:
    """That of V of the key tile whose K has this slot; ``first`` is the parity that a role begins with."""
    if const_expr(config.v_apart):
        return Slot(Int32(config.stages - 1), K.index ^ first)  # one slot: the parity flips with each tile, as K's slot of two does
    if const_expr(config.stages % 2 == 0):
        return Slot(K.index + 1, K.phase)  # an even number of slots never starts again after K
    return following(K, config.stages)


@cute.jit
def next_key_slot(config: cutlass.Constexpr[BlackwellForwardConfig], K: Slot, V: Slot) -> Slot:
    """That of K of the key tile after the one whose K and V have these."""
    if const_expr(config.v_apart):
        return following(K, config.stages - 1)
    return following(V, config.stages)
