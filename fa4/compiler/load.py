"""From an artifact to something that can be called, in a few milliseconds and without importing cutlass."""

from __future__ import annotations

import ctypes
import logging
import platform
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from fa4.compiler import toolchain
from fa4.compiler.artifact import OBJECT_FILE, Artifact
from fa4.compiler.elf import ElfError
from fa4.compiler.link import LinkError, LoadedObject
from fa4.errors import CompileError

Resolver = Callable[[str], "int | None"]

_log = logging.getLogger(__name__)


def load_function(artifact: Artifact, resolve: Resolver | None = None, device: int | None = None) -> Callable[..., Any]:
    """The host function of an artifact: it checks its arguments and launches the kernel.

    Args:
        artifact: compiled on this kind of machine.
        resolve: address of a symbol that the host code calls (``_cudaLaunchKernelEx``, for example), None for the DSL's own runtime
            library. By this a stand-in for the driver takes the launches.
        device: number of the CUDA device to which the machine code is loaded now. None leaves it to the first call, and to the DSL's
            library, which loads it to every device that it sees; no GPU is touched before. So it is in any case where cutlass has to load.

    Raises:
        CompileError: the object is for another machine, or cannot be loaded.
    """
    if artifact.toolchain.machine != platform.machine():
        raise CompileError(f"the kernel's host code is for {artifact.toolchain.machine}, this is {platform.machine()}; compile it here")
    # tvm_ffi imports torch where it is installed.
    import tvm_ffi

    try:
        loaded = load_object(artifact.host_object, resolve if device is None else lambda name: _loaded_already(name, resolve))
        address = loaded.address(f"__tvm_ffi_{artifact.function}")
        if device is not None:
            _load_machine_code(artifact, loaded, device)
    except (LinkError, ElfError) as error:
        if resolve is not None:
            raise CompileError(f"{artifact.function} cannot be loaded: {error}") from error
        _log.info("loading %s by way of cutlass: %s", artifact.function, error)
        return _load_with_dsl(artifact)
    function: Callable[..., Any] = tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=loaded)
    return function


def _load_machine_code(artifact: Artifact, loaded: LoadedObject, device: int) -> None:
    """Run the object's own functions that load its machine code, look its kernels up and allow them all shared memory, for ``device``.

    Raises:
        CompileError: CUDA refuses, for example because the code is for another architecture.
    """
    prefix = f"__cute_internal_{artifact.function}_cuda"
    library = ctypes.c_void_p()  # never unloaded: the driver does it when the process ends
    init = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(loaded.address(f"{prefix}_init"))
    load = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(loaded.address(f"{prefix}_load_to_device"))
    status = init(ctypes.addressof(library)) or load(ctypes.addressof(library), device)
    if status:
        reason = cuda_error(status)
        raise CompileError(f"{artifact.function}, compiled for {artifact.arch}, cannot be loaded to cuda:{device}: {reason}")


def cuda_error(status: int) -> str:
    """A status of the CUDA runtime by name and number, for messages."""
    name: bytes = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)(_default_symbol("cuda_dialect_get_error_name") or 0)(status)
    return f"{name.decode()} ({status})"


def _loaded_already(name: str, resolve: Resolver | None) -> int | None:
    """``resolve``, but for the function with which host code has its machine code loaded at each call: there is nothing left to do."""
    if name == "cuda_dialect_init_library_once":
        # A function of every libc that takes a pointer, does nothing with it, and returns 0, success.
        return ctypes.cast(ctypes.CDLL(None).pthread_mutexattr_destroy, ctypes.c_void_p).value
    return resolve(name) if resolve else None


def load_object(data: bytes, resolve: Resolver | None = None) -> LoadedObject:
    """Host code in memory; ``resolve`` as for ``load_function``.

    Raises:
        LinkError, ElfError: it cannot be loaded here.
    """
    return LoadedObject(data, lambda name: (resolve(name) if resolve else None) or _default_symbol(name))


def _load_with_dsl(artifact: Artifact) -> Callable[..., Any]:
    """The DSL's own loader, which imports all of it: for machines whose object code ``link`` does not know.

    Raises:
        CompileError: it cannot load the object either.
    """
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory(prefix="fa4-") as folder:
        path = Path(folder) / OBJECT_FILE
        path.write_bytes(artifact.host_object)
        try:
            function: Callable[..., Any] = cute.runtime.load_module(str(path), enable_tvm_ffi=True)[artifact.function]
            return function
        except Exception as error:  # of the DSL or of LLVM
            raise CompileError(f"{artifact.function} cannot be loaded: {error}") from error


@lru_cache(maxsize=256)
def _default_symbol(name: str) -> int | None:
    """The address of a symbol of the DSL's runtime, of tvm-ffi, or of this process."""
    for library in _libraries():
        try:
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        except AttributeError:
            continue
    return None


@lru_cache(maxsize=1)
def _libraries() -> tuple[ctypes.CDLL, ...]:
    import tvm_ffi

    return ctypes.CDLL(str(toolchain.runtime_library())), tvm_ffi.LIB, ctypes.CDLL(None)
