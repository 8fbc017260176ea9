"""User functions on scores in the CPU backend's tiles: the torch twins of ``fa4.modifier``, and the derivative of the score's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fa4.cpu.tiles import Pairs
from fa4.errors import DtypeError, ShapeError
from fa4.modifier import Modifiers

Result = TypeVar("Result")


class Indices(NamedTuple):
    """What a twin gets beside scores: int64 tensors that broadcast to a tile (pairs, rows, keys), or to any other shape of scores."""

    batch: Tensor
    head: Tensor
    q_index: Tensor
    k_index: Tensor

    @classmethod
    def of(cls, pairs: Pairs, at: range, keys: range) -> Indices:
        """Those of a tile: query positions ``at``, each with the query heads of the pair's group, by keys."""
        batches = torch.arange(pairs.batches.start, pairs.batches.stop)
        heads = torch.arange(pairs.heads.start, pairs.heads.stop)
        head = heads.repeat(len(batches))[:, None] * pairs.group + torch.arange(pairs.group).repeat(len(at))
        return cls(
            batches.repeat_interleave(len(heads))[:, None, None],
            head[:, :, None],
            torch.arange(at.start, at.stop).repeat_interleave(pairs.group)[None, :, None],
            torch.arange(keys.start, keys.stop)[None, None, :],
        )


def modify(s: Tensor, indices: Indices, modifiers: Modifiers) -> Tensor:
    """Scaled and capped scores after the score modifier, -inf where the mask modifier hides a key; overwrites ``s``.

    Raises:
        DtypeError, ShapeError: what a twin returns.
    """
    if modifiers.score is not None:
        s.copy_(_score(s, indices, modifiers))
    if modifiers.mask is not None:
        seen = _result("mask_mod", modifiers.mask.torch(*indices, *modifiers.mask_aux), s)  # type: ignore[misc]  # a mask has a twin here
        s.masked_fill_(~seen, -torch.inf)
    return s


def score_gradient(ds: Tensor, s: Tensor, indices: Indices, modifiers: Modifiers) -> Tensor:
    """Gradient of the scores before the score modifier from that after it, 0 where that is 0; ``s`` are the scores before.

    By autograd, which must be able to record (see ``outside_of_ops``).
    """
    if modifiers.score is None:
        return ds
    with torch.enable_grad():
        x = s.detach().requires_grad_()
        result = _score(x, indices, modifiers).expand_as(x)
    if not result.requires_grad:
        return torch.zeros_like(ds)
    (gradient,) = torch.autograd.grad(result, x, ds.to(result.dtype), allow_unused=True, materialize_grads=True)
    return gradient.masked_fill(ds == 0, 0.0)  # a hidden key contributes nothing, whatever the derivative is there


def outside_of_ops(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function where autograd can be turned on: in the implementation of an op torch has taken it away from the thread."""

    def call() -> Result:
        with torch.no_grad():
            return function(*arguments)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def _score(s: Tensor, indices: Indices, modifiers: Modifiers) -> Tensor:
    twin: Any = modifiers.score.torch if modifiers.score else None
    return _result("score_mod", twin(s, *indices, *modifiers.score_aux), s)


def _result(argument: str, result: object, s: Tensor) -> Tensor:
    what = "bool" if argument == "mask_mod" else "floating-point"
    if not isinstance(result, Tensor) or (result.dtype != torch.bool if what == "bool" else not result.is_floating_point()):
        kind = str(result.dtype) if isinstance(result, Tensor) else type(result).__name__
        raise DtypeError(argument, kind, f"its torch twin must return a {what} tensor", "change the twin")
    try:
        result.expand_as(s)
    except RuntimeError:
        rule = f"its torch twin must return a shape that broadcasts to that of its scores, {tuple(s.shape)}"
        raise ShapeError(argument, tuple(result.shape), rule, "compute elementwise from the indices") from None
    return result
