"""A system that says that it restricts tracing, for tests: Yama's file, and nothing of what Yama does."""

from __future__ import annotations

import sys

_SAYING = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
folder = "/proc/sys/kernel"
held = {name: os.open(f"{folder}/{name}", os.O_PATH) for name in os.listdir(folder) if name != "yama"}
def mount(source, target, kind, flags):
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, None) != 0:
        raise OSError(ctypes.get_errno(), f"mount {source} on {target}")
mount("kernel", folder, "tmpfs", 0)
for name, descriptor in held.items():
    if os.path.isdir(f"/proc/self/fd/{descriptor}"):
        os.mkdir(f"{folder}/{name}")
    else:
        open(f"{folder}/{name}", "w").close()
    mount(f"/proc/self/fd/{descriptor}", f"{folder}/{name}", "none", 0x1000)
os.mkdir(f"{folder}/yama")
with open(f"{folder}/yama/ptrace_scope", "w") as file:
    file.write(sys.argv[1] + "\\n")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def saying(scope: int) -> list[str]:
    """Return what runs a program where /proc says so, in a mount namespace that is its own already."""
    return [sys.executable, "-I", "-c", _SAYING, str(scope)]
