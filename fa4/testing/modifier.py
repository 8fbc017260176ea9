"""Functions on scores for the definition of correctness: torch twins in float64, as ``fa4.reference`` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fa4 import modifier, reference
from fa4.cpu.modifier import Indices, modify, score_gradient
from fa4.modifier import Modifiers


def bound(
    score_mod: modifier.ScoreMod | str | None = None,
    mask_mod: modifier.MaskMod | str | None = None,
    aux: Mapping[str, Tensor] | None = None,
) -> Modifiers | None:
    """The functions and tensors of a call, in the terms of ``fa4.attention``; None without any.

    Raises:
        ArgumentError: one of its children: a name is not registered, a function has no twin, a tensor is missing.
    """
    if score_mod is None and mask_mod is None:
        return None
    modifiers = Modifiers.named(score_mod, mask_mod, "cpu")
    return replace(modifiers, aux=modifier.order_aux(modifiers, aux))


def reference_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``fa4.attention`` as those of ``fa4.reference.standard_attention``."""
    names = ("score_mod", "mask_mod", "aux")
    modifiers = bound(**{name: options[name] for name in names if name in options})
    others = {name: value for name, value in options.items() if name not in names}
    if modifiers is None:
        return others
    aux = (x.double() if x.is_floating_point() else x for x in (y.cpu() for y in modifiers.aux))
    exact = Modifiers(modifiers.score, modifiers.mask, tuple(aux))
    only_score, only_mask = Modifiers(exact.score, None, exact.score_aux), Modifiers(None, exact.mask, exact.mask_aux)

    def function(scores: Any, *where: Any) -> Any:
        return modify(_tensor(scores), _indices(*where), only_score).numpy()

    def gradient(dscores: Any, scores: Any, *where: Any) -> Any:
        return score_gradient(_tensor(dscores), _tensor(scores), _indices(*where), only_score).numpy()

    def seen(*where: Any) -> Any:
        zeros = torch.zeros(len(where[2]), where[3].shape[1], dtype=torch.float64)
        return (modify(zeros, _indices(*where), only_mask) == 0).numpy()

    return {
        **others,
        "score_mod": reference.ScoreMod(function, gradient) if exact.score else None,
        "mask_mod": seen if exact.mask else None,
    }


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float64))


def _indices(batch: int, head: int, queries: Any, keys: Any) -> Indices:
    return Indices(torch.tensor(batch), torch.tensor(head), torch.from_numpy(queries), torch.from_numpy(keys))
