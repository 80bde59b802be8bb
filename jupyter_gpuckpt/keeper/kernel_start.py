"""What a kernel starts with, whoever starts it: a run folder, and what its sleeper is told to spawn."""

from __future__ import annotations

import itertools
import os
import secrets
from pathlib import Path
from typing import Any

from .. import settings
from ..lock_files import KEEPER_LOCK
from . import spawning
from .record import KERNEL_LOG, Launch

__all__ = ["FIRST_PID", "FROM_KERNEL", "TO_KERNEL", "kernel_program", "new_run_folder", "run_path", "socket_of"]

FIRST_PID = 10_000
"""Kernels start at a high pid: criu itself takes low ones in the namespace that it restores into."""

TO_KERNEL, FROM_KERNEL = "to-kernel", "from-kernel"
"""In the run folder: the two FIFOs that keeper and agent talk by (`link`)."""


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


def socket_of(kernel_dir: Path, run_dir: Path) -> Path:
    """Return where the sleeper over a run folder listens."""
    return kernel_dir / spawning.socket_name(str(run_dir))


def run_path(name: str) -> str:
    """Return the path of a file of the run folder, as the kernel sees it."""
    return f"{settings.NAMESPACE_RUN_DIR}/{name}"
