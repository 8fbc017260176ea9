"""What a kernel costs, read from its cubin: registers, stack, shared memory, constants, parameter layout.

The formats are those that ``cuobjdump -elf`` prints; attribute numbers are NVIDIA's EIATTR_* (checked in the tests against
``cuobjdump`` on the same file). Spilled bytes are not in a cubin: they come from what ptxas reports (``parse_ptxas_log``).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from fa4.compiler.elf import EM_CUDA, Elf, ElfError

_EIATTR_MIN_STACK_SIZE = 0x12
_EIATTR_KPARAM_INFO = 0x17
_EIATTR_REGCOUNT = 0x2F
_EIATTR_FRAME_SIZE = 0x11
_SIZED_VALUE = 4  # EIFMT_SVAL; the other formats (1: none, 2: byte, 3: half) have a value of two bytes in place of the size


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter: its ``offset`` from the parameter base and its ``size``, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True)
class Resources:
    """What one kernel needs; every size in bytes.

    ``registers`` are per thread, as allocated at launch. ``stack`` is the local-memory frame, zero in a kernel that does not
    spill. ``static_shared`` includes what the architecture reserves (1 KB from sm_90 on). ``constant`` is the kernel's own bank,
    parameters included. Spills are what ptxas reports; ``None`` where it reported nothing.
    """

    registers: int
    stack: int
    static_shared: int
    constant: int
    spill_stores: int | None = None
    spill_loads: int | None = None
    parameters: tuple[Parameter, ...] = ()


def parse_cubin(cubin: bytes) -> dict[str, Resources]:
    """Resources of each kernel, by entry name, without spills.

    Raises:
        ElfError: not a cubin.
    """
    elf = Elf(cubin)
    if elf.machine != EM_CUDA:
        raise ElfError(f"not a cubin: machine {elf.machine}")
    sizes = {section.name: section.size for section in elf.sections}
    per_function: dict[int, dict[int, int]] = {}
    names: dict[str, tuple[Parameter, ...]] = {}
    for section in elf.sections:
        if section.name == ".nv.info":
            for attribute, value in _attributes(elf.content(section)):
                if attribute in (_EIATTR_REGCOUNT, _EIATTR_FRAME_SIZE, _EIATTR_MIN_STACK_SIZE):
                    function, number = struct.unpack("<II", value)
                    per_function.setdefault(function, {})[attribute] = number
        elif section.name.startswith(".nv.info."):
            parameters = {}
            for attribute, value in _attributes(elf.content(section)):
                if attribute == _EIATTR_KPARAM_INFO:
                    _index, ordinal, offset, packed = struct.unpack("<IHHI", value)
                    parameters[ordinal] = Parameter(offset, packed >> 18)  # low bits: alignment, space, bank
            names[section.name.removeprefix(".nv.info.")] = tuple(parameters[i] for i in sorted(parameters))
    found = {}
    for function, numbers in per_function.items():
        name = elf.symbols[function].name
        if name not in names:
            continue  # a device function, not an entry
        constants = [size for section, size in sizes.items() if section == f".nv.constant0.{name}"]
        found[name] = Resources(
            registers=numbers[_EIATTR_REGCOUNT],
            stack=max(numbers.get(_EIATTR_FRAME_SIZE, 0), numbers.get(_EIATTR_MIN_STACK_SIZE, 0)),
            static_shared=sizes.get(f".nv.shared.{name}", 0),
            constant=sum(constants),
            parameters=names[name],
        )
    return found


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) of an ``.nv.info`` section: a byte of format, a byte of attribute, a size or value of two bytes."""
    position = 0
    while position < len(info):
        kind, attribute, short = struct.unpack_from("<BBH", info, position)
        position += 4
        if kind == _SIZED_VALUE:
            yield attribute, info[position : position + short]
            position += short
        else:
            yield attribute, struct.pack("<H", short)


_PTXAS_FUNCTION = re.compile(
    r"Function properties for (?P<name>\S+)\s+.*?(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads",
    re.DOTALL,
)


def parse_ptxas_log(log: str) -> dict[str, tuple[int, int]]:
    """Bytes of (spill stores, spill loads) per function, from the text that ``ptxas -v`` prints."""
    return {match["name"]: (int(match["stores"]), int(match["loads"])) for match in _PTXAS_FUNCTION.finditer(log)}
