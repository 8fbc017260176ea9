"""What is asked and what comes back: options, tile sizes, results, and the checks on arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fa4.errors import ArgumentError, DtypeError, ShapeError
from fa4.reference.ledger import Ledger
from fa4.reference.mask import Window

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]

_NOT_FLOAT_KINDS = "biucOSUmM"  # numpy's kind letters; bfloat16 and float8 from ml_dtypes are of kind "V" and pass


MaskMod = Callable[[int, int, IndexArray, IndexArray], npt.NDArray[np.bool_]]
"""``visible = f(batch, head, queries, keys)`` with queries (rows, 1) and keys (1, columns); broadcasts to (rows, columns)."""


@dataclass(frozen=True)
class ScoreMod:
    """A function on scores: ``function(scores, batch, head, queries, keys)`` with scores (rows, columns), indices as for ``MaskMod``.

    ``gradient(dscores, scores, batch, head, queries, keys)`` carries a gradient of its result back to ``scores``; only a backward needs it.
    """

    function: Callable[[FloatArray, int, int, IndexArray, IndexArray], FloatArray]
    gradient: Callable[[FloatArray, FloatArray, int, int, IndexArray, IndexArray], FloatArray] | None = None


@dataclass(frozen=True)
class AttentionOptions:
    """Options that change the result.

    Attributes:
        softmax_scale: factor on Q K^T; None means D ** -0.5. Any finite number, zero and negative ones included.
        causal: hide keys right of the diagonal, aligned bottom-right.
        window_size: (left, right) in keys; see ``mask.visible``.
        softcap: c > 0 replaces a scaled score s by c * tanh(s / c); 0 turns it off.
        score_mod: changes scaled and capped scores before the mask.
        mask_mod: hides keys beside those that causal and window hide.

    Raises:
        ArgumentError: a scale or softcap that is not finite, or a negative softcap.
    """

    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = (None, None)
    softcap: float = 0.0
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        if self.softmax_scale is not None and not math.isfinite(self.softmax_scale):
            raise ArgumentError("softmax_scale", self.softmax_scale, "must be finite", "pass a finite number, or None for D ** -0.5")
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise ArgumentError("softcap", self.softcap, "must be finite and at least 0", "pass 0 to turn it off")
        if len(self.window_size) != 2 or not all(bound is None or isinstance(bound, (int, np.integer)) for bound in self.window_size):
            raise ArgumentError(
                "window_size", self.window_size, "must be (left, right), each an int or None", "pass (None, None) for no window"
            )

    def scale(self, head_dim: int) -> float:
        """Return the factor on Q K^T for queries of ``head_dim`` features."""
        return float(head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale)


@dataclass(frozen=True)
class Tiles:
    """Tile sizes: ``rows`` queries (Br in the papers) by ``columns`` keys (Bc). They need not divide the lengths."""

    rows: int = 64
    columns: int = 64

    def __post_init__(self) -> None:
        """Check the values."""
        for name, size in (("rows", self.rows), ("columns", self.columns)):
            if size < 1:
                raise ArgumentError(name, size, "a tile holds at least one row and one column", "pass a positive integer")


@dataclass(frozen=True)
class AttentionResult:
    """Output of a forward pass.

    Attributes:
        out: (B, Sq, Hq, Dv), float64; 0 in rows that see no key.
        lse: (B, Hq, Sq), float64: natural logarithm of the softmax denominator; -inf in rows that see no key.
        ledger: device-memory traffic.
    """

    out: FloatArray
    lse: FloatArray
    ledger: Ledger = field(default_factory=Ledger)


@dataclass(frozen=True)
class Gradients:
    """Output of a backward pass: gradients in the shapes of q, k and v, float64, and the traffic."""

    dq: FloatArray
    dk: FloatArray
    dv: FloatArray
    ledger: Ledger = field(default_factory=Ledger)


@dataclass(frozen=True)
class Inputs:
    """Checked operands in float64: q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)."""

    q: FloatArray
    k: FloatArray
    v: FloatArray

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Shape of the output: (B, Sq, Hq, Dv)."""
        batch, seqlen_q, heads_q, _ = self.q.shape
        return batch, seqlen_q, heads_q, self.v.shape[3]

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """Shape of lse: (B, Hq, Sq)."""
        batch, seqlen_q, heads_q, _ = self.q.shape
        return batch, heads_q, seqlen_q

    def kv_head(self, head: int) -> int:
        """Return the key-value head that query head ``head`` uses: consecutive query heads form a group."""
        group = self.q.shape[2] // self.k.shape[2]
        return head // int(group)


def check_inputs(q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike) -> Inputs:
    """Convert the operands to float64 and check that they fit together.

    Raises:
        DtypeError: an operand is not of a floating-point type.
        ShapeError: an operand is not of rank 4, or sizes or head counts do not fit.
    """
    inputs = Inputs(to_float64("q", q), to_float64("k", k), to_float64("v", v))
    for name, array in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
        if array.ndim != 4:
            raise ShapeError(name, array.shape, "must have rank 4: (batch, sequence, heads, features)", "reshape it")
        if array.shape[3] == 0:
            raise ShapeError(name, array.shape, "must have at least one feature", "pass a last dimension of 1 or more")
    q_shape, k_shape, v_shape = inputs.q.shape, inputs.k.shape, inputs.v.shape
    if (k_shape[0], k_shape[3]) != (q_shape[0], q_shape[3]):
        raise ShapeError("k", k_shape, f"batch and features must be those of q, {q_shape}", "pass k of shape (B, Sk, Hkv, D)")
    if v_shape[:3] != k_shape[:3]:
        raise ShapeError("v", v_shape, f"batch, sequence and heads must be those of k, {k_shape}", "pass v of shape (B, Sk, Hkv, Dv)")
    heads_q, heads_kv = q_shape[2], k_shape[2]
    if heads_q and (heads_kv == 0 or heads_q % heads_kv):
        raise ShapeError("k", k_shape, f"its head count must divide the {heads_q} heads of q", "repeat or drop heads")
    return inputs


def check_output_gradients(inputs: Inputs, dout: npt.ArrayLike | None, dlse: npt.ArrayLike | None) -> tuple[FloatArray, FloatArray]:
    """Convert gradients of out and lse to float64; one that is None counts as zeros.

    Raises:
        ArgumentError: both are None.
        DtypeError: one is not of a floating-point type.
        ShapeError: one does not have the shape of its output.
    """
    if dout is None and dlse is None:
        raise ArgumentError("dout", None, "dout and dlse cannot both be None", "pass the gradient of out, of lse, or both")
    dout = np.zeros(inputs.out_shape) if dout is None else to_float64("dout", dout)
    dlse = np.zeros(inputs.lse_shape) if dlse is None else to_float64("dlse", dlse)
    for name, array, shape in (("dout", dout, inputs.out_shape), ("dlse", dlse, inputs.lse_shape)):
        if array.shape != shape:
            raise ShapeError(name, array.shape, f"must have the shape of its output, {shape}", "pass the gradient of this call's output")
    return dout, dlse


def to_float64(name: str, value: npt.ArrayLike) -> FloatArray:
    """Convert an array of any floating-point type to float64.

    Raises:
        DtypeError: it is of another type.
    """
    array = np.asarray(value)
    if array.dtype.kind in _NOT_FLOAT_KINDS:
        raise DtypeError(name, array.dtype, "must be of a floating-point type", "convert it, for example with astype(float)")
    return array.astype(np.float64)
