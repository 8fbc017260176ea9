"""Small CuTe-DSL kernels on the virtual GPU, by their own host code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fa4.compiler import toolchain
from fa4.compiler.compile import _LOCK, _host_object
from fa4.compiler.link import LoadedObject
from fa4.compiler.load import _default_symbol
from fa4.runtime.tensors import HostTensor
from fa4.runtime.virtual import _memory, _spans
from fa4.vgpu import Gpu, Program
from fa4.vgpu.driver import Driver, LaunchRequest


@dataclass(frozen=True)
class Compiled:
    """PTX and host code of one ``cute.jit`` function."""

    name: str
    ptx: str
    host_object: bytes

    def without(self, line: int) -> Compiled:
        """One line of the PTX taken out."""
        lines = self.ptx.splitlines()
        return replace(self, ptx="\n".join([*lines[:line], "", *lines[line + 1 :]]))

    def __call__(self, gpu: Gpu, *tensors: torch.Tensor) -> None:
        """Run it on CPU tensors, followed by a stream."""
        import tvm_ffi

        program = Program.parse(self.ptx)

        def launch(request: LaunchRequest) -> None:
            sizes = [parameter.size for parameter in program.kernel(request.kernel).parameters]
            geometry = (request.grid, request.block, request.dynamic_shared, request.parameters(sizes), request.cluster)
            gpu.launch(program, request.kernel, *geometry)

        driver = Driver(launch, 232448)
        loaded = LoadedObject(self.host_object, lambda name: driver.resolve(name) or _default_symbol(name))
        function = tvm_ffi.Function.__from_extern_c__(loaded.address(f"__tvm_ffi_{self.name}"), keep_alive_object=loaded)
        spans = _spans(tensors)
        for begin, end in spans:
            gpu.register_buffer(begin, _memory(begin, end), f"{begin:#x}")
        hosts = [HostTensor(tensor) for tensor in tensors]
        try:
            function(*map(tvm_ffi.from_dlpack, hosts), 0)
        except Exception:
            raise driver.error or AssertionError("the host code failed") from None
        finally:
            for begin, _ in spans:
                gpu.remove_buffer(begin)


def compile_dsl(function, arguments, arch: str, name: str) -> Compiled:
    """Compile for an architecture; no GPU is needed."""
    import cutlass.cute as cute

    with _LOCK, TemporaryDirectory(prefix="fa4-") as folder:
        options = f"{toolchain.options(False)} --gpu-arch {arch} --dump-dir {folder}"
        compiled = cute.compile(function, *arguments, options=options)
        return Compiled(name, compiled.__ptx__, _host_object(compiled, name, Path(folder) / "host.o"))
