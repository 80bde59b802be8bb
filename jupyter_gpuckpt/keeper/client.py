"""Finding keepers, starting them, and giving a kernel whose keeper died a new one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import GpuckptError, KeeperGone, NoSuchKernel
from ..freeze.processes import descendants
from .protocol import KeeperClient
from .record import LOG, SOCKET, KernelFolder, Launch

_READY_TIMEOUT = 60.0
_CONNECT_POLL = 0.02


def start_keeper(launch: Launch) -> tuple[subprocess.Popen[bytes], KernelFolder]:
    """Start a keeper, and by it the kernel.

    Raises
    ------
    GpuckptError : the kernel could not be started; nothing is left behind.
    """
    folder = KernelFolder.create(launch)
    try:
        return _run_keeper(folder, "start"), folder
    except BaseException:
        folder.remove()
        raise


def take_over(folder: KernelFolder) -> None:
    """Give a kernel whose keeper died a new one.

    Raises
    ------
    GpuckptError : the kernel cannot be held any more; its folder is removed.
    """
    _run_keeper(folder, "take-over")


def _run_keeper(folder: KernelFolder, how: str) -> subprocess.Popen[bytes]:
    read, write = os.pipe()
    log = os.open(folder.path / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_gpuckpt.keeper", str(folder.path), str(write), how],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[write],
            start_new_session=True,
            cwd="/",
        )
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
        os.close(log)
    with open(read, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], _READY_TIMEOUT)
        said = pipe.read().decode() if ready else ""
    if said == "ready":
        return process
    process.kill()
    process.wait()
    if said:
        raise GpuckptError.from_dict(json.loads(said))
    words = ""
    if (folder.path / LOG).exists():
        words = (folder.path / LOG).read_text("utf-8", "replace").strip()
    raise KeeperGone(
        "The kernel's keeper did not start.",
        words.splitlines()[-1] if words else f"It said nothing within {_READY_TIMEOUT:.0f} s.",
        "Run `jupyter gpuckpt doctor`.",
    )


def connect(folder: KernelFolder, timeout: float = 10.0) -> KeeperClient:
    """Connect to the keeper of a kernel, after giving it a new one if the old one died.

    Raises
    ------
    NoSuchKernel : the kernel is gone.
    KeeperGone : its keeper does not answer.
    """
    if not folder.has_keeper():
        if not folder.has_sleeper():
            folder.remove()
            raise NoSuchKernel(
                "The kernel is gone.",
                "Neither its keeper nor its processes live any more.",
                "Start a new one; `%gpuckpt restore` brings a snapshot back into it.",
            )
        try:
            take_over(folder)
        except KeeperGone:
            # The server or another command was quicker: theirs is as good.
            if not folder.has_keeper():
                raise
    deadline = time.monotonic() + timeout
    while True:
        try:
            return KeeperClient(folder.path / SOCKET, timeout)
        except KeeperGone:
            # A new keeper has its lock a moment before it listens.
            if time.monotonic() > deadline or not folder.has_keeper():
                raise
            time.sleep(_CONNECT_POLL)


def folders() -> Iterator[KernelFolder]:
    """Yield the folder of every kernel that still lives; what dead ones left is removed."""
    for folder in KernelFolder.all():
        try:
            if folder.has_keeper() or folder.has_sleeper():
                yield folder
            elif not _is_starting(folder):
                folder.remove()
        except FileNotFoundError:  # it is being made, or its kernel has ended meanwhile
            continue


def _is_starting(folder: KernelFolder) -> bool:
    """Tell whether a keeper may still be about to take this folder, which it has not done yet."""
    return folder.state().keeper is None and time.time() - folder.path.stat().st_mtime < _READY_TIMEOUT


def find(text: str) -> KernelFolder:
    """Return the folder of the kernel that a person means.

    `text` is its id or the beginning of it, its notebook's path or name (with or without the suffix), the path or
    name of its connection file, or the pid of one of its processes or of its keeper.

    Raises
    ------
    NoSuchKernel : none or several fit.
    """
    launches = []
    for folder in folders():
        with contextlib.suppress(FileNotFoundError):
            launches.append((folder, folder.launch()))
    # What names one kernel in full comes before what fits by a part of its names.
    for fits in (_is_named, _fits):
        found = [(folder, launch) for folder, launch in launches if fits(text, folder, launch)]
        if len(found) == 1:
            return found[0][0]
        if found:
            break
    ids = [launch.kernel_id for _, launch in found]
    raise NoSuchKernel(
        f"{'Several kernels fit' if found else 'No kernel fits'} {text!r}.",
        f"These do: {', '.join(ids)}." if ids else f"{len(launches) or 'No'} kernels are running, none of that name.",
        "`jupyter gpuckpt kernels` lists them; a kernel that was not started as \"Python 3 (gpuckpt)\" is not there.",
        kernels=ids,
    )


def _is_named(text: str, _: KernelFolder, launch: Launch) -> bool:
    return bool(text) and text in (launch.kernel_id, launch.notebook, launch.connection_file)


def _fits(text: str, folder: KernelFolder, launch: Launch) -> bool:
    if not text:
        return False
    names = (Path(launch.notebook).name, Path(launch.notebook).stem, Path(launch.connection_file).name)
    return (
        launch.kernel_id.startswith(text)
        or text in names
        or _same_end(text, launch.notebook)
        or (text.isdecimal() and int(text) in _pids(folder))
    )


def _same_end(path: str, other: str) -> bool:
    """Tell whether one path is the end of the other: servers name notebooks from a folder of theirs."""
    pairs = list(zip(reversed(Path(path).parts), reversed(Path(other).parts), strict=False))
    return bool(pairs) and all(mine == theirs for mine, theirs in pairs)


def _pids(folder: KernelFolder) -> list[int]:
    state = folder.state()
    keeper, sleeper = state.keeper, state.sleeper
    return [*(pid for pid, _ in filter(None, (keeper, sleeper))), *(descendants(sleeper[0]) if sleeper else [])]
