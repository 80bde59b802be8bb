"""Run a keeper: ``python -m jupyter_gpuckpt.keeper FOLDER LOCK_FD READY_FD copy|take-over|job|restore|resume``.

Or, for a new kernel that was started before (`starter.py`), ``hold RUN SLEEPER KERNEL`` as the last words.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

from ..client.record import LOG, KernelFolder
from ..linux import batch_step
from ..linux.processes import start_time
from .process import Started, keep

LOG_LIMIT = 1 << 20
"""So long the log becomes, in bytes."""


class _Log(RotatingFileHandler):
    """The keeper's log: when it has become long, it is put aside, and the one put aside before is gone.

    Standard error leads to the same file: what Python says at its end, and what the driver's worker says.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=LOG_LIMIT, backupCount=1, encoding="utf-8")

    def doRollover(self) -> None:  # noqa: N802 - logging's name
        super().doRollover()
        if self.stream is not None:
            os.dup2(self.stream.fileno(), 2)


def main(
    folder: str, lock_fd: str, ready_fd: str, how: str, run: str = "", sleeper: str = "0", kernel: str = "0"
) -> None:
    """Keep one kernel; what there is to say at the start goes to READY_FD, and the log into the folder.

    The keeper holds the folder's lock by having LOCK_FD open. `run`, `sleeper` and `kernel` are those of `Started`.
    """
    started = Started(run, int(sleeper), int(kernel)) if how == "hold" else None
    step = batch_step.of_this_process() if how != "take-over" else None  # as long as its parents are known
    if how in ("take-over", "job", "restore") and os.fork():
        os._exit(0)  # it does not belong to whoever started the job, or happened to find the kernel without a keeper
    os.umask(0o077)
    for fd in (lock_fd, ready_fd):
        os.set_inheritable(int(fd), False)

    def ready(error: str) -> None:
        with open(int(ready_fd), "w") as f:
            f.write(error or "ready")

    begun = start_time(started.sleeper) if started is not None else None
    try:
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", handlers=[_Log(Path(folder) / LOG)]
        )
        asyncio.run(keep(KernelFolder(Path(folder)), how, ready, started, step))
    finally:
        # Where the folder was removed meanwhile, nobody else would ever find the kernel that was started.
        if started is not None and begun is not None and start_time(started.sleeper) == begun:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(started.sleeper, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
