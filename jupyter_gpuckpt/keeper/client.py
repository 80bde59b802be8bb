"""Finding keepers, starting them, and giving a kernel whose keeper died a new one."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator

from ..errors import GpuckptError, KeeperGone, NoSuchKernel
from .protocol import KeeperClient
from .record import LOG, SOCKET, KernelFolder, Launch

_READY_TIMEOUT = 60.0


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
        take_over(folder)
    return KeeperClient(folder.path / SOCKET, timeout)


def folders() -> Iterator[KernelFolder]:
    """Yield the folder of every kernel that still lives; what dead ones left is removed."""
    for folder in KernelFolder.all():
        if folder.has_keeper() or folder.has_sleeper():
            yield folder
        else:
            folder.remove()


def find(text: str) -> KernelFolder:
    """Return the folder of the kernel that a person means: by id, its beginning, the notebook's name, or a pid.

    Raises
    ------
    NoSuchKernel : none or several fit.
    """
    found = []
    for folder in folders():
        launch = folder.launch()
        if launch.kernel_id == text:
            return folder
        notebook = launch.notebook.rpartition("/")[2]
        if text and (launch.kernel_id.startswith(text) or text in (launch.notebook, notebook)):
            found.append((folder, launch))
    if len(found) == 1:
        return found[0][0]
    names = ", ".join(launch.kernel_id for _, launch in found)
    raise NoSuchKernel(
        f"{'Several kernels fit' if found else 'No kernel fits'} {text!r}.",
        names and f"These do: {names}.",
        "`jupyter gpuckpt kernels` lists them.",
    )
