"""P of a pair of scores."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from fa4.config import Exp2Policy
from fa4.emulate_exp.coefficients import CONTINUOUS
from fa4.emulate_exp.device import emulated_exp2_pair


@cute.jit
def exp2_of_pair(policy: cutlass.Constexpr[Exp2Policy], pair: cutlass.Constexpr[int], x: Float32, y: Float32) -> tuple[Float32, Float32]:
    """(2^x, 2^y) of a thread's pair of that number: the policy's share is emulated (``fa4.emulate_exp``), others take the MUFU."""
    if const_expr(policy.emulates(pair)):
        return emulated_exp2_pair(x, y, policy.degree, continuous=policy.degree in CONTINUOUS)
    return cute.math.exp2(x, fastmath=True), cute.math.exp2(y, fastmath=True)
