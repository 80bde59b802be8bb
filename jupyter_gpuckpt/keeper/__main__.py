"""Run a keeper: ``python -m jupyter_gpuckpt.keeper FOLDER READY_FD start|take-over``."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from .process import keep
from .record import KernelFolder


def main(folder: str, ready_fd: str, how: str) -> None:
    """Keep one kernel; what there is to say at the start goes to the file descriptor, and the log to stderr."""
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)

    def ready(error: str) -> None:
        with open(int(ready_fd), "w") as f:
            f.write(error or "ready")

    asyncio.run(keep(KernelFolder(Path(folder)), how == "take-over", ready))


if __name__ == "__main__":
    main(*sys.argv[1:])
