"""User functions on scores: the handles that ``fa4.score_mod`` and ``fa4.mask_mod`` return, by name, and the tensors they read.

A score goes through softmax_scale, softcap, the score modifier and the masks, in this order. A handle names two forms of one function:
``device``, traced into a kernel and called for one score at a time, and ``torch``, its twin, called for whole tiles on the CPU.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fa4.errors import ArgumentError, DtypeError, UnsupportedError

AUX_DTYPES = ("float32", "float16", "bfloat16", "int32", "int64")
SIZES = ("B", "Hq", "Hkv", "Sq", "Sk")
"""Names of sizes of a call, as in the shapes of q (B, Sq, Hq, D) and k (B, Sk, Hkv, D)."""
MAX_AUX_RANK = 4

_SPECIFICATION = re.compile(r"(\w+)\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Aux:
    """A tensor that a function on scores reads: its name, element type and shape; a size is a name of ``SIZES``, a number or None (any)."""

    name: str
    dtype: str
    shape: tuple[str | int | None, ...]

    @classmethod
    def parse(cls, name: str, text: str) -> Aux:
        """From a text like "float32[Hq]", "int32[B, Sk]" or "float32[?, 3]".

        Raises:
            DtypeError: name or text is not a string, or an unknown element type.
            ArgumentError: anything else that it cannot be.
        """
        if not isinstance(name, str) or not isinstance(text, str):
            raise DtypeError("aux", {name: text}, "must map names to strings", 'for example {"slopes": "float32[Hq]"}')
        match = _SPECIFICATION.fullmatch(text.strip())
        if match is None:
            raise ArgumentError("aux", text, "must be dtype[sizes]", "for example 'float32[Hq]' or 'int32[B, Sk]'")
        if match[1] not in AUX_DTYPES:
            raise DtypeError("aux", text, f"element type {match[1]} is unknown", f"use one of {', '.join(AUX_DTYPES)}")
        shape = tuple(_size(word.strip(), text) for word in match[2].split(","))
        if len(shape) > MAX_AUX_RANK:
            raise ArgumentError("aux", text, f"has more than {MAX_AUX_RANK} dimensions", "merge some of them")
        return cls(name, match[1], shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('?' if size is None else str(size) for size in self.shape)}]"


def _size(word: str, text: str) -> str | int | None:
    if word == "?":
        return None
    if word in SIZES:
        return word
    if not (word.isascii() and word.isdigit()):
        rule = f"{word!r} is no size"
        raise ArgumentError("aux", text, rule, f"use {', '.join(SIZES)} (sizes of the call), a number, or ? for any")
    return int(word)


@dataclass(frozen=True)
class DeviceFunction:
    """What a kernel is compiled with: a function, and element type and rank of each tensor that it takes after its other arguments.

    ``gradient`` is what carries a gradient back through a score_mod, in backward kernels.
    """

    function: Callable[..., Any]
    aux: tuple[tuple[str, int], ...] = ()
    gradient: Callable[..., Any] | None = None


DeviceFunctions = tuple["DeviceFunction | None", "DeviceFunction | None"]
"""Of score_mod and mask_mod."""


@dataclass(frozen=True, eq=False, repr=False)
class Modifier:
    """A registered function on scores; made by ``fa4.score_mod`` and ``fa4.mask_mod`` only.

    Attributes:
        name: what it is registered as.
        device: function of scalars, traced into kernels; None where GPU backends cannot use it.
        torch: function of tensors that broadcast; None where the CPU backend cannot use it.
        aux: tensors that both take after their other arguments.
        content: hash of all of this but the name.
    """

    name: str
    device: Callable[..., Any] | None
    torch: Callable[..., Any] | None
    aux: tuple[Aux, ...]
    content: str

    def for_kernels(self) -> DeviceFunction | None:
        """What a forward kernel needs to know; names and sizes are not among it."""
        return None if self.device is None else DeviceFunction(self.device, tuple((aux.dtype, len(aux.shape)) for aux in self.aux))

    def for_backward(self) -> DeviceFunction | None:
        """What a backward kernel needs to know."""
        return self.for_kernels()

    def __repr__(self) -> str:
        return f"fa4.{type(self).__name__}({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by name: a process that unpickles it must have registered the same function under this name."""
        return _registered_here, (self.name, self.content)


@dataclass(frozen=True, eq=False, repr=False)
class ScoreMod(Modifier):
    """``score = f(score, batch, head, q_index, k_index, *aux)``. ``grad`` is its derivative for backward kernels, or None."""

    grad: Callable[..., Any] | None = None

    def for_backward(self) -> DeviceFunction | None:
        """With the derivative."""
        function = self.for_kernels()
        return function and replace(function, gradient=self.grad)


@dataclass(frozen=True, eq=False, repr=False)
class MaskMod(Modifier):
    """``visible = f(batch, head, q_index, k_index, *aux)``: a key is seen where this and the other masks say so."""


