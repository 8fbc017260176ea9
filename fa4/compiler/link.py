"""A loader for the host objects that the DSL exports: relocatable ELF in, callable machine code in this process out.

It needs neither cutlass, nor a C compiler, nor a file that may be executed: sections are copied into private memory, symbols are
bound, relocations applied, and text made executable (x86-64 psABI 1.0, table 4.9). The DSL emits large-model position-independent
code, so memory may lie anywhere, and five kinds of relocation suffice. Another kind raises ``LinkError``.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable

from fa4.compiler.elf import (
    EM_X86_64,
    SHF_ALLOC,
    SHF_EXECINSTR,
    SHF_WRITE,
    SHN_ABS,
    SHN_UNDEF,
    Elf,
    Relocation,
    Symbol,
)

_R_X86_64_64 = 1
_R_X86_64_PC64 = 24
_R_X86_64_GOTOFF64 = 25
_R_X86_64_GOT64 = 27
_R_X86_64_GOTPC64 = 29

_TABLE = "_GLOBAL_OFFSET_TABLE_"
_MASK = (1 << 64) - 1
# Only unwinders read it, and nothing unwinds through this code: it calls C functions that return error codes.
_IGNORED_SECTIONS = (".eh_frame",)

_PROT_READ, _PROT_WRITE, _PROT_EXEC = 1, 2, 4


class LinkError(RuntimeError):
    """The object cannot be loaded here: another machine, a relocation of an unknown kind, or a symbol that nobody defines."""


class LoadedObject:
    """An object file in memory. Keep it alive as long as its code may be called."""

    def __init__(self, data: bytes, resolve: Callable[[str], int | None]) -> None:
        """Load ``data``; ``resolve`` gives the address of a symbol that the object uses but does not define, or None.

        Raises:
            LinkError: see there.
            ElfError: the bytes are no ELF file.
        """
        self._elf = Elf(data)
        if self._elf.machine != EM_X86_64:
            raise LinkError(f"host object for ELF machine {self._elf.machine}, this loader knows x86-64 ({EM_X86_64})")
        self._resolve = resolve
        self._place()
        self._bind()
        for index in self._addresses:
            for relocation in self._elf.relocations(index):
                self._apply(index, relocation)
        self._protect()

    def address(self, name: str) -> int:
        """The address of a function that the object defines.

        Raises:
            LinkError: it defines no such function.
        """
        for index, symbol in enumerate(self._elf.symbols):
            if symbol.name == name and symbol.section in self._addresses:
                return self._values[index]
        raise LinkError(f"the host object defines no {name}")

    def _place(self) -> None:
        """Lay out sections, each protection on pages of its own, and the offset table behind them."""
        self._regions: list[tuple[int, int, int]] = []  # (start, end, protection), offsets into the memory
        offsets: dict[int, int] = {}
        end = 0
        for protection in (_PROT_READ | _PROT_EXEC, _PROT_READ, _PROT_READ | _PROT_WRITE):
            start = end
            for index, section in enumerate(self._elf.sections):
                if section.flags & SHF_ALLOC and _protection(section.flags) == protection and section.name not in _IGNORED_SECTIONS:
                    end = _align(end, section.align)
                    offsets[index] = end
                    end += section.size
            if protection == _PROT_READ:  # the table is written before protection, and read-only after: full RELRO
                self._table = end = _align(end, 8)
                end += 8 * len(self._elf.symbols)
            end = _align(end, mmap.PAGESIZE)
            self._regions.append((start, end, protection))
        # mmap releases the memory together with this object.
        self._memory = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._addresses = {index: self._base + offset for index, offset in offsets.items()}
        for index, offset in offsets.items():
            section = self._elf.sections[index]
            self._memory[offset : offset + section.size] = self._elf.content(section)

    def _bind(self) -> None:
        """Give every symbol its address."""
        self._values: list[int] = []
        missing = []
        for symbol in self._elf.symbols:
            value = self._value(symbol)
            if value is None:
                missing.append(symbol.name)
            self._values.append(value or 0)
        if missing:
            raise LinkError(f"the host object needs {', '.join(sorted(missing))}, which no loaded library defines")

    def _value(self, symbol: Symbol) -> int | None:
        if symbol.name == _TABLE:
            return self._base + self._table
        if symbol.section in self._addresses:
            return self._addresses[symbol.section] + symbol.value
        if symbol.section == SHN_UNDEF and symbol.name:
            return self._resolve(symbol.name)
        return symbol.value if symbol.section in (SHN_UNDEF, SHN_ABS) else 0  # the null symbol, or a section that is not loaded

    def _apply(self, index: int, relocation: Relocation) -> None:
        place = self._addresses[index] + relocation.offset
        table = self._base + self._table
        value = self._values[relocation.symbol] + relocation.addend
        if relocation.kind == _R_X86_64_64:
            pass
        elif relocation.kind == _R_X86_64_PC64:
            value -= place
        elif relocation.kind == _R_X86_64_GOTOFF64:
            value -= table
        elif relocation.kind == _R_X86_64_GOTPC64:
            value = table + relocation.addend - place
        elif relocation.kind == _R_X86_64_GOT64:
            slot = 8 * relocation.symbol
            self._write(table + slot, self._values[relocation.symbol])
            value = slot + relocation.addend
        else:
            raise LinkError(f"relocation type {relocation.kind} in the host object is not one that the DSL is known to emit")
        self._write(place, value)

    def _write(self, address: int, value: int) -> None:
        struct.pack_into("<Q", self._memory, address - self._base, value & _MASK)

    def _protect(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for start, end, protection in self._regions:
            if end > start and libc.mprotect(ctypes.c_void_p(self._base + start), ctypes.c_size_t(end - start), protection):
                raise LinkError(f"the system refuses to make memory executable (mprotect: errno {ctypes.get_errno()})")


def _protection(flags: int) -> int:
    if flags & SHF_EXECINSTR:
        return _PROT_READ | _PROT_EXEC
    return _PROT_READ | _PROT_WRITE if flags & SHF_WRITE else _PROT_READ


def _align(offset: int, alignment: int) -> int:
    return (offset + alignment - 1) // alignment * alignment
