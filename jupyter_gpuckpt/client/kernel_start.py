"""What a kernel starts with: a run folder, what its sleeper is told to spawn, and a sleeper where root is lacking."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from .. import driver_library, settings
from ..linux import proof, spawning
from ..linux.lock_files import KEEPER_LOCK
from ..linux.spawning import Program
from ..linux.unix_sockets import peer_pid, short_path
from . import broker_connection
from .record import KERNEL_LOG, Launch
from .sleeper_messages import NotSpawned, Spawned, request, told_in

__all__ = [
    "FIRST_PID",
    "FROM_KERNEL",
    "TO_KERNEL",
    "kernel_program",
    "new_run_folder",
    "run_path",
    "socket_of",
    "start_by_deputy",
]

_CONTROL = Path("/dev/nvidiactl")
"""It is there where there is an NVIDIA driver."""

FIRST_PID = 10_000
"""Kernels start at a high pid: criu itself takes low ones in the namespace that it restores into."""

_START_TIMEOUT = 20.0  # how long a new sleeper may be silent, in seconds

TO_KERNEL, FROM_KERNEL = "to-kernel", "from-kernel"
"""In the run folder: the two FIFOs that keeper and agent talk by (`link`)."""


def new_run_folder(kernel_dir: Path, env: Mapping[str, str]) -> Path:
    """Make the folder that a new sleeper shares with its keeper, with what the kernel looks for in it.

    `env` is what the kernel is started with; a restored one finds there what differs from its first start.

    Raises
    ------
    OSError : it could not be made.
    """
    run_dir = next(path for n in itertools.count(1) if not (path := kernel_dir / f"run-{n}").exists())
    socket_of(kernel_dir, run_dir).unlink(missing_ok=True)
    run_dir.mkdir(mode=0o700)
    with open(os.open(run_dir / settings.RUN_ID, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
        f.write(secrets.token_hex(16))
    with open(os.open(run_dir / settings.ENVIRONMENT, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items()))
    (run_dir / proof.WANTED).touch(0o600)
    # By it the agent sees whether the keeper lives.
    (run_dir / KEEPER_LOCK).hardlink_to(kernel_dir / KEEPER_LOCK)
    for name in (TO_KERNEL, FROM_KERNEL):
        os.mkfifo(run_dir / name, 0o600)
    return run_dir


def kernel_program(launch: Launch) -> Program:
    """Return how a sleeper is to spawn this kernel."""
    return Program(
        argv=launch.argv,
        env={
            **launch.env,
            settings.ENV_RUN_DIR: settings.NAMESPACE_RUN_DIR,
            settings.ENV_ENVIRONMENT: run_path(settings.ENVIRONMENT),
        },
        stdout=run_path(KERNEL_LOG),
        cwd=launch.cwd,
        umask=launch.umask,
        after_pid=FIRST_PID - 1,
        subreaper=True,
        io_uring=settings.io_uring.read_from(launch.env),
        shielded=launch.shielded,
        # A kernel's agent sees to it itself, before anything uses CUDA.
        parking=not launch.agent and driver_library.is_for(launch.env),
        nccl=settings.nccl.read_from(launch.env) and _CONTROL.exists(),
    )


def start_by_deputy(kernel_dir: Path, run_dir: Path, program: Program) -> tuple[int, int]:
    """Have the broker make a sleeper over this run folder, and start a kernel's program in it.

    Returns the sleeper's pid, and the kernel's in its namespace. The keeper holds both later, with a deputy of its own.

    Raises
    ------
    GpuckptError, OSError : the program could not be started. A sleeper may be left: it is found by its socket.
    """
    listening_at = socket_of(kernel_dir, run_dir)
    helper = broker_connection.Deputy()
    try:
        sleeper = helper.start(run_dir, listening_at)
        helper.next_pid(program.after_pid)
    finally:
        helper.close()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_START_TIMEOUT)
        with short_path(listening_at) as short:
            connection.connect(short)
        connection.sendall(proof.first_line(peer_pid(connection)))
        connection.sendall(request(program.at_any_pid(), 0))
        with connection.makefile("rb") as answer:
            line = answer.readline()
    match told_in(line) if line else NotSpawned("its process 1 ended", 0):
        case Spawned(pid):
            return sleeper, pid
        case NotSpawned(why):
            raise OSError(why)
    raise OSError("its process 1 did not answer")


def socket_of(kernel_dir: Path, run_dir: Path) -> Path:
    """Return where the sleeper over a run folder listens."""
    return kernel_dir / spawning.socket_name(str(run_dir))


def run_path(name: str) -> str:
    """Return the path of a file of the run folder, as the kernel sees it."""
    return f"{settings.NAMESPACE_RUN_DIR}/{name}"
