"""Networks of the tests' own: a thread of a test makes its connections in one of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000


@contextlib.contextmanager
def in_network_of(pid: int) -> Iterator[None]:
    """Have this thread make its connections where a process does, for the block."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as own, open(f"/proc/{pid}/ns/net") as other:
        assert libc.setns(other.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(own.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
