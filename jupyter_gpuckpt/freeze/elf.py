"""The build id of a program or library: which build it is, however long the file and wherever it lies (elf(5))."""

from __future__ import annotations

import os
import struct
from pathlib import Path

__all__ = ["build_id"]

_MAGIC = b"\x7fELF"
_HEADER = 64
_CLASS_64, _LITTLE = 2, 1
_PT_NOTE = 4
_NT_GNU_BUILD_ID = 3
_LONGEST = 1 << 16
"""Bytes that are looked at of one table or note; real ones have some hundred."""


def build_id(path: Path) -> str:
    """Return the build id of an ELF file, in hexadecimal; empty where it has none, or is no such file.

    Only its header and its notes are read. Raises `OSError`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        header = os.pread(fd, _HEADER, 0)
        if len(header) < _HEADER or header[:6] != _MAGIC + bytes((_CLASS_64, _LITTLE)):
            return ""
        (table,) = struct.unpack_from("<Q", header, 32)
        size, count = struct.unpack_from("<HH", header, 54)
        programs = os.pread(fd, min(size * count, _LONGEST), table) if table < 1 << 62 else b""
        for at in range(0, len(programs) - 55, max(size, 56)):
            (kind,) = struct.unpack_from("<I", programs, at)
            (offset,), (length,) = (
                struct.unpack_from("<Q", programs, at + 8),
                struct.unpack_from("<Q", programs, at + 32),
            )
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