@dataclass(frozen=True)
class Modifiers:
    """The functions of one call, and their tensors: those of ``score``, then those of ``mask``."""

    score: ScoreMod | None = None
    mask: MaskMod | None = None
    aux: tuple[Any, ...] = ()

    @classmethod
    def named(cls, score_mod: ScoreMod | str | None, mask_mod: MaskMod | str | None, backend: str, direction: str = "forward") -> Modifiers:
        """Those that a request names, without their tensors.

        Raises:
            DtypeError: neither a handle nor a name.
            ArgumentError: a name that is not registered.
            UnsupportedError: a function has no form for the backend, or for "backward" there no derivative.
        """
        score = None if score_mod is None else find("score_mod", score_mod, ScoreMod)
        mask = None if mask_mod is None else find("mask_mod", mask_mod, MaskMod)
        for argument, modifier in (("score_mod", score), ("mask_mod", mask)):
            if modifier is not None:
                _check_form(argument, modifier, backend)
        found = cls(score, mask)
        if direction == "backward" and backend != "cpu":
            found.check_derivative()
        return found

    def check_derivative(self) -> None:
        """Raise UnsupportedError where a backward kernel could not be compiled with these functions."""
        if self.score is not None and self.score.grad is None:
            rule = "has no derivative, which gradients by a GPU kernel need"
            remedy = "register it with grad=..., or for the forward alone use torch.no_grad()"
            raise UnsupportedError("score_mod", self.score.name, rule, remedy)

    @property
    def functions(self) -> DeviceFunctions:
        """What a forward kernel is compiled with."""
        return (self.score.for_kernels() if self.score else None), (self.mask.for_kernels() if self.mask else None)

    def functions_for(self, direction: str) -> DeviceFunctions:
        """What a kernel of this direction is compiled with."""
        if direction != "backward":
            return self.functions
        return (self.score.for_backward() if self.score else None), (self.mask.for_backward() if self.mask else None)

    @property
    def declared(self) -> tuple[Aux, ...]:
        """What ``aux`` must be."""
        return (self.score.aux if self.score else ()) + (self.mask.aux if self.mask else ())

    @property
    def score_aux(self) -> tuple[Any, ...]:
        """The tensors of ``score``."""
        return self.aux[: len(self.score.aux)] if self.score else ()

    @property
    def mask_aux(self) -> tuple[Any, ...]:
        """The tensors of ``mask``."""
        return self.aux[len(self.score.aux) if self.score else 0 :]


Kind = TypeVar("Kind", bound=Modifier)

_registered: dict[str, Modifier] = {}
_lock = threading.Lock()


def register(modifier: Kind) -> Kind:
    """Keep a handle under its name; the one that is there already where it has the same content.

    Raises:
        ArgumentError: the name belongs to other content. Graphs of ``torch.compile`` hold names, so what a name means never changes.
    """
    with _lock:
        there = _registered.setdefault(modifier.name, modifier)
    if type(there) is not type(modifier) or there.content != modifier.content:
        raise ArgumentError("name", modifier.name, "is registered with other content", "use another name, or start a new process")
    return there


def find(argument: str, value: object, kind: type[Kind]) -> Kind:
    """The handle that an argument of a call means: itself, or by name.

    Raises:
        DtypeError: neither a handle of this kind nor a name.
        ArgumentError: nothing of this kind is registered under the name.
    """
    what = "score_mod" if kind is ScoreMod else "mask_mod"
    if isinstance(value, kind):
        name = value.name
    elif isinstance(value, str):
        name = value
    else:
        raise DtypeError(argument, value, f"must be what fa4.{what} returned, or its name", f"register the function with fa4.{what}(...)")
    there = _registered.get(name)
    if not isinstance(there, kind) or (isinstance(value, kind) and there is not value):
        rule = f"no {what} is registered under this name in this process"
        raise ArgumentError(argument, name, rule, f"register it first: fa4.{what}({name!r}, ...)")
    return there


def _registered_here(name: str, content: str) -> Modifier:
    """Unpickle a handle.

    Raises:
        ArgumentError: this process has not registered it, or something else under its name.
    """
    there = _registered.get(name)
    if there is None or there.content != content:
        rule = "is not registered in this process" if there is None else "is registered with other content in this process"
        raise ArgumentError("name", name, rule, "import the module that registers it before unpickling")
    return there


def _check_form(argument: str, modifier: Modifier, backend: str) -> None:
    if backend == "cpu" and modifier.torch is None:
        raise UnsupportedError(argument, modifier.name, "has no torch twin, which backend 'cpu' needs", "register it with torch=...")
    if backend != "cpu" and modifier.device is None:
        rule = f"has no device function, which backend {backend!r} needs"
        raise UnsupportedError(argument, modifier.name, rule, "register it with device=...")


def order_aux(modifiers: Modifiers, aux: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """The tensors of a call in the order that ``Modifiers`` keeps them.

    Raises:
        DtypeError: ``aux`` is no mapping.
        ArgumentError: a name is missing, or nobody asks for it.
    """
    if aux is not None and not isinstance(aux, Mapping):
        raise DtypeError("aux", type(aux).__name__, "must map names to tensors", 'for example {"slopes": slopes}')
    given = aux or {}
    wanted = [each.name for each in modifiers.declared]
    for name in wanted:
        if name not in given:
            raise ArgumentError("aux", sorted(given), f"has no {name!r}", f"pass aux={{{name!r}: tensor, ...}}")
    for name in given:
        if name not in wanted:
            rule = f"{name!r} is read by neither score_mod nor mask_mod"
            raise ArgumentError("aux", sorted(given), rule, f"leave it out; they read {wanted}" if wanted else "leave it out")
    return tuple(given[name] for name in wanted)
