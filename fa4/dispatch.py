"""Which implementation serves which request: one literal table, imported lazily, and ``support``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

from fa4.arch import ARCHS, get_arch
from fa4.config import blackwell_backward_refusal, blackwell_forward_refusal
from fa4.errors import UnsupportedError
from fa4.problem import AttentionProblem

BACKENDS = ("cpu", "cuda", "vgpu")

# (operation, "cpu", architecture family or "any" of them) -> "module:function", or "module:Class" of a kernel.
IMPLEMENTATIONS = {
    ("forward", "cpu"): "fa4.cpu.forward:attention_forward",
    ("backward", "cpu"): "fa4.cpu.backward:attention_backward",
    ("forward", "ampere"): "fa4.kernels.ampere.forward.kernel:AmpereForward",
    ("forward", "blackwell"): "fa4.kernels.blackwell.forward.kernel:BlackwellForward",
    ("backward", "blackwell"): "fa4.kernels.blackwell.backward.kernel:BlackwellBackward",
    ("preprocess", "any"): "fa4.kernels.auxiliary.preprocess:Preprocess",
    ("postprocess", "any"): "fa4.kernels.auxiliary.postprocess:Postprocess",
}
# Rows that do not serve every request: why not, or None.
REFUSALS = {("forward", "blackwell"): blackwell_forward_refusal, ("backward", "blackwell"): blackwell_backward_refusal}

CPU_DTYPES = ("float16", "bfloat16", "float32")
GPU_DTYPES = ("float16", "bfloat16")
MAX_GPU_HEAD_DIM = 256
_INSTEAD = "backend 'cpu' serves this request"


@dataclass(frozen=True)
class Support:
    """Whether a request is served, and why not. True in a boolean context where it is.

    ``native`` is false where not by the architecture's own kernel but by the Ampere kernel, compiled for it; ``reason`` then says why.
    """

    ok: bool
    reason: str = ""
    native: bool = True

    def __bool__(self) -> bool:
        return self.ok


def allowed_dtypes(backend: str) -> tuple[str, ...]:
    """Element types of q, k and v that a backend takes."""
    return CPU_DTYPES if backend == "cpu" else GPU_DTYPES


def head_dim_rule(backend: str, head_dim: int) -> str | None:
    """The rule that ``head_dim`` breaks on a backend, or None where it is fine."""
    if backend == "cpu":
        return None if head_dim >= 1 else "must be at least 1"
    # 16-byte copies need 8 elements of 16 bits; 256 is what shared memory holds.
    if head_dim % 8 or not 8 <= head_dim <= MAX_GPU_HEAD_DIM:
        return f"must be a multiple of 8 from 8 to {MAX_GPU_HEAD_DIM} on a GPU backend"
    return None


def support(problem: AttentionProblem, backend: str, arch: str | None) -> Support:
    """Whether ``problem`` is served by ``backend`` ("cpu", or "cuda" and "vgpu" with ``arch``)."""
    return _accepted(problem, backend) if backend == "cpu" else kernel_support(problem, arch)


def kernel_support(problem: AttentionProblem, arch: str | None) -> Support:
    """Whether there is a GPU kernel for ``problem``, for ``arch`` or, without it, for some GPU."""
    accepted = _accepted(problem, "cuda")
    if not accepted:
        return accepted
    if arch is None:
        families = dict.fromkeys(known.family for known in ARCHS.values())
        served = any(kernel_target(problem, family) for family in families)
        return Support(served, "" if served else f"no {problem.direction} kernel for any GPU; {_INSTEAD}")
    family = get_arch(arch).family
    row = kernel_target(problem, family)
    if row is None:
        why = refusal(problem, family) or f"no {problem.direction} kernel for {arch} yet"
        return Support(False, f"{why}; {_INSTEAD}")
    if row[1] in (family, "any"):
        return Support(True)
    why = refusal(problem, family) or f"{arch} has no {problem.direction} kernel of its own yet"
    return Support(True, f"{why}; the Ampere kernel serves this request", native=False)


def _accepted(problem: AttentionProblem, backend: str) -> Support:
    if problem.dtype not in allowed_dtypes(backend):
        return Support(False, f"dtype {problem.dtype} is not one of {', '.join(allowed_dtypes(backend))} on backend {backend}")
    for name in ("head_dim", "head_dim_v"):
        value = getattr(problem, name)
        rule = head_dim_rule(backend, value)
        if rule:
            return Support(False, f"{name} {value} {rule}")
    return Support(True)


@lru_cache
def load(direction: str, target: str) -> Callable[..., Any]:
    """The implementation of a direction for "cpu" or an architecture family."""
    module, function = IMPLEMENTATIONS[direction, target].split(":")
    implementation: Callable[..., Any] = getattr(import_module(module), function)
    return implementation


def refusal(problem: AttentionProblem, family: str) -> str | None:
    """Why the family's own kernel, where there is one, does not serve a request; None where it does."""
    rule = REFUSALS.get((problem.direction, family))
    return rule(problem.head_dim, problem.head_dim_v) if rule else None


def kernel_target(problem: AttentionProblem, family: str) -> tuple[str, str] | None:
    """The row that serves a request: the family's own, else one that runs on every GPU of today, as the Ampere kernel does; else None."""
    rows = ((problem.direction, target) for target in (family, "any", "ampere"))
    return next((row for row in rows if row in IMPLEMENTATIONS and not refusal(problem, row[1])), None)


def kernel(problem: AttentionProblem, arch: str) -> str:
    """The kernel class that serves a request on an architecture, as "module:Class", without importing it.

    Raises:
        UnsupportedError: there is none.
        BackendError: an unknown architecture.
    """
    row = kernel_target(problem, get_arch(arch).family)
    if row is None:
        raise UnsupportedError("arch", arch, f"there is no {problem.direction} kernel for it yet", "fa4.supports(...) says what is served")
    return IMPLEMENTATIONS[row]
