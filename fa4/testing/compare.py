"""The one error bound, and a comparison that says how wrong, where, and in units of the last place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """The deviation of one result from float64 that is closest to its bound, or furthest beyond.

    ``error`` and ``bound`` are absolute; ``index`` is where that is (empty for empty results); ``ulp`` is the error in
    units of the last place of the reference there; ``mismatches`` counts entries that are non-finite on one side only or differ as
    infinities.
    """

    name: str
    error: float
    bound: float
    index: tuple[int, ...]
    ulp: float
    mismatches: int

    @property
    def ok(self) -> bool:
        """Within the bound, and non-finite exactly where the reference is."""
        return self.mismatches == 0 and self.error <= self.bound

    @property
    def share(self) -> float:
        """How much of the bound the error is; infinite where a result is wrong."""
        return float("inf") if not self.ok else self.error / self.bound if self.bound else 0.0

    def __str__(self) -> str:
        """One line, fit for a test failure."""
        verdict = "ok" if self.ok else "WRONG"
        infinite = f", {self.mismatches} entries non-finite on one side" if self.mismatches else ""
        return (
            f"{self.name}: {verdict}: worst error {self.error:.3g} at {self.index} ({self.ulp:.3g} ulp), bound {self.bound:.3g}{infinite}"
        )


_FACTOR = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 8}
BLOCK = 64


def compare(name: str, actual: Tensor, reference: Float64Array, baseline: Tensor, axis: int = 1) -> Comparison:
    """Compare ``actual`` with the float64 ``reference`` under ``err <= factor * err_baseline + 2 * rounding``, block by block.

    ``baseline`` is a plain torch computation in the dtype of ``actual`` (``torch_attention``), so ``err_baseline`` is what the
    arithmetic of that dtype costs anyway. ``rounding`` is ``max |((ref + 0.3) - 0.3) - ref|`` in that dtype: what one addition of
    order one loses. ``factor`` is 2, as in the FlashAttention tests, and 8 for float32 results, where both errors can be nothing
    but the order of summation; there ``rounding`` is at least the spacing of float32 at the reference, since a block of lse may be a
    single entry that the baseline hits by luck (docs/decisions/0004). The bound is taken for each block of 64 positions along
    ``axis``, the sequence, in float32 the last one of 33 to 96: under a causal mask the first rows have errors a hundred times those of
    the last, which would otherwise be free to be wrong. There is no per-test tolerance. Reported is the error closest to the bound of
    its block, or furthest beyond.

    Raises:
        AssertionError: shapes or dtypes differ, or the baseline is not finite where the reference is (the inputs are outside what
            the dtype can represent, so no bound follows).
    """
    # Raised, not asserted: a check must also work under python -O.
    if not tuple(actual.shape) == reference.shape == tuple(baseline.shape):
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, expected {reference.shape}")
    if actual.dtype != baseline.dtype:
        raise AssertionError(f"{name}: dtype {actual.dtype}, expected {baseline.dtype}")
    if actual.numel() == 0:
        return Comparison(name, 0.0, 0.0, (), 0.0, 0)
    finite = np.isfinite(reference)
    rounded = torch.from_numpy(np.where(finite, reference, 0.0)).to(actual.dtype)
    rounding = (((rounded + 0.3) - 0.3) - rounded).double().abs().numpy()
    if actual.dtype == torch.float32:
        rounding = np.maximum(rounding, np.spacing(rounded.abs().numpy()))
    baseline_error = _deviation(baseline, reference, finite)
    if not np.isfinite(baseline_error).all():
        raise AssertionError(f"{name}: the {actual.dtype} baseline overflows: no bound for these inputs")
    measured = actual.detach().double().cpu().numpy()
    same = np.where(finite, np.isfinite(measured), (measured == reference) | (np.isnan(measured) & np.isnan(reference)))
    error = np.nan_to_num(_deviation(actual, reference, finite), nan=np.inf, posinf=np.inf)
    joined = actual.dtype == torch.float32
    bound = _FACTOR[actual.dtype] * _block_maximum(baseline_error, axis, joined) + 2 * _block_maximum(rounding, axis, joined)
    share = np.divide(error, bound, out=np.where(error > 0, np.inf, 0.0), where=bound > 0)
    worst = np.unravel_index(int(np.argmax(share)), share.shape)
    return Comparison(
        name=name,
        error=float(error[worst]),
        bound=float(bound[worst]),
        index=tuple(int(i) for i in worst),
        ulp=float(error[worst]) / _ulp(reference[worst], actual.dtype),
        mismatches=int((~same).sum()),
    )


def _block_maximum(values: Float64Array, axis: int, joined: bool) -> Float64Array:
    """For each entry, the largest value of its block along ``axis``, over all others; ``joined``: a short last one with the one before."""
    others = tuple(i for i in range(values.ndim) if i != axis)
    along = values.max(axis=others)
    starts = np.arange(0, max(len(along) - BLOCK // 2, 1) if joined else len(along), BLOCK)
    blocks = np.repeat(np.maximum.reduceat(along, starts), np.diff(np.append(starts, len(along))))
    shape = [1] * values.ndim
    shape[axis] = len(along)
    return np.broadcast_to(blocks.reshape(shape), values.shape)


def _deviation(tensor: Tensor, reference: Float64Array, finite: npt.NDArray[np.bool_]) -> Float64Array:
    """|tensor - reference| where the reference is finite, else 0."""
    values = tensor.detach().double().cpu().numpy()
    difference: Float64Array = np.subtract(values, reference, where=finite, out=np.zeros_like(reference))
    return np.abs(difference, out=difference)


def _ulp(value: float, dtype: torch.dtype) -> float:
    """Spacing of ``dtype`` at ``value``, not below that of its smallest normal number."""
    info = torch.finfo(dtype)
    magnitude = max(abs(float(value)) if np.isfinite(value) else 0.0, info.tiny)
    return float(2.0 ** np.floor(np.log2(magnitude)) * info.eps)
