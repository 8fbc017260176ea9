"""What the virtual GPU finds wrong: every error says in which kernel, CTA, warp and lane, at which PTX and source line."""

from __future__ import annotations

from dataclasses import dataclass

from fa4.errors import Fa4Error


@dataclass(frozen=True)
class Place:
    """Where something happened. ``source`` is "file:line", with " inlined at file:line" where the line table says so.

    ``run`` are the arguments of ``Gpu`` that repeat the run, where it was not in the default schedule.
    """

    kernel: str
    cta: tuple[int, int, int] | None = None
    warp: int | None = None
    lane: int | None = None
    ptx_line: int | None = None
    ptx_text: str = ""
    source: str = ""
    run: str = ""

    def __str__(self) -> str:
        """Several lines, fit for an error message."""
        who = [f"kernel {self.kernel}"]
        who += [f"{name} {value}" for name, value in (("CTA", self.cta), ("warp", self.warp), ("lane", self.lane)) if value is not None]
        lines = [", ".join(who)]
        if self.ptx_line is not None:
            lines.append(f"PTX line {self.ptx_line}: {self.ptx_text}")
        if self.source:
            lines.append(f"source {self.source}")
        if self.run:
            lines.append(f"again with {self.run}")
        return "\n  ".join(lines)


class VgpuError(Fa4Error):
    """Base of all errors of the virtual GPU. ``place`` is None where no instruction was being executed."""

    def __init__(self, message: str, place: Place | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.place = place

    def __str__(self) -> str:
        """The message, and the place."""
        return self.message if self.place is None else f"{self.message}\n  {self.place}"

    def __reduce__(self) -> tuple[type[VgpuError], tuple[str, Place | None]]:
        """Pickle by parts: exceptions cross process borders in worker pools."""
        return type(self), (self.message, self.place)


class PtxSyntaxError(VgpuError):
    """The text is not PTX, or PTX that this parser does not know."""


class UnsupportedInstructionError(VgpuError, NotImplementedError):
    """An instruction or a form of it that the virtual GPU does not model; it never guesses."""


class LaunchError(VgpuError, ValueError):
    """Launch geometry, shared memory or parameters do not fit the kernel."""


class MemoryFaultError(VgpuError):
    """Base of faults of a memory access."""


class OutOfBoundsError(MemoryFaultError):
    """An address outside every registered buffer, variable or window, or a write to read-only memory."""


class MisalignedError(MemoryFaultError):
    """An address that is not a multiple of the size of the access (PTX ISA 6.4.1)."""


class TensorMapError(VgpuError):
    """A tensor map, or a box of one, breaks a rule of the TMA unit."""


class UninitializedError(VgpuError):
    """A register or a byte of shared or local memory is read before anything was written to it."""


class PendingCopyError(VgpuError):
    """Bytes that an asynchronous copy has yet to write are read or written by others."""


class DataRaceError(VgpuError):
    """Two accesses of the same memory, one of them a write, that nothing orders (PTX ISA 8.10)."""


class SharedGlobalError(VgpuError):
    """Clusters communicate through global memory, so that they cannot run in several processes; one process runs the kernel."""


class WorkerError(VgpuError):
    """A process that ran clusters of a grid ended without an answer."""


class ProxyFenceError(VgpuError):
    """An asynchronous operation reads what was written generically without a proxy fence behind it (PTX ISA 8.6)."""


class TensorFenceError(VgpuError):
    """tcgen05.fence or wgmma.fence is missing (PTX ISA 9.7.16.6, 9.7.15.7.1)."""


class MatrixDescriptorError(VgpuError, ValueError):
    """A descriptor of a matrix operand or of a tensor-core instruction with fields that contradict the ISA or each other."""


class PendingMultiplyError(VgpuError):
    """Registers of a warpgroup's multiplication are touched before it has been waited for."""


class TensorMemoryError(VgpuError):
    """Tensor memory that is not allocated, that a warp may not touch, or an allocation that breaks the rules."""


class DivergenceError(VgpuError):
    """An instruction that a whole warp (or every lane of its mask) must execute together is reached by only some lanes."""


class BarrierError(VgpuError):
    """A barrier is used with counts that contradict each other or the CTA."""


class LaunchControlError(VgpuError):
    """A request to cancel a launch that may not be made, or what is no answer to one, or a failed one's cluster."""


class DeadlockError(VgpuError):
    """No warp can run and not all have exited; the message is a table of who waits where for what."""


class TrapError(VgpuError):
    """The kernel executed ``trap``."""
