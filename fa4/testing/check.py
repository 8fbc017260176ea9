"""Check a whole attention function, forward and backward, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa4.reference import standard_attention, standard_attention_backward
from fa4.testing.compare import Comparison, compare
from fa4.testing.inputs import AttentionInputs
from fa4.testing.modifier import reference_options
from fa4.testing.torch_attention import torch_attention

AttentionFunction = Callable[..., tuple[Tensor, Tensor]]


def compare_attention(
    attention: AttentionFunction, inputs: AttentionInputs, *, backward: bool = True, use_dlse: bool = False, **options: Any
) -> list[Comparison]:
    """Compare out, lse, dq, dk, dv of ``attention(q, k, v, **options) -> (out, lse)`` with float64.

    ``options`` are softmax_scale, causal, window_size, softcap, and the handles score_mod and mask_mod with their aux. The gradient flows
    from ``dout``, and from ``dlse`` too where ``use_dlse`` is set and only at rows that see a key (elsewhere lse is the constant -inf).

    Raises:
        AssertionError: a shape or dtype is wrong, or no bound follows from these inputs (see ``compare``).
    """
    dlse = None
    if use_dlse:
        q, k, v = (x.detach().double().cpu().numpy() for x in (inputs.q, inputs.k, inputs.v))
        unseen = torch.from_numpy(standard_attention(q, k, v, **reference_options(options)).lse == -float("inf"))
        dlse = inputs.dlse.masked_fill(unseen.to(inputs.dlse.device), 0.0)
    return compare_results(run_attention(attention, inputs, dlse=dlse, backward=backward, **options), inputs, dlse=dlse, **options)


def compare_results(actual: dict[str, Tensor], inputs: AttentionInputs, *, dlse: Tensor | None = None, **options: Any) -> list[Comparison]:
    """Compare results that are there, out and lse and perhaps dq, dk, dv, with float64; see ``compare_attention``."""
    q, k, v, dout = (x.detach().double().cpu().numpy() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    backward = "dq" in actual
    baseline = run_attention(torch_attention, inputs, dlse=dlse, backward=backward, **options)
    exact = reference_options(options)
    expected = standard_attention(q, k, v, **exact)
    references = {"out": expected.out, "lse": expected.lse}
    if backward:
        gradients = standard_attention_backward(q, k, v, dout, None if dlse is None else dlse.double().cpu().numpy(), **exact)
        references |= {"dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
    return [
        compare(name, actual[name], reference, baseline[name], axis=2 if name == "lse" else 1) for name, reference in references.items()
    ]


def check_attention(attention: AttentionFunction, inputs: AttentionInputs, **arguments: Any) -> list[Comparison]:
    """``compare_attention`` for tests.

    Raises:
        AssertionError: a result leaves its bound; the message lists every result.
    """
    comparisons = compare_attention(attention, inputs, **arguments)
    if not all(c.ok for c in comparisons):  # raised, not asserted: a check must also work under python -O
        raise AssertionError("\n".join(map(str, comparisons)))
    return comparisons


def run_attention(
    attention: AttentionFunction, inputs: AttentionInputs, *, dlse: Tensor | None = None, backward: bool = True, **options: Any
) -> dict[str, Tensor]:
    """Out, lse of ``attention(q, k, v, **options)``, and dq, dk, dv where ``backward``; the gradient flows from dout and ``dlse``."""
    q, k, v = inputs.leaves() if backward else (inputs.q, inputs.k, inputs.v)
    out, lse = attention(q, k, v, **options)
    results = {"out": out, "lse": lse}
    if backward:
        outputs, cotangents = [out], [inputs.dout]
        if dlse is not None:
            outputs, cotangents = [out, lse], [inputs.dout, dlse]
        results |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(outputs, (q, k, v), cotangents), strict=True))
    return results
