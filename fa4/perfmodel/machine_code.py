"""Machine code of a kernel with what ptxas decided about its timing: 128 bits an instruction, the decisions in the upper half.

Bits 41 to 44 of that half are the clocks until the warp may issue again, 46 to 48 the scoreboard that the result releases, 49 to 51 the
one that the reading of operands releases (7: none), 52 to 57 the scoreboards that it waits for. Nobody documents this; that the decoded
numbers make sense is what the tests check.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fa4.compiler.elf import Elf, ElfError
from fa4.errors import ModelError
from fa4.inspection import nvdisasm, sass
from fa4.inspection.graph import transfers
from fa4.inspection.sass import Instruction

SCOREBOARDS = 6
_NONE = 7


class Control(NamedTuple):
    """What ptxas wrote into an instruction; scoreboards by number, None where it uses none."""

    stall: int
    result: int | None
    read: int | None
    waits: tuple[int, ...]


@dataclass(frozen=True)
class MachineCode:
    """Instructions, their control bits, and for each where it may jump to and whether the next one may follow."""

    kernel: str
    instructions: tuple[Instruction, ...]
    controls: tuple[Control, ...]
    moves: tuple[tuple[tuple[int, ...], bool], ...]


def control(word: int) -> Control:
    """Decode the upper 64 bits of an instruction."""
    bits = word >> 41
    result, read = bits >> 5 & 7, bits >> 8 & 7
    waits = tuple(i for i in range(SCOREBOARDS) if bits >> 11 >> i & 1)
    return Control(bits & 15, None if result == _NONE else result, None if read == _NONE else read, waits)


@lru_cache(maxsize=16)
def machine_code(cubin: bytes, kernel: str) -> MachineCode:
    """The code of one kernel of a cubin.

    Raises:
        ModelError: the cubin has no such kernel, or is none.
        InspectionError: nvdisasm is missing or fails.
    """
    try:
        elf = Elf(cubin)
        section = next((s for s in elf.sections if s.name == f".text.{kernel}"), None)
        content = b"" if section is None else elf.content(section)
    except ElfError as error:
        raise ModelError(
            "cubin", f"{len(cubin)} bytes", f"is no cubin: {error}", "pass the cubin that was compiled with the PTX"
        ) from error
    if not content:
        names = [s.name.removeprefix(".text.") for s in elf.sections if s.name.startswith(".text.")]
        rule = f"has no kernel {kernel!r}, only {', '.join(names) or 'none'}"
        raise ModelError("cubin", f"{len(cubin)} bytes", rule, "pass the cubin of the kernel that was traced")
    function = sass.parse(nvdisasm.disassemble(cubin))[kernel]
    controls = tuple(control(struct.unpack_from("<Q", content, i.address + 8)[0]) for i in function.instructions)
    return MachineCode(kernel, function.instructions, controls, transfers(function))
