"""A filter of system calls that allows all of them, for tests: what has one is another process to who traces it."""

from __future__ import annotations

import sys

UNDER_A_FILTER = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None)
allow = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7fff0000))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 1, ctypes.addressof(allow)))
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, program, 0, 0) == 0
if sys.argv[1:]:
    os.execvp(sys.argv[1], sys.argv[1:])
"""


def under_a_filter() -> list[str]:
    """Return what runs a program under it."""
    return [sys.executable, "-c", UNDER_A_FILTER]
