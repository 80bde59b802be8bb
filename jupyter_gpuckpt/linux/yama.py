"""How far the system restricts tracing, where it has Yama (the kernel's Documentation/admin-guide/LSM/Yama.rst).

Yama judges who attaches to a process or opens its memory, not who looks it up in /proc. Of the processes of one user,
at 0 each may; at 1 an ancestor, or whom the process itself has named; at 2 nobody; at 3 not even root, until the
machine is restarted. CAP_SYS_PTRACE overrules 1 and 2.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["ANCESTORS", "CAPABLE", "NOBODY", "SCOPE", "ptrace_scope"]

ANCESTORS, CAPABLE, NOBODY = 1, 2, 3
SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


def ptrace_scope(path: Path = SCOPE) -> int:
    """Return it; 0 where there is no Yama."""
    return int(path.read_text()) if path.exists() else 0
