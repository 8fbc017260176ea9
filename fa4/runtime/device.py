"""What a launch asks of CUDA devices, and the way to them: a small seam, which the tests replace by devices that are not there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fa4.compiler.artifact import Artifact
from fa4.compiler.load import load_function


def capability(index: int) -> tuple[int, int]:
    """Compute capability (major, minor) of device ``index``."""
    return torch.cuda.get_device_capability(index)


def current_stream(index: int) -> int:
    """The handle (``cudaStream_t``) of torch's current stream of device ``index``."""
    handle: int = torch._C._cuda_getCurrentRawStream(index)  # what torch's own generated code calls: no Stream object is made
    return handle


def on_device(index: int) -> AbstractContextManager[None]:
    """A block in which ``index`` is the current device."""
    return torch.cuda.device(index)


def load(artifact: Artifact, index: int) -> Callable[..., Any]:
    """The host function of ``artifact``, bound to the DSL's runtime library, its machine code loaded to device ``index``.

    Raises:
        CompileError: it cannot be loaded there.
    """
    return load_function(artifact, device=index)
