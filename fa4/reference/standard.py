"""Standard attention: the definition of correctness.

    S = scale * Q K^T (capped, masked),   P = softmax(S) by rows,   O = P V

with S and P written to device memory and read back, as an implementation from separate matrix products and a softmax does
(arXiv 2205.14135, Algorithm 0).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fa4.reference.heads import Head, run_backward, run_forward
from fa4.reference.mask import Window
from fa4.reference.online import divide_rows, finite, log, only
from fa4.reference.problem import AttentionOptions, AttentionResult, Gradients, MaskMod, ScoreMod, check_inputs, check_output_gradients


def standard_attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> AttentionResult:
    """Compute attention in float64.

    Args:
        q: queries (B, Sq, Hq, D), any floating-point type; converted to float64.
        k: keys (B, Sk, Hkv, D); Hkv divides Hq, and query head h uses key-value head h // (Hq // Hkv).
        v: values (B, Sk, Hkv, Dv).
        softmax_scale: factor on Q K^T; None means D ** -0.5; may be zero or negative.
        causal: query i sees keys j <= i + Sk - Sq (aligned bottom-right).
        window_size: (left, right) in keys, see ``visible``; None or -1 is open.
        softcap: c > 0 replaces a scaled score s by c * tanh(s / c).
        score_mod: changes scaled and capped scores before the mask.
        mask_mod: hides keys beside those that causal and window hide.

    Returns:
        ``out`` (B, Sq, Hq, Dv), ``lse`` (B, Hq, Sq, natural logarithm), both float64, and the ledger. Rows that see no key have
        out 0 and lse -inf. NaN or Inf at a hidden key may reach the rows of its own sequence, since 0 * NaN is NaN.

    Raises:
        DtypeError, ShapeError, ArgumentError: see ``check_inputs`` and ``AttentionOptions``.
    """
    options = AttentionOptions(softmax_scale, causal, window_size, softcap, score_mod, mask_mod)
    return run_forward(check_inputs(q, k, v), options, _forward)


def standard_attention_backward(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    dout: npt.ArrayLike | None,
    dlse: npt.ArrayLike | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> Gradients:
    """Compute the gradients of ``sum(out * dout) + sum(lse * dlse)`` in float64 (arXiv 2205.14135, appendix B.2 and Algorithm 3).

    Args:
        q: queries, as for ``standard_attention``.
        k: keys, likewise.
        v: values, likewise.
        dout: gradient of out, (B, Sq, Hq, Dv), or None for zeros.
        dlse: gradient of lse, (B, Hq, Sq), or None for zeros; not both None.
        softmax_scale: as for ``standard_attention``.
        causal: likewise.
        window_size: likewise.
        softcap: likewise.
        score_mod: likewise; needs its gradient.
        mask_mod: likewise.

    Returns:
        ``dq``, ``dk``, ``dv`` in the shapes of q, k, v, float64. Rows that see no key add exactly 0. The ledger counts the
        forward pass too: it is run again, for P.

    Raises:
        DtypeError, ShapeError, ArgumentError: see ``check_inputs``, ``check_output_gradients`` and ``AttentionOptions``.
    """
    options = AttentionOptions(softmax_scale, causal, window_size, softcap, score_mod, mask_mod)
    inputs = check_inputs(q, k, v)
    dout, dlse = check_output_gradients(inputs, dout, dlse)
    zeros = {"O": np.zeros(inputs.out_shape), "lse": np.zeros(inputs.lse_shape)}  # the forward pass fills them
    return run_backward(inputs, options, {"dO": dout, "dlse": dlse, **zeros}, _backward)


def _forward(head: Head) -> None:
    memory = head.memory
    square = (head.seqlen_q, head.seqlen_k)
    memory.allocate("S", square)
    memory.allocate("P", square)

    memory.write("S", head.scores(memory.read("Q") @ memory.read("K").T))

    scores = memory.read("S")
    row_max = scores.max(axis=1, initial=-np.inf)
    p = np.exp(scores - finite(row_max)[:, None])
    row_sum = p.sum(axis=1)
    memory.write("P", divide_rows(p, row_sum))
    lse = row_max + log(row_sum)
    memory.write("lse", lse)

    memory.write("O", only(lse != -np.inf, memory.read("P") @ memory.read("V")))


def _backward(head: Head) -> None:
    _forward(head)
    memory = head.memory
    for name in ("dP", "dS"):
        memory.allocate(name, (head.seqlen_q, head.seqlen_k))
    for name in ("Q", "K", "V"):
        memory.allocate("d" + name, memory.result(name).shape)
    sees_a_key = memory.read("lse") != -np.inf

    memory.write("dV", memory.read("P").T @ only(sees_a_key, memory.read("dO")))
    memory.write("dP", memory.read("dO") @ memory.read("V").T)

    # d softmax: dS = P * (dP - rowsum(P * dP)), and rowsum(P * dP) = rowsum(O * dO). lse adds dlse * P, for d lse / d S = P.
    delta = (memory.read("O") * memory.read("dO")).sum(axis=1) - memory.read("dlse")
    score_gradient = memory.read("P") * (memory.read("dP") - delta[:, None])
    memory.write("dS", only(sees_a_key, head.product_gradient(score_gradient, memory.read("S"))))

    memory.write("dQ", only(sees_a_key, memory.read("dS") @ memory.read("K")))
    memory.write("dK", memory.read("dS").T @ only(sees_a_key, memory.read("Q")))
