"""Typed errors: every message names the argument, its value, the rule it breaks and what would work."""

from __future__ import annotations


class Fa4Error(Exception):
    """Base of every error that fa4 raises on purpose."""


class ArgumentError(Fa4Error, ValueError):
    """A caller's argument breaks a rule; raised before any work is done.

    Attributes: ``argument`` (its name as the caller wrote it), ``value``, ``rule`` and ``remedy`` (what would work).
    """

    def __init__(self, argument: str, value: object, rule: str, remedy: str) -> None:
        super().__init__(f"{argument}={value!r}: {rule}; {remedy}")
        self.argument = argument
        self.value = value
        self.rule = rule
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[ArgumentError], tuple[str, object, str, str]]:
        """Pickle by parts: exceptions cross process borders in worker pools."""
        return type(self), (self.argument, self.value, self.rule, self.remedy)


class DtypeError(ArgumentError, TypeError):
    """A tensor's element type, or the type of an argument, is not one that works here."""


class ShapeError(ArgumentError):
    """Ranks, head counts or sizes do not fit together."""


class DeviceError(ArgumentError):
    """Tensors live on different devices, or on one that the backend cannot use."""


class BackendError(ArgumentError):
    """An unknown backend or architecture, or a pair that contradicts itself."""


class UnsupportedError(ArgumentError, NotImplementedError):
    """A well-formed request for which there is no implementation."""


class CompileError(Fa4Error):
    """A kernel could not be compiled or loaded, or its cache key could not be computed."""


class CudaError(Fa4Error):
    """CUDA, or the host code in front of it, refused to launch a kernel; the cause has what it said."""


class InspectionError(Fa4Error):
    """Generated code cannot be shown: a tool is missing, or its output is not understood."""


class ModelError(ArgumentError):
    """The performance model was given what does not fit together: a trace and another kernel's code, a machine without a needed rate."""
