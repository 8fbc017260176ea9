"""What was asked: the class of a request (``AttentionProblem``) and the run-time numbers of a call (``AttentionOptions``).

Neither says anything about how the answer is computed. A problem is what a kernel is compiled for; options are what a compiled
kernel is given. Scale, softcap and window bounds are options: of them a problem knows only presence and class.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from fa4.errors import ArgumentError, DtypeError
from fa4.modifier import DeviceFunction, DeviceFunctions, Modifiers

Direction = Literal["forward", "backward"]

# What a kernel does: a direction's main work, or what a backward needs before and after it.
Operation = Literal["forward", "backward", "preprocess", "postprocess"]
OPERATIONS: tuple[str, ...] = get_args(Operation)

WindowSize = Sequence["int | None"]

# Beyond any length, so clamping to it changes no mask, and small enough for sums with lengths to stay within 64 bits.
MAX_BOUND = 1 << 62

MAX_FLOAT32 = (2 - 2.0**-23) * 2.0**127
MIN_FLOAT32 = 2.0**-126  # the smallest normal number


@dataclass(frozen=True)
class AttentionProblem:
    """A class of requests that one compiled kernel serves.

    ``direction`` is what the kernel does; users ask for "forward" or "backward".
    ``dtype`` is the element type of q, k, v and out ("float16", "bfloat16", "float32"). ``causal`` means that the right bound is
    the diagonal at compile time; ``window`` says for (left, right) whether a bound is given at run time. Lengths, batch, head
    counts, strides and the values of scale, softcap and bounds are not part of it. ``score_mod`` and ``mask_mod`` are the functions that a
    kernel is compiled with.
    """

    direction: Operation
    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window: tuple[bool, bool] = (False, False)
    softcap: bool = False
    deterministic: bool = False
    score_mod: DeviceFunction | None = None
    mask_mod: DeviceFunction | None = None

    @property
    def modified(self) -> bool:
        """Whether it has functions on scores."""
        return self.score_mod is not None or self.mask_mod is not None

    @classmethod
    def of(
        cls,
        direction: Operation,
        dtype: object,
        head_dims: tuple[int, int],
        bounds: tuple[int | None, int | None],
        softcap: float,
        deterministic: bool,
        functions: DeviceFunctions = (None, None),
    ) -> AttentionProblem:
        """The class of a request in normalised terms: ``bounds`` as from ``normalise_window``, ``dtype`` a name or torch's own."""
        left, right = bounds
        return cls(
            direction=direction,
            dtype=dtype_name(dtype),
            head_dim=head_dims[0],
            head_dim_v=head_dims[1],
            causal=right == 0,
            window=(left is not None, right is not None and right != 0),
            softcap=softcap > 0,
            deterministic=deterministic,
            score_mod=functions[0],
            mask_mod=functions[1],
        )


class AttentionOptions(NamedTuple):
    """The numbers of one call, normalised. A tuple, since each call makes one.

    With ``offset = Sk - Sq``, query i sees key j where ``i + offset - window_left <= j <= i + offset + window_right``; ``None`` is
    an open side. ``softcap`` 0 is off. Causal attention is ``window_right = 0`` (or less). ``modifiers`` change scores after
    softcap, before the mask, and hide further keys.
    """

    softmax_scale: float
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    deterministic: bool = False
    modifiers: Modifiers | None = None


def normalise_window(window_size: WindowSize, causal: bool) -> tuple[int | None, int | None]:
    """``(left, right)`` with ``None`` for an open side; ``causal`` clamps the right side to at most 0.

    ``None`` and -1 mean open; every other value, negative ones included, is an offset.

    Raises:
        ArgumentError: not two entries.
        DtypeError: an entry is neither an integer nor None.
    """
    rule = "must be two integers or None, (left, right)"
    remedy = "for example (128, 0), or (None, None) for no window"
    # tuple first: to ask an abstract class costs more than all the rest.
    if not isinstance(window_size, (tuple, list)) and (isinstance(window_size, (str, bytes)) or not isinstance(window_size, Sequence)):
        raise DtypeError("window_size", window_size, rule, remedy)
    if len(window_size) != 2:
        raise ArgumentError("window_size", tuple(window_size), rule, remedy)
    left, right = (_bound(entry, window_size) for entry in window_size)
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def _bound(entry: int | None, window_size: WindowSize) -> int | None:
    if entry is None:
        return None
    # int first: it is what torch.compile knows a symbolic length as.
    if isinstance(entry, bool) or not isinstance(entry, (int, numbers.Integral)):
        raise DtypeError("window_size", window_size, f"{entry!r} is not an integer", "use an integer, or None (or -1) for an open side")
    return None if entry == -1 else max(-MAX_BOUND, min(int(entry), MAX_BOUND))


def problem_class(
    *,
    direction: Operation,
    dtype: object,
    head_dim: int,
    head_dim_v: int | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    deterministic: bool,
    operations: tuple[str, ...] = get_args(Direction),
    functions: DeviceFunctions = (None, None),
) -> AttentionProblem:
    """The problem of a request described by the arguments of ``fa4.attention``; ``head_dim_v`` None is ``head_dim``.

    ``direction`` is one of ``operations``.

    Raises:
        ArgumentError: an unknown direction, a window of wrong arity, a softcap that is negative or not finite.
        DtypeError: an argument of the wrong type.
    """
    if direction not in operations:
        raise ArgumentError("direction", direction, "is unknown", f"use {' or '.join(map(repr, operations))}")
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    for name, value in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise DtypeError(name, value, "must be an integer", "for example 128")
    bounds = normalise_window(window_size, causal)
    head_dims = int(head_dim), int(head_dim_v)
    return AttentionProblem.of(direction, dtype, head_dims, bounds, softcap_number(softcap), deterministic, functions)


def dtype_name(dtype: object) -> str:
    """The name of an element type given as a string or as torch's own."""
    return str(dtype).removeprefix("torch.")


def real_number(name: str, value: Any) -> float:
    """The real number that an argument is; kernels hold it in float32, so it must be finite there.

    Raises:
        DtypeError: not a number.
        ArgumentError: NaN, infinite or beyond float32.
    """
    # int and float first: that is what torch.compile knows symbolic numbers as. It cannot trace math.isfinite of one.
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        raise DtypeError(name, value, "must be a real number", "pass an int or a float")
    if not -MAX_FLOAT32 <= value <= MAX_FLOAT32:  # type: ignore[operator]  # numbers.Real has no order for mypy
        raise ArgumentError(name, value, "must be finite in float32", f"pass a number of at most {MAX_FLOAT32:.4g} in magnitude")
    return float(value)


def softcap_number(value: Any) -> float:
    """The softcap of a request, 0 for none.

    Raises:
        DtypeError: not a number.
        ArgumentError: negative, so small that float32 cannot divide by it, NaN, or beyond float32.
    """
    softcap = real_number("softcap", value)
    if softcap != 0 and softcap < MIN_FLOAT32:
        rule = "must not be negative" if softcap < 0 else "is too small to divide by in float32"
        raise ArgumentError("softcap", value, rule, "pass a positive cap, for example 30.0, or 0.0 for none")
    return softcap
