"""Processes have been running since before the save: a restored one is a new one to the system, with a later start.

psutil knows a process by its id and its start. For a `psutil.Process` of before the save the process would have ended,
and another have its id: it could not be waited for, or ended. So psutil is told the start of before the save.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from typing import Any

__all__ = ["go_on", "note"]

_START = 19  # its place behind the name in /proc/PID/stat (proc_pid_stat(5)), and what psutil calls it
_NAME = "create_time"

_noted: dict[int, bytes] = {}
_before: dict[tuple[int, bytes], bytes] = {}
"""When a process started that this kernel was saved with, by its id and what the system tells of its start now."""


def note() -> None:
    """Note when the processes that there are have started: the kernel is about to be saved."""
    global _noted
    _noted = {pid: _before.get((pid, start), start) for pid, start in _starts().items()}


def go_on() -> None:
    """Have psutil know the processes that were noted as the same: they were just restored."""
    global _before
    _before = {(pid, start): _noted[pid] for pid, start in _starts().items() if pid in _noted}
    process: Any = getattr(sys.modules.get("psutil._pslinux"), "Process", None)
    read = getattr(process, "_parse_stat_file", None)
    if read is not None and getattr(read, "__module__", "") != __name__:
        process._parse_stat_file = _with_start_of_before(read)


def _starts() -> dict[int, bytes]:
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                found[int(folder.name)] = (folder / "stat").read_bytes().rpartition(b")")[2].split()[_START]
    return found


def _with_start_of_before(read: Any) -> Any:
    @functools.wraps(read, assigned=("__doc__",))
    def parse_stat_file(process: Any) -> dict[str, Any]:
        told = read(process)
        start = told[_NAME]
        return {**told, _NAME: _before.get((process.pid, start), start)}

    return parse_stat_file
