"""What a launch must ask of torch about a CUDA device. One small seam: the tests replace it by devices that are not there."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from fa4.compiler.load import Resolver

resolve: Resolver | None = None
"""Where host code finds the functions through which it reaches CUDA; None for the DSL's own runtime library."""


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
