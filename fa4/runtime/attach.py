"""Any CuTe-DSL function on the virtual GPU: what is compiled and called inside ``with attach(...)`` runs on the CPU, checked.

The DSL asks an execution engine for the machine code of its host function, and that code asks ``libcute_dsl_runtime.so`` for CUDA. Here
``fa4.compiler.link`` is the engine: it loads the same object code that ``export_to_c`` would write, and binds its calls of CUDA to
``fa4.vgpu.driver``. Of the ways to put something in CUDA's place this one needs neither a C compiler nor a library file, and each compiled
function keeps its own PTX, so that kernels whose shortened names are equal cannot be confused.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal

import torch

from fa4 import _settings
from fa4.arch import get_arch
from fa4.runtime import dsl
from fa4.runtime.tensors import HostTensor, extent, on_host
from fa4.runtime.virtual import Region, launch, region, registered
from fa4.vgpu.driver import LaunchRequest
from fa4.vgpu.errors import LaunchError
from fa4.vgpu.machine import Checks, Gpu
from fa4.vgpu.program import Program
from fa4.vgpu.scheduler import Schedule

# Tensors that were arguments, by their id: (the tensor, its memory). For all blocks, since a tensor may be used in several.
_seen: dict[int, tuple[weakref.ref[Any], Region]] = {}


class AttachedGpu(Gpu):
    """The virtual GPU of ``attach``: a ``fa4.vgpu.Gpu`` that finds the memory of the tensors it is given.

    Every tensor or array that reaches the DSL is memory that kernels may read and write, with exact bounds, as long as the DSL or a
    running call holds it. Memory that only a pointer leads to (``make_ptr``) must be registered.
    """

    def __init__(self, arch: str, sms: int | None = None, **options: Any) -> None:
        super().__init__(arch, **options)
        self.sms = int(get_arch(arch).sm_count) if sms is None else sms
        self._registered: list[tuple[Any, Region]] = []

    def register(self, array: Any, name: str, writable: bool = True) -> int:
        """Let kernels use the memory of a CPU tensor or array, until the block ends; its address.

        Strided arrays are registered from their first element to their last. With ``writable=False`` a write is an error, also through a
        tensor that overlaps it.

        Raises:
            LaunchError: it has no memory on the host, or its library does not give it away.
        """
        if not on_host(array):
            raise LaunchError(f"register({name!r}): {type(array).__name__} is no CPU tensor or array")
        try:
            memory = region(array.__dlpack__(), name, writable)
        except BufferError as error:  # a read-only array of numpy, a tensor that requires gradients
            raise LaunchError(f"register({name!r}): {error}") from error
        self._registered.append((array, memory))
        return memory.begin

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A CPU tensor whose bytes are all 0xFF, NaN in every floating-point type: what a kernel forgets to write shows."""
        tensor = torch.empty(shape, dtype=dtype)
        tensor.view(-1).view(torch.uint8).fill_(0xFF)
        return tensor

    def see(self, holder: Any, capsule: Any) -> None:
        """Make memory usable as long as ``holder`` lives."""
        name = "tensor " + ("x".join(map(str, extent(capsule).shape)) or "scalar")
        _seen[id(holder)] = weakref.ref(holder), region(capsule, name, True)

    def views(self, arguments: Any) -> tuple[Any, Any]:
        """Arguments with each CPU tensor, at any depth, as one that lies on a GPU; and what keeps their memory usable while it lives."""
        import tvm_ffi

        views = []

        def convert(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: convert(item) for key, item in value.items()}
            if isinstance(value, (tuple, list)):
                items = [convert(item) for item in value]
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
            if is_dataclass(value) and not isinstance(value, type):
                old = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
                new = {name: item for name, item in zip(old, map(convert, old.values()), strict=True) if item is not old[name]}
                return replace(value, **new) if new else value
            if not on_host(value):
                return value
            view = HostTensor(value.detach() if isinstance(value, torch.Tensor) else value)
            self.see(view, view.__dlpack__())
            views.append(view)
            return tvm_ffi.from_dlpack(view)

        return convert(arguments), views

    def run(self, program: Program, request: LaunchRequest) -> None:
        """Launch with all memory that is known now."""
        for key in [key for key, (holder, _) in _seen.items() if holder() is None]:
            del _seen[key]
        with registered(self, [memory for _, memory in (*self._registered, *_seen.values())]):
            launch(self, program, request)


@contextmanager
def attach(
    arch: str = "sm_80",
    *,
    seed: int | None = None,
    schedule: Schedule | None = None,
    delay: Literal["late", "early"] | None = None,
    checks: Checks | None = None,
    processes: int | None = None,
    line_info: bool = True,
    sms: int | None = None,
    **options: Any,
) -> Iterator[AttachedGpu]:
    """Run CuTe-DSL functions on a virtual GPU: ``cute.compile`` and calls, or calls of ``@cute.jit`` functions, inside the block.

    Functions are compiled for ``arch``. Tensors are CPU tensors or arrays, passed as for a GPU: by ``from_dlpack``, directly, or as
    pointers to registered memory. Call ``from_dlpack`` inside the block, so that they count as device memory. A function compiled in one
    block may be called in later ones, with another seed or schedule. A process has one block at a time, since the DSL is changed for it.

    Args:
        arch: compile target and machine, such as "sm_80".
        seed: see ``fa4.vgpu.Gpu``; None is the setting ``vgpu_seed``.
        schedule: see ``fa4.vgpu.Gpu``; None is the setting ``vgpu_schedule``.
        delay: see ``fa4.vgpu.Gpu``; None is the setting ``vgpu_delay``.
        checks: see ``fa4.vgpu.Gpu``; None is the setting ``vgpu_checks``.
        processes: see ``fa4.vgpu.Gpu``; None is the setting ``vgpu_processes``.
        line_info: compile with a line table, so that errors and reports name source lines. Tracing takes about twice as long.
        sms: how many SMs functions are told that there are; None: as many as the architecture has. Kernels that are compiled for a number
            of blocks, such as persistent ones, use it.
        options: the other arguments of ``fa4.vgpu.Gpu``: ``resident``, ``approximate``, ``unwritten``, ``execution``, which is the setting
            ``vgpu_execution`` unless given.

    Raises:
        LaunchError: an argument that ``Gpu`` refuses, a block inside another, a function compiled for an architecture that this one
            cannot run.
        VgpuError: from calls: what is wrong with a kernel, and where.
    """
    settings = _settings.current()
    gpu = AttachedGpu(
        arch,
        seed=settings.vgpu_seed if seed is None else seed,
        schedule=schedule or settings.vgpu_schedule,
        delay=delay or settings.vgpu_delay,
        checks=checks or settings.vgpu_checks,
        sms=sms,
        processes=settings.vgpu_processes if processes is None else processes,
        **{"execution": settings.vgpu_execution, **options},
    )
    with dsl.hooked(gpu, line_info):
        yield gpu
