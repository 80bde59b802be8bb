"""Becomes a program in control groups that ends with its parent: `host_enter.py GROUP... -- PROGRAM ARGUMENT...`."""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1

words = sys.argv[1:]
end = words.index("--")
ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
for group in words[:end]:
    Path(group, "cgroup.procs").write_text("0")
os.closerange(3, 1024)
os.execvp(words[end + 1], words[end + 1 :])
