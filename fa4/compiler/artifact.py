"""What a compile produces: plain frozen data that the runtimes, the virtual GPU, inspection and the cache share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fa4.compiler.cubin import Parameter, Resources
from fa4.compiler.ptx import SourceLine, line_table
from fa4.compiler.toolchain import Toolchain

Dim3 = tuple[int, int, int]

PTX_FILE, CUBIN_FILE, OBJECT_FILE = "kernel.ptx", "kernel.cubin", "host.o"


@dataclass(frozen=True)
class Launch:
    """How the host code launches a kernel, as far as it is fixed at compile time; ``None`` where it depends on arguments.

    ``block`` and ``cluster`` in threads and blocks, ``dynamic_shared`` in bytes. A launch without cluster has ``cluster`` None.
    """

    block: Dim3 | None = None
    cluster: Dim3 | None = None
    grid: Dim3 | None = None
    dynamic_shared: int | None = None


@dataclass(frozen=True)
class Kernel:
    """One device function that the host code launches."""

    name: str
    launch: Launch
    resources: Resources


@dataclass(frozen=True)
class Artifact:
    """A compiled request.

    ``host_object`` is relocatable code for the host (``toolchain.machine``, baseline instruction set) that checks arguments and
    launches; it contains the cubin, and exports ``function`` with tvm-ffi's calling convention. ``problem`` and ``config`` are
    JSON data, ``source`` the kernel class as "module:Class", ``ptxas_log`` what ptxas reported (with a line table only).
    """

    function: str
    kernels: tuple[Kernel, ...]
    ptx: str
    cubin: bytes
    host_object: bytes
    source: str
    problem: Any
    config: Any
    arch: str
    toolchain: Toolchain
    options: str
    ptxas_log: str

    def line_table(self) -> tuple[SourceLine, ...]:
        """Which source line each stretch of PTX implements; empty unless it was compiled with ``line_info``."""
        return line_table(self.ptx)

    def files(self) -> dict[str, bytes]:
        """The parts that are stored as files of their own."""
        return {PTX_FILE: self.ptx.encode(), CUBIN_FILE: self.cubin, OBJECT_FILE: self.host_object}

    def metadata(self) -> dict[str, Any]:
        """Everything else, as JSON-able data."""
        stored = ("ptx", "cubin", "host_object")
        return {name: value for name, value in asdict(self).items() if name not in stored}


def from_parts(metadata: Mapping[str, Any], files: Mapping[str, bytes]) -> Artifact:
    """The inverse of ``Artifact.metadata`` and ``Artifact.files``.

    Raises:
        KeyError, TypeError, ValueError: the parts are not those of an artifact.
    """
    return Artifact(
        **{
            **metadata,
            "kernels": tuple(_kernel(kernel) for kernel in metadata["kernels"]),
            "toolchain": Toolchain(**metadata["toolchain"]),
            "ptx": files[PTX_FILE].decode(),
            "cubin": files[CUBIN_FILE],
            "host_object": files[OBJECT_FILE],
        }
    )


def _kernel(data: Mapping[str, Any]) -> Kernel:
    resources = dict(data["resources"])
    resources["parameters"] = tuple(Parameter(**parameter) for parameter in resources["parameters"])
    launch: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data["launch"].items()}
    return Kernel(data["name"], Launch(**launch), Resources(**resources))
