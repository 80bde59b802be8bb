"""Filters of system calls for tests: what has one is another process to who traces it."""

from __future__ import annotations

import sys

UNDER_A_FILTER = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None)
denied = [int(number) for number in os.environ.get("DENIED_CALLS", "").split()]
code = struct.pack("HBBI", 0x20, 0, 0, 0)  # load the call's number
for number in denied:
    code += struct.pack("HBBI", 0x15, 0, 1, number) + struct.pack("HBBI", 6, 0, 0, 0x00050001)  # EPERM
code += struct.pack("HBBI", 6, 0, 0, 0x7fff0000)
raw = ctypes.create_string_buffer(code)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(raw)))
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, program, 0, 0) == 0
if sys.argv[1:]:
    os.execvp(sys.argv[1], sys.argv[1:])
"""


def under_a_filter(*denied: int) -> list[str]:
    """Return what runs a program under one, which allows all calls but those of these numbers (x86-64)."""
    return ["env", f"DENIED_CALLS={' '.join(map(str, denied))}", sys.executable, "-c", UNDER_A_FILTER]
