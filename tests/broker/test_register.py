"""What the broker notes of sleepers, while others look at it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from jupyter_gpuckpt.broker.register import Register


def test_no_sleeper_is_forgotten_while_it_is_noted(tmp_path: Path) -> None:
    """Each of a container's requests looks at all of them, and forgets those that have ended."""
    register, ended, me = Register(tmp_path), threading.Event(), os.getpid()
    (tmp_path / "sleepers").mkdir()

    def look() -> None:
        while not ended.is_set():
            register.pids()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(2000):
            register.add(me, 1000, in_container=True)
            assert register.has(me, 1000, in_container=True)
            register.forget(me)
    finally:
        ended.set()
        looking.join()
