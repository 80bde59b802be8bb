"""Jobs: commands that are no kernels. What one wrote, and how it ended, stays under its name until it is forgotten."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping

from .. import settings
from ..errors import BadName, Busy, NameTaken, NoSuchKernel
from ..operations.requests import Restore
from ..store.names import check_name
from . import keepers
from .record import LAUNCH, KernelFolder, Launch

__all__ = [
    "KEPT",
    "all_folders",
    "bring_back",
    "bring_up",
    "find",
    "folder_of",
    "forget",
    "is_job",
    "job_of",
    "launch_of",
    "named",
    "start",
]

KEPT = 100
"""So many jobs that have ended are kept, the newest."""

_LAST_WORDS, _LOOK = 10.0, 0.01  # how long a keeper may take to end, and between two looks at that, in seconds
_PREFIX = "job-"


def launch_of(name: str, argv: list[str], env: Mapping[str, str], cwd: str, umask: int) -> Launch:
    """Return how a job is started.

    Raises
    ------
    BadName : the text cannot be a job's name.
    """
    check_name(name, "the name of a job")
    return Launch(_PREFIX + name, argv, dict(env), cwd, umask, connection_file="", agent=False, job=name)


def folder_of(name: str) -> KernelFolder:
    """Return where the job of this name has its folder, if there is one.

    Raises
    ------
    BadName : the text cannot be a job's name.
    """
    return KernelFolder(settings.kernels_dir() / (_PREFIX + check_name(name, "the name of a job")))


def job_of(kernel_id: str) -> str:
    """Return the name of the job that goes by this id; empty where it is a kernel's."""
    return kernel_id.removeprefix(_PREFIX) if kernel_id.startswith(_PREFIX) else ""


def is_job(folder: KernelFolder) -> bool:
    """Tell whether a folder is that of a job."""
    return folder.path.name.startswith(_PREFIX)


def all_folders() -> Iterator[KernelFolder]:
    """Yield the folder of every job, whether it runs or has ended."""
    return (folder for folder in KernelFolder.all() if is_job(folder))


def find(name: str) -> KernelFolder:
    """Return the folder of the job of this name, whether it runs or has ended.

    Raises
    ------
    NoSuchKernel : there is none.
    BadName : the text cannot be a job's name.
    Elsewhere : another machine has it.
    """
    folder = folder_of(name)
    with contextlib.suppress(FileNotFoundError):
        folder.launch()
        keepers.refuse_elsewhere(folder)
        _settle(folder)
        return folder
    names = [other.launch().job for other in all_folders()]
    raise NoSuchKernel(
        f"There is no job {name!r}.",
        f"Existing jobs: {', '.join(names)}." if names else "No jobs exist.",
        "`gpuckpt ps` lists them; `gpuckpt exec` starts one.",
        jobs=names,
    )


def named(text: str) -> KernelFolder | None:
    """Return the folder of the job of exactly this name, whether it runs or has ended; None where there is none."""
    try:
        return find(text)
    except (NoSuchKernel, BadName):
        return None


def _settle(folder: KernelFolder) -> None:
    """See to it that a job that died together with its keeper is one that has ended."""
    if folder.has_ended() or folder.has_keeper() or folder.can_be_kept():
        return
    lock = folder.lock()
    if lock is not None:
        keepers.end(folder)
        os.close(lock)


def start(launch: Launch, *, replace: bool = False) -> KernelFolder:
    """Start a job; with `replace` one of that name that has ended is forgotten.

    Raises
    ------
    NameTaken : there is a job of that name.
    GpuckptError : it could not be started; nothing is left behind.
    """
    folder, lock = _claim(launch, replace)
    _run(folder, lock, "job")
    return folder


def bring_up(launch: Launch, order: Restore, *, replace: bool = False) -> KernelFolder:
    """Bring up a new job from a snapshot; `order` is a request to restore one, `replace` as for `start`.

    Raises
    ------
    NameTaken : there is a job of that name.
    GpuckptError : it could not be restored; nothing is left behind.
    """
    folder, lock = _claim(launch, replace)
    folder.write_order(order)
    _run(folder, lock, "restore")
    return folder


