"""What root runs is to be root's alone: a file, each folder and link on the way to it, and its environment.

Root's own environment may be another user's (`sudo -E`).
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

__all__ = ["SYSTEM_PATH", "below", "changeable", "changeable_in", "environment", "temporary_folder"]

SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
"""Where the system's own programs are."""

_OTHERS_MAY_WRITE = 0o022
_OF_OTHERS = ("site-packages", "dist-packages")  # in the standard library's folder; of these only what is loaded counts
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")


def environment(**more: str) -> dict[str, str]:
    """Return the environment for a program of the system's: this process's own, but for root nothing that changes what
    the program does."""
    kept: Mapping[str, str] = os.environ
    if os.geteuid() == 0:
        kept = {name: value for name, value in kept.items() if name.lower() in _PROXIES}
    return {**kept, "PATH": SYSTEM_PATH, "LC_ALL": "C", **more}


def temporary_folder() -> Path:
    """Return where temporary files are made: for root never where others could replace them."""
    usual = Path(tempfile.gettempdir())
    if os.geteuid() == 0:
        try:
            _real(usual.absolute(), {})
        except _Changeable:
            return Path("/tmp")  # noqa: S108 - root's, where each keeps what is theirs
    return usual


def below(folder: Path) -> Iterator[Path]:
    """Yield what is in a folder, at any depth, but for packages in Python's own."""
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _OF_OTHERS]
        yield from (Path(where, name) for name in (*folders, *files))


def changeable(path: Path, known: dict[Path, Path]) -> Path | None:
    """Return what others than root could change so that a path leads to what they choose; None where there is nothing.

    That is the file or folder itself (or where it would be made), or a folder or link on the way to it. `known` is for
    several questions in a row.
    """
    try:
        real = _real(path.absolute(), known)
    except _Changeable as found:
        return found.path
    while not os.path.lexists(real):
        real = real.parent
    return real if real.lstat().st_mode & _OTHERS_MAY_WRITE else None


def changeable_in(places: Iterable[Path]) -> Path | None:
    """Return as `changeable` what others could change of some files and folders, and of what is `below` these."""
    known: dict[Path, Path] = {}
    left, done = list(places), set[Path]()
    while left:
        place = left.pop()
        if place in done:
            continue
        done.add(place)
        if (found := changeable(place, known)) is not None:
            return found
        if not place.is_dir():
            continue
        with os.scandir(place) as entries:
            for entry in entries:
                about = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(about.st_mode) and _is_roots_alone(about):
                    continue  # most are: their folder was judged, and nothing else is on the way to them
                if stat.S_ISDIR(about.st_mode) and entry.name not in _OF_OTHERS:
                    left.append(Path(entry.path))
                elif (found := changeable(Path(entry.path), known)) is not None:
                    return found
    return None


class _Changeable(Exception):
    def __init__(self, path: Path) -> None:
        self.path = path


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
    except (FileNotFoundError, NotADirectoryError):
        return at
    if stat.S_ISLNK(about.st_mode):
        if about.st_uid != 0:
            raise _Changeable(at)
        return _real(at.parent / at.readlink(), known)
    shared = about.st_uid == 0 and stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX
    if not shared and not _is_roots_alone(about):
        raise _Changeable(at)
    return at


def _is_roots_alone(about: os.stat_result) -> bool:
    return about.st_uid == 0 and not about.st_mode & _OTHERS_MAY_WRITE
