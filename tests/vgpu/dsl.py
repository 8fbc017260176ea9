"""Small CuTe-DSL kernels on the virtual GPU, by their own host code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fa4.compiler import toolchain
from fa4.compiler.compile import _LOCK, _host_object
from fa4.compiler.link import LoadedObject
from fa4.compiler.load import _default_symbol
from fa4.runtime.tensors import HostTensor
from fa4.runtime.virtual import launch, region, registered
from fa4.vgpu import Gpu, Program
from fa4.vgpu.driver import Driver


@dataclass(frozen=True)
class Compiled:
    """PTX and host code of one ``cute.jit`` function."""

    name: str
    ptx: str
    host_object: bytes

    def with_line(self, line: int, text: str) -> Compiled:
        """One line of the PTX replaced."""
        lines = self.ptx.splitlines()
        return replace(self, ptx="\n".join([*lines[:line], text, *lines[line + 1 :]]))

    def __call__(self, gpu: Gpu, *tensors: torch.Tensor) -> None:
        """Run it on CPU tensors, followed by a stream."""
        import tvm_ffi

        driver = Driver(partial(launch, gpu, Program.parse(self.ptx)), 232448)
        loaded = LoadedObject(self.host_object, lambda name: driver.resolve(name) or _default_symbol(name))
        function = tvm_ffi.Function.__from_extern_c__(loaded.address(f"__tvm_ffi_{self.name}"), keep_alive_object=loaded)
        hosts = [HostTensor(tensor) for tensor in tensors]
        regions = [region(host.__dlpack__(), f"tensor {i}", True) for i, host in enumerate(hosts)]
        with registered(gpu, regions), driver.raising():
            function(*map(tvm_ffi.from_dlpack, hosts), 0)


def compile_dsl(function, arguments, arch: str, name: str) -> Compiled:
    """Compile for an architecture; no GPU is needed."""
    import cutlass.cute as cute

    with _LOCK, TemporaryDirectory(prefix="fa4-") as folder:
        options = f"{toolchain.options(False)} --gpu-arch {arch} --dump-dir {folder}"
        compiled = cute.compile(function, *arguments, options=options)
        return Compiled(name, compiled.__ptx__, _host_object(compiled, name, Path(folder) / "host.o"))
