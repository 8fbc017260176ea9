"""Execution on CUDA tensors: compiled host code launches on the tensors' own device and on torch's current stream there.

A kernel is loaded to a device once, when it is first wanted there. A later call asks for the stream and calls the host code, which
checks its arguments, makes the tensors' device current where it is not, launches, and makes the former device current again, also
where the launch fails. So a call that is captured into a CUDA graph consists of one kernel launch: results come from torch's
allocator, and nothing waits, loads or records an event.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from torch import Tensor

from fa4 import dispatch
from fa4.arch import arch_for_capability
from fa4.compiler.artifact import Artifact
from fa4.compiler.load import cuda_error
from fa4.errors import BackendError, CudaError
from fa4.problem import AttentionOptions, AttentionProblem, Direction
from fa4.runtime import backward, device, forward
from fa4.runtime.backward import Saved
from fa4.runtime.forward import Scalar

_log = logging.getLogger(__name__)

# (identity of an artifact, device) -> the artifact, which keeps its identity taken, and its host code, loaded to the device.
_functions: dict[tuple[int, int], tuple[Artifact, Callable[..., Any]]] = {}
_lock = threading.Lock()


def attention_forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, arch: str | None) -> tuple[Tensor, Tensor]:
    """``fa4.runtime.forward.attention_forward`` of CUDA tensors, on their device. ``arch`` None is the device's own architecture.

    Raises:
        BackendError: there are no kernels for this device, or ``arch`` is not its architecture.
        CudaError: the host code or CUDA refused the call.
    """
    index = q.get_device()
    own = target(index, arch)
    _announce("forward", own, (q.shape[3], v.shape[3]))
    return forward.attention_forward(q, k, v, options, own, partial(run, index))


def attention_backward(saved: Saved, options: AttentionOptions, arch: str | None) -> tuple[Tensor | None, ...]:
    """``fa4.runtime.backward.attention_backward`` of CUDA tensors, on their device; ``arch`` as for the forward.

    Raises:
        BackendError: there are no kernels for this device, or ``arch`` is not its architecture.
        CudaError: the host code or CUDA refused a call.
    """
    index = saved.q.get_device()
    return backward.attention_backward(saved, options, target(index, arch), partial(run, index))


def run(
    index: int,
    artifact: Artifact,
    inputs: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
    scalars: Sequence[Scalar],
    aux: Sequence[Tensor] = (),
    *,
    updated: Sequence[Tensor | None] = (),
) -> None:
    """Call the host code of ``artifact`` with tensors of device ``index``, on its current stream; the order is that of ``virtual.run``.

    Raises:
        CompileError: the kernel cannot be loaded there.
        CudaError: the host code or CUDA refused the call.
    """
    found = _functions.get((id(artifact), index)) or _load(artifact, index)
    try:
        found[1](*inputs, *updated, *outputs, *scalars, device.current_stream(index), *aux)
    except Exception as error:
        raise CudaError(f"{artifact.function} on cuda:{index}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What host code says in one line; for a status of CUDA its name, since tvm-ffi has the number, and cutlass, where loaded, a report."""
    status = re.search(r"(?i)\berror code:? (\d+)", str(error))
    return cuda_error(int(status[1])) if status else str(error)


@lru_cache(maxsize=256)
def target(index: int, arch: str | None = None) -> str:
    """The architecture whose kernels run on device ``index``; asked of a device once.

    Raises:
        BackendError: there are no kernels for this device, or ``arch`` is not its architecture.
    """
    own = arch_for_capability(device.capability(index))
    if arch is not None and arch != own.name:
        raise BackendError("arch", arch, f"is not the architecture of cuda:{index}, {own.name}", "leave arch out on CUDA tensors")
    return own.name


@lru_cache(maxsize=256)
def _announce(direction: Direction, arch: str, head_dims: tuple[int, int]) -> None:
    """Say once where the Ampere kernel stands in for one of the architecture's own."""
    support = dispatch.kernel_support(AttentionProblem(direction, "bfloat16", *head_dims), arch)
    if support and not support.native:
        _log.warning("%s (compiled for %s)", support.reason, arch)


def _load(artifact: Artifact, index: int) -> tuple[Artifact, Callable[..., Any]]:
    key = id(artifact), index
    with _lock:
        if key not in _functions:
            with device.on_device(index):
                _functions[key] = artifact, device.load(artifact, index)
        return _functions[key]
