"""What ``attach`` changes in the DSL while a block is open: where it compiles to, who executes, and what counts as device memory.

The names replaced are those of nvidia-cutlass-dsl 4.8, the range that fa4 supports. Each is put back when the block ends.
"""

from __future__ import annotations

import copy
import ctypes
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from fa4.arch import get_arch
from fa4.compiler.compile import compiling, object_code
from fa4.compiler.load import load_object
from fa4.runtime.tensors import HostTensor, on_host
from fa4.vgpu.driver import Driver, LaunchRequest
from fa4.vgpu.errors import LaunchError
from fa4.vgpu.program import Program


class Attachment(Protocol):
    """What the DSL is attached to; ``sms`` is how many SMs it is told that there are."""

    arch: str
    sms: int

    def run(self, program: Program, request: LaunchRequest) -> None:
        """Launch a kernel."""

    def see(self, holder: Any, capsule: Any) -> None:
        """Learn of memory, from a DLPack capsule, that kernels may use as long as ``holder`` lives."""

    def views(self, arguments: Any) -> tuple[Any, Any]:
        """Arguments of a tvm-ffi function with device memory in place of host memory, and what keeps that usable."""


_attached: Attachment | None = None


def attached() -> Attachment | None:
    """What the DSL is attached to; None outside a block."""
    return _attached


class Engine:
    """In place of the DSL's execution engine: host code of one compiled function, with calls of CUDA bound to the virtual GPU."""

    def __init__(self, code: bytes, ptx: str, cubin: bytes, arch: str) -> None:
        self._ptx, self._cubin = ptx, cubin
        self.driver = Driver(self._launch, int(get_arch(arch).smem_per_block))
        self._loaded = load_object(code, self.driver.resolve)

    def lookup(self, name: str) -> Any:
        """A function that takes an array of pointers to its arguments, as MLIR's ``ExecutionEngine.lookup`` gives."""
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.raw_lookup(f"_mlir_ciface_{name}"))

    def raw_lookup(self, name: str) -> int:
        """The address of such a function.

        Raises:
            LaunchError: no block is open.
        """
        if _attached is None:
            raise LaunchError("a function compiled for the virtual GPU; call it inside fa4.vgpu.attach(...)")
        return self.address(f"_mlir_{name}")

    def address(self, name: str) -> int:
        """The address of a function with arguments of its own."""
        return self._loaded.address(name)

    def load(self) -> None:
        """Load the machine code and look kernels up, as the host code does on a real device."""
        self.driver.load(self.address("cuda_init"), self.address("cuda_load_to_device"))

    @cached_property
    def _program(self) -> Program:
        return Program.parse(self._ptx, self._cubin)

    def _launch(self, request: LaunchRequest) -> None:
        if _attached is None:
            raise LaunchError(f"{request.kernel} was compiled for the virtual GPU; call it inside fa4.vgpu.attach(...)")
        target = self._program.target
        if not _runs_on(target, _attached.arch):
            raise LaunchError(f"{request.kernel} was compiled for {target}, the attached GPU is {_attached.arch}; attach(arch={target!r})")
        _attached.run(self._program, request)


def _runs_on(target: str, arch: str) -> bool:
    """PTX for a plain target runs on later GPUs too, PTX for one with a letter only there (PTX ISA 11.1.2)."""
    return target == arch or (target.isascii() and target[3:].isdecimal() and int(target[3:]) <= int(arch[3:].rstrip("af")))


@contextmanager
def hooked(gpu: Attachment, line_info: bool) -> Iterator[None]:
    """Change the DSL for the time of the block.

    Raises:
        LaunchError: another block is open.
    """
    global _attached
    if _attached is not None:
        raise LaunchError("attach: a virtual GPU is attached already; end its block first")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fa4-attach-")))
        for owner, name, value in _replacements(gpu, line_info, folder):
            stack.callback(setattr, owner, name, owner.__dict__[name])
            setattr(owner, name, value)
        _attached = gpu
        try:
            yield
        finally:
            _attached = None


def _replacements(gpu: Attachment, line_info: bool, folder: Path) -> Iterator[tuple[Any, str, Any]]:
    """(object, attribute, new value)."""
    from cutlass.base_dsl.dsl import BaseDSL
    from cutlass.base_dsl.jit_executor import JitExecutor
    from cutlass.cute.runtime import _Tensor
    from cutlass.cutlass_dsl import CuTeDSL
    from cutlass.cutlass_dsl import tvm_ffi_provider as tvm
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction
    from cutlass.utils import HardwareInfo

    environment = CuTeDSL._get_dsl().envar
    environment.arch = environment.arch  # detected only now otherwise
    yield environment, "_arch", gpu.arch
    yield BaseDSL, "_prepare_compilation", _prepare(BaseDSL._prepare_compilation, (gpu.arch, line_info), folder)
    yield BaseDSL, "_compile_or_jit_module", _compile(BaseDSL._compile_or_jit_module, gpu, folder)
    yield CudaDialectJitCompiledFunction, "_load_cuda_library", _load_library(CudaDialectJitCompiledFunction._load_cuda_library)
    yield tvm.TVMFFIJitCompiledFunctionBase, "_create_tvm_ffi_function", _tvm(tvm.TVMFFIJitCompiledFunctionBase._create_tvm_ffi_function)
    yield JitExecutor, "run_compiled_program", _run(JitExecutor.run_compiled_program)
    for function in (tvm.TVMFFIJitCompiledFunction, tvm.TVMFFIJitCompiledFunctionWithKwargs):
        yield function, "__call__", _call(function.__call__, gpu)
    yield _Tensor, "__init__", _tensor(_Tensor.__init__, gpu)
    yield _Tensor, "__c_pointers__", _pointers(_Tensor.__c_pointers__, gpu)
    yield _Tensor, "__tvm_ffi_object__", _pointers(_Tensor.__tvm_ffi_object__, gpu)
    arch = get_arch(gpu.arch)
    yield HardwareInfo, "__init__", lambda _self, device_id=0: None
    yield HardwareInfo, "get_device_multiprocessor_count", lambda _self: gpu.sms
    yield HardwareInfo, "get_l2_cache_size_in_bytes", lambda _self: int(arch.l2)
    yield HardwareInfo, "get_max_active_clusters", lambda _self, cluster_size, stream=None: gpu.sms // cluster_size


