"""What a kernel starts with, whoever starts it: a run folder, and what its sleeper is told to spawn."""

from __future__ import annotations

import itertools
import os
import secrets
from pathlib import Path
from typing import Any

from .. import settings
from ..lock_files import KEEPER_LOCK
from .link import FROM_KERNEL, TO_KERNEL
from .namespace import FIRST_PID, run_path, socket_of
from .record import KERNEL_LOG, Launch

__all__ = ["kernel_program", "new_run_folder"]


def new_run_folder(kernel_dir: Path) -> Path:
    """Make the folder that a new sleeper shares with its keeper, with what the kernel looks for in it.

    Raises
    ------
    OSError : it could not be made.
    """
    run_dir = next(path for n in itertools.count(1) if not (path := kernel_dir / f"run-{n}").exists())
    socket_of(kernel_dir, run_dir).unlink(missing_ok=True)
    run_dir.mkdir(mode=0o700)
    (run_dir / settings.RUN_ID).write_text(secrets.token_hex(16))
    # By it the agent sees whether the keeper lives.
    (run_dir / KEEPER_LOCK).hardlink_to(kernel_dir / KEEPER_LOCK)
    for name in (TO_KERNEL, FROM_KERNEL):
        os.mkfifo(run_dir / name, 0o600)
    return run_dir


def kernel_program(launch: Launch) -> dict[str, Any]:
    """Return how a sleeper is to spawn this kernel, as `Namespace.spawn` and the sleeper itself take it."""
    return {
        "argv": launch.argv,
        "env": {**launch.env, settings.ENV_RUN_DIR: settings.NAMESPACE_RUN_DIR},
        "cwd": launch.cwd,
        "umask": launch.umask,
        "stdout": run_path(KERNEL_LOG),
        "after_pid": FIRST_PID - 1,
        "subreaper": True,
    }
