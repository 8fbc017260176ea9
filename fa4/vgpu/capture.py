"""Launches as data: a program's text, geometry, parameters and buffers, so that a launch can be done again, also with changed text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.program import Program

if TYPE_CHECKING:
    from fa4.vgpu.observe import Observer
    from fa4.vgpu.state import Dim3

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class BufferImage:
    """A buffer as it was before the launch."""

    address: int
    data: bytes
    name: str
    writable: bool


@dataclass(frozen=True)
class Capture:
    """One launch; put a list into ``Gpu.captures``, and every launch is added to it."""

    ptx: str
    kernel: str
    arch: str
    grid: Dim3
    block: Dim3
    cluster: Dim3 | None
    dynamic_shared_bytes: int
    params: bytes | tuple[bytes, ...]
    buffers: tuple[BufferImage, ...]
    unwritten: str

    def replay(self, program: Program, observer: Observer | None = None, **options: Any) -> dict[str, Array]:
        """Launch ``program`` (of ``ptx``, or of a changed form) on a new ``Gpu`` with these options; the writable buffers after that.

        Raises:
            VgpuError: what is wrong with the kernel.
        """
        from fa4.vgpu.machine import Gpu

        gpu = Gpu(self.arch, **{"unwritten": self.unwritten, **options})
        gpu.observer = observer
        results = {}
        for image in self.buffers:
            flat = gpu.register_buffer(image.address, np.frombuffer(bytearray(image.data), np.uint8), image.name, image.writable)
            if image.writable:
                results[f"{image.name} at {image.address:#x}"] = flat
        params = self.params if isinstance(self.params, bytes) else list(self.params)
        gpu.launch(program, self.kernel, self.grid, self.block, self.dynamic_shared_bytes, params, self.cluster)
        return results