def _claim(launch: Launch, replace: bool) -> tuple[KernelFolder, int]:
    """Make the folder of a new job, and return it with its lock, held."""
    _forget_oldest()
    old = folder_of(launch.job)
    with contextlib.suppress(FileNotFoundError):
        old.launch()
        if not (old.is_here() or old.has_ended()):
            raise NameTaken(
                f"There is a job {launch.job!r} already.",
                f"It runs on another machine, {old.head().host.name}.",
                f"Choose another name. If that machine is gone for good, remove {old.path}.",
                name=launch.job,
            )
        _settle(old)
        if not (replace and old.has_ended()):
            raise NameTaken(
                f"There is a job {launch.job!r} already.",
                "It has ended." if old.has_ended() else "It runs.",
                "Choose another name, or add --replace, which discards the old job's output."
                if old.has_ended()
                else "Choose another name, or `stop` it first.",
                name=launch.job,
            )
        forget(old)
    with contextlib.suppress(FileExistsError):
        return KernelFolder.create(launch)
    lock = old.lock()
    if lock is not None and not (old.path / LAUNCH).exists():  # whoever began it was killed
        old.remove()
        os.close(lock)
        return KernelFolder.create(launch)
    raise NameTaken(
        f"There is a job {launch.job!r} already.",
        "It is being started by another command.",
        "Choose another name, or wait.",
        name=launch.job,
    )


def _run(folder: KernelFolder, lock: int, how: str) -> None:
    try:
        keepers.run_keeper(folder, lock, how).wait()
    except BaseException:
        keepers.end(folder)
        os.close(lock)
        _remove_when_left(folder)
        raise
    os.close(lock)


def _remove_when_left(folder: KernelFolder) -> None:
    """Remove a folder when its keeper has ended, which may be writing its last into it."""
    held = None
    deadline = time.monotonic() + _LAST_WORDS
    with contextlib.suppress(FileNotFoundError):
        while (held := folder.lock()) is None and time.monotonic() < deadline:
            time.sleep(_LOOK)
    folder.remove()
    if held is not None:
        os.close(held)


def bring_back(folder: KernelFolder, order: Restore) -> None:
    """Bring a job that has ended back from a snapshot; `order` is a request to restore one.

    It finds the environment of this process (`settings.ENVIRONMENT`).

    Raises
    ------
    Busy : it runs.
    GpuckptError : it could not be restored; it is as it was.
    """
    lock = folder.lock()
    if lock is None:
        raise Busy("The job has not ended yet.", "Its keeper is still running.", "Ask again in a moment.")
    try:
        folder.write_launch(dataclasses.replace(folder.launch(), env=dict(os.environ), runner=None))
        folder.write_order(order)
        keepers.run_keeper(folder, lock, "restore").wait()
    except BaseException:
        keepers.end(folder)
        raise
    finally:
        os.close(lock)


def forget(folder: KernelFolder) -> None:
    """Remove what is kept of a job that has ended.

    Raises
    ------
    Busy : it runs.
    """
    lock = folder.lock() if folder.has_ended() else None
    if lock is None:
        raise Busy(
            f"The job {folder.launch().job} was not forgotten.",
            "It is running, or has not completely ended.",
            f"`gpuckpt stop {folder.launch().job}` ends it.",
        )
    folder.remove()
    os.close(lock)


def _forget_oldest() -> None:
    ended = []
    for folder in all_folders():
        with contextlib.suppress(OSError, ValueError):
            state = folder.state()
            if state.ended is not None:
                ended.append((state.ended.at, folder))
    for _, folder in sorted(ended, key=lambda pair: pair[0])[: -(KEPT - 1)]:
        with contextlib.suppress(Busy, OSError):
            forget(folder)
