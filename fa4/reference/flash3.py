"""FlashAttention-3's FP8 forward: block scales and a random rotation (arXiv 2407.08608, section 3.3).

An 8-bit number of type e4m3 has 3 mantissa bits and a largest value of 448. A tensor is divided by a scale that maps its largest
magnitude to 448. One outlier then pushes everything else towards the few bits at the bottom. Two remedies:

* block scales: one scale per tile of Q, K and V, so that an outlier spoils its own tile only;
* rotation ("incoherent processing"): multiply Q and K by one random orthogonal matrix M. (Q M)(K M)^T = Q K^T, but each outlier
  is spread over all features of its row, so that the largest magnitude falls.

The asynchrony that FlashAttention-3 is also about (sections 3.1 and 3.2) changes when things happen, not what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fa4.reference.heads import Head, run_forward
from fa4.reference.online import RowState, online_softmax
from fa4.reference.problem import AttentionOptions, AttentionResult, FloatArray, Inputs, Tiles, check_inputs

Float32Array = npt.NDArray[np.float32]

E4M3_MAX = 448.0

P_SCALE = 1 / 256
"""Scale of P. Its entries are at most 1, so this maps them to at most 256, and e4m3 keeps full precision down to 2^-14 instead of 2^-6."""


@dataclass(frozen=True)
class Fp8Options:
    """How Q, K and V become FP8.

    Attributes:
        block_scales: one scale per tile; False: one per tensor, over batch, heads and sequence.
        rotation: rotate Q and K by a random-sign Hadamard matrix first.
        seed: seed of the random signs.
    """

    block_scales: bool = True
    rotation: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Quantised:
    """A tensor in FP8: ``codes`` hold e4m3 values (as float32, to multiply them), and the tensor is codes * scale."""

    codes: Float32Array
    scale: np.float32


def flash3_attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    options: AttentionOptions | None = None,
    tiles: Tiles | None = None,
    fp8: Fp8Options | None = None,
) -> AttentionResult:
    """Compute attention with Q, K, V and P in float8_e4m3fn, sums and softmax in float32.

    Args:
        q: queries, as for ``standard_attention``.
        k: keys, likewise.
        v: values, likewise.
        options: scale, mask and softcap; default ``AttentionOptions()``.
        tiles: tile sizes, and the blocks that share a scale; default ``Tiles()``.
        fp8: which remedies to use; default both.

    Returns:
        As ``standard_attention``, with the error of FP8; float32 values as float64.

    Raises:
        DtypeError, ShapeError: see ``check_inputs``.
    """
    sizes, variant = tiles or Tiles(), fp8 or Fp8Options()
    inputs = check_inputs(q, k, v)
    options = options or AttentionOptions()
    options = replace(options, softmax_scale=options.scale(inputs.q.shape[3]))  # of D before the rotation pads it
    if variant.rotation:
        rotation = random_rotation(inputs.q.shape[3], variant.seed)
        inputs = Inputs(rotate(inputs.q, rotation), rotate(inputs.k, rotation), inputs.v)
    scales: dict[str, float] = {}
    if not variant.block_scales:
        scales = {"Q": fp8_scale(inputs.q), "K": fp8_scale(inputs.k), "V": fp8_scale(inputs.v)}
    return run_forward(inputs, options, lambda head: _forward(head, sizes, scales))


def _forward(head: Head, tiles: Tiles, scales: dict[str, float]) -> None:
    memory = head.memory

    def read_fp8(name: str, part: slice) -> Quantised:
        # A GPU finds FP8 in memory. Rounding here instead gives the same numbers, for a block is a tile.
        return quantise(memory.read(name, part), scales.get(name))

    for rows in head.row_tiles(tiles.rows):
        q = read_fp8("Q", rows)
        state = RowState.start(memory.result("O")[rows].shape, np.float32)
        for columns in head.column_tiles(tiles.columns):
            if head.is_empty(rows, columns):
                continue
            k, v = read_fp8("K", columns), read_fp8("V", columns)
            product = (q.codes @ k.codes.T) * (q.scale * k.scale)
            p, factor = online_softmax(state, head.scores(product, rows, columns))
            p_fp8 = quantise(p, P_SCALE)
            state.out = factor[:, None] * state.out + (p_fp8.codes @ v.codes) * (p_fp8.scale * v.scale)
        out, lse = state.finish()
        memory.write("O", out, rows)
        memory.write("lse", lse, rows)


def fp8_scale(values: npt.NDArray[Any]) -> float:
    """Return the scale that maps the largest magnitude to 448; 1 for a tensor that is empty or all zeros."""
    largest = float(np.abs(values).max(initial=0.0))
    return largest / E4M3_MAX if largest > 0 else 1.0


def quantise(values: npt.NDArray[Any], scale: float | None = None) -> Quantised:
    """Round ``values / scale`` to e4m3 (nearest, ties to even); without a scale, take the one of ``fp8_scale``."""
    scale = fp8_scale(values) if scale is None else scale
    return Quantised((values / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32), np.float32(scale))


def random_rotation(features: int, seed: int) -> FloatArray:
    """Return an orthogonal matrix diag(signs) H, shape (n, n), n the next power of two from ``features``, signs of +-1 by ``seed``.

    H is the Hadamard matrix by Sylvester's doubling, divided by sqrt(n); all its entries have one magnitude, so a vector with
    one large entry becomes one with n small ones. A kernel applies it in n log n steps instead of a product.
    """
    hadamard = np.ones((1, 1))
    while len(hadamard) < features:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    size = len(hadamard)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size)
    return np.asarray(signs[:, None] * hadamard / np.sqrt(size))


def rotate(x: FloatArray, rotation: FloatArray) -> FloatArray:
    """Rotate the last dimension of ``x``, padded with zeros to the size of the matrix, which leaves dot products as they are."""
    return x @ rotation[: x.shape[-1]]
