"""Reading 64-bit little-endian ELF files (System V ABI, gABI chapters 4 and 5): host objects and cubins are both ELF."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SHT_RELA = 4
SHT_NOBITS = 8
SHT_SYMTAB = 2
SHF_WRITE = 1
SHF_ALLOC = 2
SHF_EXECINSTR = 4
SHN_UNDEF = 0
SHN_ABS = 0xFFF1
EM_X86_64 = 62
EM_CUDA = 190


class ElfError(ValueError):
    """The bytes are not an ELF file that this reader understands."""


@dataclass(frozen=True)
class Section:
    """One section; ``size`` counts also where no bytes are stored (``SHT_NOBITS``). ``info`` and ``link`` as in the gABI."""

    name: str
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int


@dataclass(frozen=True)
class Symbol:
    """``section`` is an index into ``Elf.sections``, or ``SHN_UNDEF`` or ``SHN_ABS``; ``value`` an offset in it."""

    name: str
    section: int
    value: int
    size: int


@dataclass(frozen=True)
class Relocation:
    """A place to patch: ``offset`` in the patched section, the relocation type, an index into the symbols, an addend."""

    offset: int
    kind: int
    symbol: int
    addend: int


class Elf:
    """A parsed file. Attributes: ``machine``, ``sections`` and ``symbols`` (of its one symbol table)."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ElfError("not a 64-bit little-endian ELF file")
        self.data = data
        try:
            self._parse()
        except (struct.error, IndexError, ValueError) as error:
            raise ElfError(f"truncated or malformed ELF file: {error}") from error

    def _parse(self) -> None:
        (self.machine,) = struct.unpack_from("<H", self.data, 18)
        (table,) = struct.unpack_from("<Q", self.data, 40)
        entry_size, count, names_index = struct.unpack_from("<HHH", self.data, 58)
        raw = [struct.unpack_from("<IIQQQQIIQQ", self.data, table + i * entry_size) for i in range(count)]
        names = raw[names_index][4]
        self.sections = [
            Section(self._string(names + name), kind, flags, offset, size, link, info, max(align, 1), each)
            for name, kind, flags, _address, offset, size, link, info, align, each in raw
        ]
        self.symbols: list[Symbol] = []
        for section in self.sections:
            if section.kind == SHT_SYMTAB:
                strings = self.sections[section.link].offset
                for name, _info, _other, index, value, size in struct.iter_unpack("<IBBHQQ", self.content(section)):
                    self.symbols.append(Symbol(self._string(strings + name), index, value, size))

    def content(self, section: Section) -> bytes:
        """The stored bytes of a section; zeros where it stores none."""
        if section.kind == SHT_NOBITS:
            return bytes(section.size)
        content = self.data[section.offset : section.offset + section.size]
        if len(content) != section.size:
            raise ElfError(f"section {section.name} is truncated")
        return content

    def relocations(self, index: int) -> Iterator[Relocation]:
        """The relocations that patch section ``index``."""
        for section in self.sections:
            if section.kind == SHT_RELA and section.info == index:
                for offset, info, addend in struct.iter_unpack("<QQq", self.content(section)):
                    yield Relocation(offset, info & 0xFFFFFFFF, info >> 32, addend)

    def _string(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode()