def _prepare(original: Callable[..., Any], wanted: tuple[str, bool], folder: Path) -> Callable[..., Any]:
    """Options of a compile: keep PTX, in a folder of its own, with line information, and use no cache."""
    from cutlass.base_dsl.compiler import DumpDir, GenerateLineInfo, GPUArch, KeepCUBIN, KeepPTX

    wanted_arch, line_info = wanted

    def prepare(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if compiling():
            return original(self, function, *args, **kwargs)
        options = copy.copy(self.compile_options)  # cute.compile[...] keeps one for all its compiles
        options.options = dict(options.options)
        arch = options.options[GPUArch].value or wanted_arch
        if not _runs_on(arch, wanted_arch):
            raise LaunchError(f"--gpu-arch {arch}: the attached GPU is {wanted_arch}; leave the option out, or attach(arch={arch!r})")
        options.options[GPUArch] = GPUArch(arch)
        options.options[KeepPTX] = KeepPTX(True)
        options.options[KeepCUBIN] = KeepCUBIN(True)
        if not options.options[DumpDir].value:
            options.options[DumpDir] = DumpDir(tempfile.mkdtemp(dir=folder))
        if line_info:
            options.options[GenerateLineInfo] = GenerateLineInfo(True)
        self.compile_options = options
        return original(self, function, *args, **{**kwargs, "no_cache": True})

    return prepare


def _compile(original: Callable[..., Any], gpu: Attachment, folder: Path) -> Callable[..., Any]:
    def compile_module(self: Any, module: Any, pipeline: str, name: str, libraries: Any, engine: bool) -> tuple[Any, Any]:
        if compiling():
            untouched: tuple[Any, Any] = original(self, module, pipeline, name, libraries, engine)
            return untouched
        _, module = original(self, module, pipeline, name, libraries, False)
        files = self.compile_options
        ptx = Path(files.full_ptx_path).read_text().rstrip("\0") if self.num_kernels else ""
        cubin = Path(files.full_cubin_path).read_bytes() if self.num_kernels else b""
        return Engine(object_code(module, name, folder / "host.o"), ptx, cubin, gpu.arch), module

    return compile_module


def _load_library(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any) -> Any:
        if not isinstance(self.engine, Engine):
            return original(self)
        with self.engine.driver.raising():
            self.engine.load()
        return []  # nothing that CUDA would have to unload

    return load


def _tvm(original: Callable[..., Any]) -> Callable[..., Any]:
    def create(self: Any) -> Any:
        if not isinstance(self.engine, Engine):
            return original(self)
        import tvm_ffi

        address = self.engine.address(f"__tvm_ffi_{self.function_name}")
        return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=self.engine)

    return create


def _run(original: Callable[..., Any]) -> Callable[..., Any]:
    """The executor of functions without tvm-ffi; it would wrap what a launch raises."""

    def run(self: Any, arguments: Any) -> Any:
        engine = self.jit_module.engine
        if not isinstance(engine, Engine):
            return original(self, arguments)
        with engine.driver.raising():
            return original(self, arguments)

    return run


def _call(original: Callable[..., Any], gpu: Attachment) -> Callable[..., Any]:
    """A call of a function with tvm-ffi, which checks that tensors lie on a GPU."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.engine, Engine):
            return original(self, *args, **kwargs)
        (args, kwargs), _alive = gpu.views((args, kwargs))
        with self.engine.driver.raising():
            return original(self, *args, **kwargs)

    return call


def _tensor(original: Callable[..., Any], gpu: Attachment) -> Callable[..., Any]:
    """``from_dlpack``: host memory counts as device memory, so that the DSL gives it the address space of global memory."""

    def initialise(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        host = on_host(tensor)
        original(self, HostTensor(tensor) if host else tensor, *args, **kwargs)
        if host:
            gpu.see(self, self._dlpack_data)

    return initialise


def _pointers(original: Callable[..., Any], gpu: Attachment) -> Callable[..., Any]:
    """A tensor is about to be an argument."""

    def pointers(self: Any) -> Any:
        gpu.see(self, self._dlpack_data)
        return original(self)

    return pointers
