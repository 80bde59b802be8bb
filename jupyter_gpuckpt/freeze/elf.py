"""The build id of a program or library: which build it is, however long the file and wherever it lies (elf(5))."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

__all__ = ["build_id", "is_same_build"]

_LITTLE = 1
_PT_NOTE = 4
_NT_GNU_BUILD_ID = 3
_LONGEST = 1 << 16
"""Bytes that are looked at of one table or note; real ones have some hundred."""


class _Layout(NamedTuple):
    """Where a header says where its table of programs is and how large, and an entry where its content is."""

    header: int
    table: tuple[str, int]
    sizes: int
    entry: int
    content: tuple[str, int, int]


_LAYOUTS = {
    b"\x7fELF" + bytes((1, _LITTLE)): _Layout(52, ("<I", 28), 42, 32, ("<I", 4, 16)),
    b"\x7fELF" + bytes((2, _LITTLE)): _Layout(64, ("<Q", 32), 54, 56, ("<Q", 8, 32)),
}
"""By what a file begins with: those of 32 and of 64 bits."""


def build_id(path: Path) -> str:
    """Return the build id of an ELF file, in hexadecimal; empty where it has none, or is no such file.

    Only its header and its notes are read. Raises `OSError`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        header = os.pread(fd, 64, 0)
        layout = _LAYOUTS.get(header[:6])
        if layout is None or len(header) < layout.header:
            return ""
        (table,) = struct.unpack_from(layout.table[0], header, layout.table[1])
        size, count = struct.unpack_from("<HH", header, layout.sizes)
        programs = os.pread(fd, min(size * count, _LONGEST), table) if table < 1 << 62 else b""
        word, at_offset, at_length = layout.content
        for at in range(0, len(programs) - layout.entry + 1, max(size, layout.entry)):
            (kind,) = struct.unpack_from("<I", programs, at)
            (offset,) = struct.unpack_from(word, programs, at + at_offset)
            (length,) = struct.unpack_from(word, programs, at + at_length)
            if kind != _PT_NOTE or offset >= 1 << 62:
                continue
            if found := _in_notes(os.pread(fd, min(length, _LONGEST), offset)):
                return found
        return ""
    finally:
        os.close(fd)


def _in_notes(notes: bytes) -> str:
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, at)
        name = at + 12
        content = name + (name_size + 3) // 4 * 4
        if kind == _NT_GNU_BUILD_ID and notes[name : name + name_size] == b"GNU\0":
            return notes[content : content + size].hex()
        at = content + (size + 3) // 4 * 4
    return ""


def is_same_build(one: str, other: str) -> bool:
    """Tell whether two build ids in hexadecimal are the same; zeros at the end of one may be criu's padding."""
    return one.rstrip("0") == other.rstrip("0")
