"""Calls of io_uring, for tests: what they answer."""

from __future__ import annotations

import errno

CALLS = """
import ctypes, os
def calls():
    libc, found = ctypes.CDLL(None, use_errno=True), []
    for number, first in ((425, 8), (426, -1), (427, -1)):
        made = libc.syscall(number, first, ctypes.create_string_buffer(120), 0, 0, 0, 0)
        found.append(ctypes.get_errno() if made < 0 else 0)
        if made >= 0:
            os.close(made)
    return found
"""
"""Defines what returns the errors of io_uring_setup, io_uring_enter and io_uring_register, 0 for none."""

NO_CALLS = [errno.ENOSYS] * 3
"""What they are where the system knows no io_uring."""
