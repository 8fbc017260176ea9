"""What the algorithms share: one head at a time, its tiles and its scores.

Every algorithm is written for one head, as in the papers: Q (Sq, D), K (Sk, D), V (Sk, Dv) lie in device memory, and the
algorithm writes O (Sq, Dv) and lse (Sq,). The functions here run it over batch and heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fa4.errors import ArgumentError
from fa4.reference.ledger import DeviceMemory, Ledger
from fa4.reference.mask import visible
from fa4.reference.problem import AttentionOptions, AttentionResult, FloatArray, Gradients, IndexArray, Inputs

Array = npt.NDArray[Any]

ALL = slice(None)


@dataclass(frozen=True)
class Head:
    """One head as an algorithm sees it: its device memory, its lengths, and the rule that turns Q K^T into scores.

    ``batch`` and ``index`` (of the query head) are what functions on scores are told.
    """

    memory: DeviceMemory
    options: AttentionOptions
    seqlen_q: int
    seqlen_k: int
    scale: float
    batch: int
    index: int

    def row_tiles(self, rows: int) -> Iterator[slice]:
        """Cut the queries into tiles of ``rows``; the last one may be shorter."""
        return _cut(self.seqlen_q, rows)

    def column_tiles(self, columns: int) -> Iterator[slice]:
        """Cut the keys into tiles of ``columns``; the last one may be shorter."""
        return _cut(self.seqlen_k, columns)

    def seen(self, rows: slice, columns: slice) -> npt.NDArray[np.bool_]:
        """Tell which keys of a tile each of its queries sees, shape (rows, columns)."""
        queries, keys = self._positions(rows, columns)
        offset = self.seqlen_k - self.seqlen_q
        seen = visible(queries, keys, offset=offset, causal=self.options.causal, window_size=self.options.window_size)
        if self.options.mask_mod:
            seen = seen & self.options.mask_mod(self.batch, self.index, queries[:, None], keys[None])
        return seen

    def is_empty(self, rows: slice, columns: slice) -> bool:
        """Tell whether the mask hides a whole tile, so that an algorithm need not load it."""
        return not self.seen(rows, columns).any()

    def scores(self, product: Array, rows: slice = ALL, columns: slice = ALL) -> Array:
        """Turn a tile of Q K^T into scores: scaled, capped, and -inf where the query does not see the key."""
        self.memory.ledger.hold(product.size)
        scores = self._capped(product)
        if self.options.score_mod:
            scores = self.options.score_mod.function(scores, *self._where(rows, columns))
        return np.where(self.seen(rows, columns), scores, -np.inf)

    def product_gradient(self, score_gradient: Array, scores: Array, rows: slice = ALL, columns: slice = ALL) -> Array:
        """Carry a gradient of the scores back to Q K^T: that of the score modifier, d tanh(x) = 1 - tanh(x)^2, then the scale.

        A score modifier cannot be inverted: the scores before it are computed again.

        Raises:
            ArgumentError: a score modifier without gradient.
        """
        modifier = self.options.score_mod
        if modifier:
            if modifier.gradient is None:
                raise ArgumentError("score_mod", modifier, "has no gradient", "pass ScoreMod(function, gradient)")
            seen = scores != -np.inf
            scores = self._capped(self.memory.read("Q", rows) @ self.memory.read("K", columns).T)
            score_gradient = np.where(seen, modifier.gradient(score_gradient, scores, *self._where(rows, columns)), 0.0)
        if self.options.softcap:
            hidden = scores == -np.inf
            tanh = np.where(hidden, 0.0, scores) / self.options.softcap
            score_gradient = score_gradient * (1 - tanh * tanh)
        return score_gradient * self.scale

    def _capped(self, product: Array) -> Array:
        scores = product * self.scale
        return self.options.softcap * np.tanh(scores / self.options.softcap) if self.options.softcap else scores

    def _positions(self, rows: slice, columns: slice) -> tuple[IndexArray, IndexArray]:
        return np.arange(self.seqlen_q, dtype=np.int64)[rows], np.arange(self.seqlen_k, dtype=np.int64)[columns]

    def _where(self, rows: slice, columns: slice) -> tuple[int, int, IndexArray, IndexArray]:
        queries, keys = self._positions(rows, columns)
        return self.batch, self.index, queries[:, None], keys[None]


def run_forward(inputs: Inputs, options: AttentionOptions, algorithm: Callable[[Head], None]) -> AttentionResult:
    """Run a forward algorithm on every head; it must write "O" and "lse" in the head's memory."""
    out, lse, ledger = np.empty(inputs.out_shape), np.empty(inputs.lse_shape), Ledger()
    # NaN and Inf in the operands give NaN by the rules of IEEE arithmetic (Inf - Inf, 0 * Inf): a result, not a mistake to warn of.
    with np.errstate(invalid="ignore"):
        for batch, index in np.ndindex(inputs.lse_shape[:2]):
            head = _make_head(inputs, options, ledger, batch, index)
            head.memory.allocate("O", (out.shape[1], out.shape[3]))
            head.memory.allocate("lse", (out.shape[1],))
            algorithm(head)
            out[batch, :, index] = head.memory.result("O")
            lse[batch, index] = head.memory.result("lse")
    return AttentionResult(out, lse, ledger)


def run_backward(
    inputs: Inputs, options: AttentionOptions, row_tensors: dict[str, FloatArray], algorithm: Callable[[Head], None]
) -> Gradients:
    """Run a backward algorithm on every head; it must write "dQ", "dK" and "dV" in the head's memory.

    ``row_tensors`` are further operands by name: (B, Sq, Hq, Dv) like the output, or (B, Hq, Sq) like lse.
    """
    dq, dk, dv = np.zeros(inputs.q.shape), np.zeros(inputs.k.shape), np.zeros(inputs.v.shape)
    ledger = Ledger()
    with np.errstate(invalid="ignore"):  # for the same reason as in run_forward
        for batch, index in np.ndindex(inputs.lse_shape[:2]):
            more = {name: x[batch, :, index] if x.ndim == 4 else x[batch, index] for name, x in row_tensors.items()}
            head = _make_head(inputs, options, ledger, batch, index, more)
            algorithm(head)
            kv_index = inputs.kv_head(index)
            dq[batch, :, index] = head.memory.result("dQ")
            dk[batch, :, kv_index] += head.memory.result("dK")  # the query heads of a group share K and V: their gradients add up
            dv[batch, :, kv_index] += head.memory.result("dV")
    return Gradients(dq, dk, dv, ledger)


def _make_head(
    inputs: Inputs, options: AttentionOptions, ledger: Ledger, batch: int, index: int, more: dict[str, FloatArray] | None = None
) -> Head:
    kv_index = inputs.kv_head(index)
    q, k, v = inputs.q[batch, :, index], inputs.k[batch, :, kv_index], inputs.v[batch, :, kv_index]
    memory = DeviceMemory(ledger, {"Q": q, "K": k, "V": v, **(more or {})})
    return Head(memory, options, q.shape[0], k.shape[0], options.scale(q.shape[1]), batch, index)


def _cut(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
