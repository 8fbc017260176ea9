"""torch's CUDA inside a block of ``attach``: host memory where an interface of torch wants tensors on a GPU.

torch can make a tensor that says ``cuda:0`` out of host memory, but without CUDA it then has no operation for it, and with CUDA the
wrong ones. So tensors stay what they are, CPU tensors on which every operation of torch works, and only the answers change
that an interface asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fa4.arch import get_arch
from fa4.runtime import dsl
from fa4.vgpu.errors import LaunchError


@contextmanager
def torch_cuda() -> Iterator[None]:
    """Let CPU tensors pass for CUDA tensors, inside a block of ``attach``.

    In the block ``tensor.is_cuda`` is True, ``device="cuda"`` and ``tensor.cuda()`` give host memory, and ``torch.cuda`` describes
    one device, the attached virtual GPU. ``tensor.device`` still says "cpu". New tensors of ``torch.empty`` hold 0xFF, NaN in every
    floating-point type, so that what kernels leave out shows.

    Raises:
        LaunchError: no virtual GPU is attached.
    """
    gpu = dsl.attached()
    if gpu is None:
        raise LaunchError("torch_cuda: no virtual GPU is attached; write `with fa4.vgpu.attach(arch), fa4.vgpu.torch_cuda():`")
    with ExitStack() as stack:
        for owner, name, value in _replacements(gpu.arch):
            if name in owner.__dict__:
                stack.callback(setattr, owner, name, owner.__dict__[name])
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, value)
        stack.enter_context(_HostMemory())
        yield


def _replacements(name: str) -> Iterator[tuple[Any, str, Any]]:
    """(object, attribute, new value)."""
    arch = get_arch(name)
    major, minor = arch.capability
    properties = SimpleNamespace(
        name=f"virtual GPU {name}",
        major=major,
        minor=minor,
        multi_processor_count=int(arch.sm_count),
        shared_memory_per_block_optin=int(arch.smem_per_block),
        L2_cache_size=int(arch.l2),
        warp_size=32,
    )
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    yield torch.Tensor, "is_cuda", property(lambda _tensor: True)
    for owner in (torch, torch.Tensor):
        for function in ("empty", "empty_like", "new_empty"):
            if hasattr(owner, function):
                yield owner, function, _unwritten(getattr(owner, function))
    for function, answer in {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "current_stream": stream,
        "get_device_capability": (major, minor),
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "set_device": None,
        "synchronize": None,
        "device": nullcontext(),
    }.items():
        yield torch.cuda, function, _constant(answer)


def _constant(answer: Any) -> Callable[..., Any]:
    return lambda *_arguments, **_options: answer


def _unwritten(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that makes a tensor without values, and fills its memory with 0xFF."""

    def make(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = original(*arguments, **options)
        if tensor.device.type == "cpu":
            torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)
        return tensor

    return make


class _HostMemory(TorchFunctionMode):
    """Functions of torch that are asked for a CUDA device get the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*map(_host, args), **{name: _host(value) for name, value in (kwargs or {}).items()})


def _host(value: Any) -> Any:
    """The CPU for a CUDA device; other arguments as they are."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value
