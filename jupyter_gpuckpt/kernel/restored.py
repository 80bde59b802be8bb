"""How a process that has no agent notices that it was restored, such as a job's: a thread waits in `open` of a FIFO.

Nobody opens the other end. A process that is saved does so in the middle of that call, which begins again when it goes
on. In a restored one, the run folder is another: the FIFO is not there any more, and the call ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable

from .. import settings

__all__ = ["call_when_restored"]

log = logging.getLogger("gpuckpt.agent")

_listening: set[int] = set()
"""This process's pid, once its thread listens; a forked child has its parent's alone."""


def call_when_restored(work: Callable[[], None]) -> None:
    """Have `work` called in a thread whenever this process was restored; not in a process that no keeper holds."""
    run_dir = os.environ.get(settings.ENV_RUN_DIR)
    if run_dir is None or os.getpid() in _listening:
        return
    _listening.add(os.getpid())
    threading.Thread(target=_listen, args=(run_dir, work), name="gpuckpt-restored", daemon=True).start()


def _listen(run_dir: str, work: Callable[[], None]) -> None:
    while True:
        try:
            _wait(f"{run_dir}/not-restored-{secrets.token_hex(8)}")
            work()
        except Exception:
            log.exception("from now on it is not noticed when this process is restored")
            return


def _wait(fifo: str) -> None:
    """Wait until this process was restored."""
    os.mkfifo(fifo, 0o600)
    while True:
        try:
            os.close(os.open(fifo, os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            return
