"""Run a keeper: ``python -m jupyter_gpuckpt.keeper FOLDER LOCK_FD READY_FD start|copy|take-over|job|restore``."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from .process import keep
from .record import KernelFolder


def main(folder: str, lock_fd: str, ready_fd: str, how: str) -> None:
    """Keep one kernel; what there is to say at the start goes to READY_FD, and the log to stderr.

    The keeper holds the folder's lock by having LOCK_FD open.
    """
    if how in ("take-over", "job", "restore") and os.fork():
        os._exit(0)  # it does not belong to whoever started the job, or happened to find the kernel without a keeper
    os.umask(0o077)
    for fd in (lock_fd, ready_fd):
        os.set_inheritable(int(fd), False)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)

    def ready(error: str) -> None:
        with open(int(ready_fd), "w") as f:
            f.write(error or "ready")

    asyncio.run(keep(KernelFolder(Path(folder)), how, ready))


if __name__ == "__main__":
    main(*sys.argv[1:])
