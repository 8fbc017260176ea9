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


def load_function(artifact: Artifact, resolve: Resolver | None = None) -> Callable[..., Any]:
    """The host function of an artifact: it checks its arguments and launches the kernel. No GPU is touched before the first call.

    Args:
        artifact: compiled on this kind of machine.
        resolve: address of a symbol that the host code calls (``_cudaLaunchKernelEx``, for example), None for the DSL's own runtime
            library. By this a stand-in for the driver takes the launches.

    Raises:
        CompileError: the object is for another machine, or cannot be loaded.
    """
    if artifact.toolchain.machine != platform.machine():
        raise CompileError(f"the kernel's host code is for {artifact.toolchain.machine}, this is {platform.machine()}; compile it here")
    # tvm_ffi imports torch where it is installed.
    import tvm_ffi

    try:
        loaded = load_object(artifact.host_object, resolve)
        address = loaded.address(f"__tvm_ffi_{artifact.function}")
    except (LinkError, ElfError) as error:
        if resolve is not None:
            raise CompileError(f"{artifact.function} cannot be loaded: {error}") from error
        _log.info("loading %s by way of cutlass: %s", artifact.function, error)
        return _load_with_dsl(artifact)
    function: Callable[..., Any] = tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=loaded)
    return function


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
