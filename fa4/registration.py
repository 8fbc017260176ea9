"""``fa4.score_mod`` and ``fa4.mask_mod``: functions on scores, checked and registered under a name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fa4.compiler.key import digest, function_key
from fa4.errors import ArgumentError, CompileError, DtypeError
from fa4.modifier import Aux, MaskMod, ScoreMod, register

Function = Callable[..., Any]

_INDICES = ("batch", "head", "q_index", "k_index")


def score_mod(
    name: str,
    *,
    device: Function | None = None,
    torch: Function | None = None,
    grad: Function | None = None,
    aux: Mapping[str, str] | None = None,
) -> ScoreMod:
    """Register a function that changes scores: ``score = f(score, batch, head, q_index, k_index, *aux)``.

    Scores come scaled and capped, in natural units; masks apply afterwards. Indices are those of the whole tensors, ``head`` of query
    heads. Both forms must compute the same.

    Args:
        name: any text; what a graph of ``torch.compile`` or another process knows the function by.
        device: for GPU backends: a function of CuTe-DSL, ``@cute.jit`` or plain Python that the DSL can trace, of one score: Float32,
            four Int32 and ``cute.Tensor`` for each of ``aux``; returns a number.
        torch: for the CPU backend: the same of tensors that broadcast against each other: scores in float32, indices in int64. Returns
            scores, in that shape or one that broadcasts to it. Its derivative is torch's own (``torch.func.vjp``).
        grad: for gradients by GPU kernels: ``dscore = f(dscore, score, batch, head, q_index, k_index, *aux)``, a device function: the
            derivative at ``score``, what ``device`` is given, times ``dscore``. It must be linear in ``dscore``: kernels pass other
            factors of the product in its place.
        aux: name to element type and shape of each tensor that the functions read, in the order of their last parameters, for example
            ``{"slopes": "float32[Hq]"}``. Sizes are B, Hq, Hkv, Sq, Sk (those of the call), numbers, or ? for any.

    Returns:
        The handle to pass to ``fa4.attention(..., score_mod=handle, aux={"slopes": slopes})``; its name will do as well.

    Raises:
        ArgumentError: neither form is given, one does not take its arguments, a name that is registered with other content, or a
            function that cannot be told apart from others, since it captures a tensor, for example.
        DtypeError: an argument of the wrong type.
    """
    tensors = _check(name, {"device": device, "torch": torch, "grad": grad}, aux, ("score", *_INDICES))
    content = _content("score_mod", {"device": device, "torch": torch, "grad": grad}, tensors)
    return register(ScoreMod(name, device, torch, tensors, content, grad))


def mask_mod(name: str, *, device: Function | None = None, torch: Function | None = None, aux: Mapping[str, str] | None = None) -> MaskMod:
    """Register a function that hides keys: ``visible = f(batch, head, q_index, k_index, *aux)``.

    A query sees a key where this function and the other masks (causal, window) say so. The arguments are those of ``score_mod``; a
    result is a truth value.

    Args:
        name: as for ``score_mod``.
        device: for GPU backends: of four Int32 and ``cute.Tensor`` for each of ``aux``; returns a Boolean.
        torch: for the CPU backend: of int64 tensors that broadcast; returns bool.
        aux: as for ``score_mod``.

    Returns:
        The handle to pass to ``fa4.attention(..., mask_mod=handle)``.

    Raises:
        ArgumentError, DtypeError: as ``score_mod``.
    """
    tensors = _check(name, {"device": device, "torch": torch}, aux, _INDICES)
    return register(MaskMod(name, device, torch, tensors, _content("mask_mod", {"device": device, "torch": torch}, tensors)))


def _check(name: str, forms: Mapping[str, Function | None], aux: Mapping[str, str] | None, parameters: tuple[str, ...]) -> tuple[Aux, ...]:
    """The tensors that are read, everything checked.

    Raises:
        ArgumentError, DtypeError: see ``score_mod``.
    """
    if not isinstance(name, str):
        raise DtypeError("name", name, "must be a string", "for example 'alibi'")
    if not name:
        raise ArgumentError("name", name, "must not be empty", "for example 'alibi'")
    if aux is not None and not isinstance(aux, Mapping):
        raise DtypeError("aux", type(aux).__name__, "must map names to element types and shapes", 'for example {"slopes": "float32[Hq]"}')
    tensors = tuple(Aux.parse(key, text) for key, text in (aux or {}).items())
    if forms["device"] is None and forms["torch"] is None:
        raise ArgumentError("device", None, "neither device nor torch is given", "give one of them, or both")
    for argument, function in forms.items():
        if function is None:
            continue
        if not callable(function):
            raise DtypeError(argument, function, "must be a function", "pass the function itself")
        if getattr(type(function), "__hash__", None) is None:
            raise DtypeError(argument, type(function).__name__, "must be hashable", "make its class a frozen dataclass")
        takes = ("dscore", *parameters) if argument == "grad" else parameters
        _check_arity(argument, function, (*takes, *(each.name for each in tensors)))
    return tensors


def _check_arity(argument: str, function: Function, takes: tuple[str, ...]) -> None:
    label = getattr(function, "__qualname__", repr(function))
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise DtypeError(argument, label, "its parameters cannot be read", "pass a function written in Python") from None
    try:
        signature.bind(*takes)
    except TypeError as error:
        rule = f"must take ({', '.join(takes)}), but {error}"
        raise ArgumentError(argument, f"{label}{signature}", rule, "give it these parameters, tensors of aux last") from None


def _content(kind: str, forms: Mapping[str, Function | None], aux: tuple[Aux, ...]) -> str:
    """What two registrations under one name must have in common.

    Raises:
        ArgumentError: a function has no key.
    """
    keys: dict[str, str | None] = {}
    for argument, function in forms.items():
        try:
            keys[argument] = None if function is None else function_key(function)
        except CompileError as error:
            label = getattr(function, "__qualname__", repr(function))
            raise ArgumentError(argument, label, str(error), "pass tensors as aux instead of capturing them") from error
    return digest([kind, keys, [[each.name, str(each)] for each in aux]])
