"""Launches as data: a program's text, geometry, parameters and buffers, so that a launch can be done again, also with changed text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.program import Program

if TYPE_CHECKING:
    from fa4.vgpu.observe import Observer
    from fa4.vgpu.scheduler import Scheduler
    from fa4.vgpu.state import Dim3
    from fa4.vgpu.sums import Sums

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

    def replay(
        self,
        program: Program,
        observer: Observer | None = None,
        scheduler: Scheduler | None = None,
        sums: list[Sums] | None = None,
        **options: Any,
    ) -> dict[str, Array]:
        """Launch ``program`` (of ``ptx``, or of a changed form) on a new ``Gpu`` with these options; the writable buffers after that.

        ``scheduler`` decides instead of the option ``schedule``; to ``sums`` the record of additions is added, see ``fa4.vgpu.sums``.

        Raises:
            VgpuError: what is wrong with the kernel.
        """
        from fa4.vgpu.machine import Gpu

        gpu = Gpu(self.arch, **{"unwritten": self.unwritten, **options})
        gpu.observer, gpu.scheduler, gpu.sums = observer, scheduler, sums
        results = {}
        for image in self.buffers:
            flat = gpu.register_buffer(image.address, np.frombuffer(bytearray(image.data), np.uint8), image.name, image.writable)
            if image.writable:
                results[f"{image.name} at {image.address:#x}"] = flat
        params = self.params if isinstance(self.params, bytes) else list(self.params)
        gpu.launch(program, self.kernel, self.grid, self.block, self.dynamic_shared_bytes, params, self.cluster)
        return results

    def save(self, path: Path) -> None:
        """Write an archive of numpy (.npz): the memory, and the rest as JSON."""
        simple = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("params", "buffers")}
        parts = [self.params] if isinstance(self.params, bytes) else self.params
        simple["params"] = [part.hex() for part in parts], isinstance(self.params, bytes)
        simple["buffers"] = [(b.address, b.name, b.writable) for b in self.buffers]
        arrays: dict[str, Any] = {f"buffer{i}": np.frombuffer(b.data, np.uint8) for i, b in enumerate(self.buffers)}
        np.savez_compressed(path, launch=np.array(json.dumps(simple)), **arrays)

    @staticmethod
    def load(path: Path) -> Capture:
        """What ``save`` wrote."""
        with np.load(path, allow_pickle=False) as archive:
            simple = json.loads(str(archive["launch"]))
            buffers = [BufferImage(a, archive[f"buffer{i}"].tobytes(), n, w) for i, (a, n, w) in enumerate(simple.pop("buffers"))]
        parts, whole = simple.pop("params")
        params = tuple(bytes.fromhex(part) for part in parts)
        geometry = {name: _dim3(simple.pop(name)) for name in ("grid", "block", "cluster")}
        return Capture(**simple, **geometry, params=params[0] if whole else params, buffers=tuple(buffers))


def _dim3(values: Sequence[int] | None) -> Any:
    return None if values is None else tuple(values)
