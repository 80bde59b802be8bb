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

from .. import installed
from ..errors import Unavailable
from ..freeze import criu
from ..freeze.criu_program import CriuProgram, files_of
from ..linux import proc
from ..linux.root_only import below, changeable

__all__ = ["refuse_changeable", "refuse_changeable_folder"]


def refuse_changeable(program: CriuProgram) -> None:
    """Refuse to serve with programs that others than root could change, or that users cannot read.

    Raises
    ------
    Unavailable : naming the file or folder.
    """
    folders = [Path(path) for path in sys.path if Path(path).exists()]
    run_by_users = [Path(program.argv[0]), Path(program.path), installed.CRIU_SOCKETS_LIBRARY, criu.AT_POST_DUMP]
    if installed.SHM_PACKER.exists():
        run_by_users.append(installed.SHM_PACKER)
    for path in (*run_by_users, Path(sys.executable), *folders):
        _refuse_unreadable(path.resolve())
    known: dict[Path, Path] = {}
    for path in (*folders, *_of_python(folders), *files_of(program.argv, program.path)):
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
    yield from below(Path(os.__file__).parent)
    for name, module in list(sys.modules.items()):
        if "." not in name:
            for package in getattr(module, "__path__", ()):
                yield from below(Path(package))
            if file := getattr(module, "__file__", None):
                yield Path(file)
    for line in proc.lines("/proc/self/maps"):
        if (place := line.find("/")) >= 0 and not line.endswith(" (deleted)"):
            yield Path(line[place:])


def _refuse_changeable(path: Path, known: dict[Path, Path]) -> None:
    if (part := changeable(path, known)) is not None:
        raise _does_not_work(f"{part} can be changed by users other than root.", "Install it where only root can write")


def _refuse_unreadable(real: Path) -> None:
    for part in (real, *real.parents):
        mode = part.stat().st_mode
        readable = 0o5 if stat.S_ISDIR(mode) or (part == real and os.access(real, os.X_OK)) else 0o4
        if mode & readable != readable and not (stat.S_ISDIR(mode) and mode & 0o1):
            raise _does_not_work(f"{part} cannot be read by users.", "Install it where users can read")


def _does_not_work(why: str, then: str) -> Unavailable:
    return Unavailable("The broker does not work from here.", why, f"{then} (such as /opt), and start it from there.")
