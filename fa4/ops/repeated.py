"""A call like one before it, on the CPU: torch's kernel at once.

What ``fa4.attention`` does around that kernel, checks of arguments and the choice of a way, takes 0.1 ms where the kernel has emptied the
CPU's caches, several percent of a call with 512 keys. All of it depends on what ``_key`` has, and on nothing else where ``_plain`` holds
and nothing is ``watched``. So it is done for the first call of a kind.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fa4._settings import current
from fa4.cpu import torch_flash
from fa4.problem import AttentionOptions

_MOST = 256
"""Kinds of calls to remember; after so many they are found anew."""


class Call(NamedTuple):
    """A kind of calls that torch's kernel serves at once."""

    causal: bool
    softmax_scale: float
    backward_at_once: bool

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the op takes after the tensors."""
        return self.softmax_scale, None, 0 if self.causal else None, 0.0, False, "cpu", None


_calls: dict[Any, Call] = {}


def recorded(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether autograd records what is done with them."""
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether others than autograd would notice an op: a compiler, a tracer, a transform, a mode, autocast, a subclass, another device."""
    return (
        torch.compiler.is_compiling()
        or not (type(q) is type(k) is type(v) is Tensor and q.is_cpu)
        or torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def usual() -> bool:
    """Whether neither settings nor torch ask for another way."""
    return current().cpu_path == "auto" and not torch.are_deterministic_algorithms_enabled()


def known(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None) -> Call | None:
    """A call of which nothing has been checked, if ``remember`` was told of one like it; else None."""
    if watched(q, k, v) or not _plain(q, k, v) or not isinstance(causal, bool) or type(softmax_scale) not in (float, type(None)):
        return None
    call = _calls.get(_key(q, k, v, causal, softmax_scale))
    return call if usual() else None


def remember(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, options: AttentionOptions) -> None:
    """A call that has been checked and is not ``watched``, if torch's kernel serves it at once; ``softmax_scale`` as it was given."""
    causal = options.window_right == 0
    if options.window_left is None and torch_flash.fits_at_once(q, k, v, options) and _plain(q, k, v):
        if len(_calls) >= _MOST:
            _calls.clear()
        call = Call(causal, options.softmax_scale, torch_flash.backward_fits_at_once(q, k, v))
        _calls[_key(q, k, v, causal, softmax_scale)] = call


def _plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether shapes, strides and dtypes say all about them: on the CPU and dense."""
    return k.is_cpu and v.is_cpu and q.layout is k.layout is v.layout is torch.strided and not (q.is_nested or k.is_nested or v.is_nested)


def _key(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None) -> Any:
    return q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, causal, softmax_scale
