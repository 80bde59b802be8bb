"""What root runs or trusts is to be root's alone: what others could change is refused, and every way that leads there.

Python has read some of it by then (``pyvenv.cfg``, ``.pth`` files, the modules that are loaded). Whoever could change
that may have done so already; but never in silence, and not for a service that goes on.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from .. import proc
from ..errors import Unavailable
from ..freeze import criu
from ..freeze.criu_program import CriuProgram

__all__ = ["refuse_changeable", "refuse_changeable_folder"]

_OTHERS_MAY_WRITE = 0o022
_OF_OTHERS = ("site-packages", "dist-packages")  # in the standard library's folder; of these only what is loaded counts


def refuse_changeable(program: CriuProgram) -> None:
    """Refuse to serve with programs that others than root could change, or that users cannot read.

    Raises
    ------
    Unavailable : naming the file or folder.
    """
    folders = [Path(path) for path in sys.path if Path(path).exists()]
    for path in (Path(program.argv[0]), Path(program.path), Path(sys.executable), criu.AT_POST_DUMP, *folders):
        _refuse_unreadable(path.resolve())
    known: dict[Path, Path] = {}
    for path in (*folders, *_of_python(folders), *_of_criu(program)):
        _refuse_changeable(path, known)


def refuse_changeable_folder(folder: Path) -> None:
    """Refuse a folder whose entries others than root could replace.

    Raises
    ------
    Unavailable : naming it, or the folder or link on the way to it.
    """
    _refuse_changeable(folder.absolute(), {})


def _of_python(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield what this process has loaded or may still load, and what tells Python from where."""
    executable = Path(sys.executable)
    yield executable
    yield from (folder / "pyvenv.cfg" for folder in (Path(sys.prefix), executable.parent))
    for folder in folders:
        yield from folder.glob("*.pth") if folder.is_dir() else ()
    yield from _below(Path(os.__file__).parent)
    for name, module in list(sys.modules.items()):
        if "." not in name:
            for package in getattr(module, "__path__", ()):
                yield from _below(Path(package))
            if file := getattr(module, "__file__", None):
                yield Path(file)
    for line in proc.lines("/proc/self/maps"):
        if (place := line.find("/")) >= 0 and not line.endswith(" (deleted)"):
            yield Path(line[place:])


def _of_criu(program: CriuProgram) -> Iterator[Path]:
    """Yield its file, and those of the loader and the libraries that its command line names."""
    yield Path(program.path)
    for word in program.argv:
        for path in map(Path, word.split(":")):
            if path.is_absolute():
                yield path
                yield from _below(path)


def _below(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _OF_OTHERS]
        yield from (Path(where, name) for name in (*folders, *files))


def _refuse_changeable(path: Path, known: dict[Path, Path]) -> None:
    """Refuse a path that others could make lead elsewhere, and where it leads to: a file, a folder, or nothing yet."""
    real = _real(path, known)
    while not os.path.lexists(real):
        real = real.parent
    if real.lstat().st_mode & _OTHERS_MAY_WRITE:
        raise _changeable(real)


def _real(path: Path, known: dict[Path, Path]) -> Path:
    """Return where a path leads, after judging each step; a folder such as /tmp is one where root's entries stay."""
    if path not in known:
        known[path] = _judged(path, known)
    return known[path]


def _judged(path: Path, known: dict[Path, Path]) -> Path:
    at = path
    if path != path.parent:
        folder = _real(path.parent, known)
        if path.name == "..":
            return folder.parent
        at = folder / path.name
    try:
        about = at.lstat()
    except FileNotFoundError:
        return at
    if stat.S_ISLNK(about.st_mode):
        if about.st_uid != 0:
            raise _changeable(at)
        return _real(at.parent / at.readlink(), known)
    shared = stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX
    if about.st_uid != 0 or (about.st_mode & _OTHERS_MAY_WRITE and not shared):
        raise _changeable(at)
    return at


def _changeable(path: Path) -> Unavailable:
    return _does_not_work(f"{path} can be changed by others than root.", "Install it where only root can write")


def _refuse_unreadable(real: Path) -> None:
    for part in (real, *real.parents):
        mode = part.stat().st_mode
        readable = 0o5 if stat.S_ISDIR(mode) or (part == real and os.access(real, os.X_OK)) else 0o4
        if mode & readable != readable and not (stat.S_ISDIR(mode) and mode & 0o1):
            raise _does_not_work(f"{part} cannot be read by users.", "Install it where users can read")


def _does_not_work(why: str, then: str) -> Unavailable:
    return Unavailable("The broker does not work from here.", why, f"{then} (such as /opt), and start it from there.")
