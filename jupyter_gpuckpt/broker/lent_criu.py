"""criu, run where its own files cannot be found by their paths: in a container.

Its folder, and that of our library in it, are descriptors of the process that becomes criu. What they name is a mount
of that folder alone, in no namespace: there is no way up from it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import installed
from ..errors import Unavailable
from ..freeze.criu_program import CriuProgram
from ..linux.spawning import check

__all__ = ["Folders", "folders", "has_own_libraries", "lend", "moved", "refuse_without_own_libraries"]

Folders = Mapping[str, int]
"""Paths, and the descriptors of what is there."""

_OPEN_TREE, _CLONE = 428, 1  # asm-generic/unistd.h; linux/mount.h
_AT_FDCWD = -100

_libc = ctypes.CDLL(None, use_errno=True)


def refuse_without_own_libraries(program: CriuProgram) -> None:
    """Refuse a criu that is not started through a loader of its own: it would load the libraries of a container.

    Raises
    ------
    Unavailable : it is not in a folder of its own, with all that it needs.
    """
    if not has_own_libraries(program):
        raise Unavailable(
            "The broker was not started.",
            f"For containers it needs a CRIU that comes with its own libraries, and {program.path} has none.",
            "Run `gpuckpt setup` as root and unset GPUCKPT_CRIU, or leave out --containers.",
        )


def has_own_libraries(program: CriuProgram) -> bool:
    """Tell whether criu lies in a folder of its own, with all that it needs."""
    return _own_folder(program) is not None


def lend(program: CriuProgram) -> Folders:
    """Open the folders that criu is run from, by their paths.

    Raises
    ------
    OSError : the system does not let it be done.
    """
    return {folder: _open(folder) for folder in folders(program)}


def folders(program: CriuProgram) -> list[str]:
    """Return the paths of these folders."""
    own = _own_folder(program)
    return [*([own] if own is not None else []), str(installed.CRIU_SOCKETS_LIBRARY.parent)]


def moved(words: Sequence[str], at: Folders) -> list[str]:
    """Return words of a command line with paths, or lists of paths, in these folders as this process has them open."""
    own = f"/proc/{os.getpid()}/fd"
    places = {folder: f"{own}/{descriptor}" for folder, descriptor in at.items()}
    return [":".join(_moved(part, places) for part in word.split(":")) for word in words]


def _moved(path: str, places: Mapping[str, str]) -> str:
    for folder, place in places.items():
        if path == folder or path.startswith(f"{folder}/"):
            return place + path[len(folder) :]
    return path


def _own_folder(program: CriuProgram) -> str | None:
    """Return the folder that has criu, its loader and its libraries; None where there is none but the root folder."""
    words = program.argv[: program.argv.index(program.path)] if program.path in program.argv else ()
    paths = [part for word in words for part in word.split(":") if os.path.isabs(part)]  # noqa: PTH117
    folder = Path(os.path.commonpath([*paths, program.path])) if paths else Path("/")
    return None if folder in (Path("/"), Path("/usr")) else str(folder)


def _open(folder: str) -> int:
    descriptor: int = _libc.syscall(_OPEN_TREE, _AT_FDCWD, folder.encode(), _CLONE | os.O_CLOEXEC)
    if descriptor < 0:
        check(-1, f"open {folder} as a mount of its own")
    return descriptor
