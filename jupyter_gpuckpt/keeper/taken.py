"""What of a saved tree only one tree can have, locks of files and terminals, where somebody else has it.

criu would wait for a lock until it is killed, when the running kernel may have been ended already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from ..errors import Refused
from ..freeze import images
from ..linux import exclusive, processes
from ..snapshots.needs import ELSEWHERE

__all__ = ["lost_locks", "refuse_for_copies", "refuse_taken"]


def refuse_taken(what: str, folder: Path, root: Path, leaving: Collection[int]) -> None:
    """Refuse to restore a tree where a program other than those that are `leaving` has what it needs.

    `folder` is that of criu's images, `root` the one that is ``/`` to the processes when they are restored.

    Raises
    ------
    Refused : naming the file or terminal and who has it; `what` is said to have happened.
    """
    if locked := [f"{path}{_by(pid)}" for path, pid in _locked(folder, root, leaving)]:
        raise Refused(
            what,
            f"The {{kernel}} had these files locked, and another program has now: {', '.join(sorted(set(locked)))}.",
            "Close them there, or end that program, and try again.",
            files=sorted(set(locked)),
        )
    others = {number for number in images.terminals(folder) if (root / f"dev/pts/{number}").exists()}
    others -= exclusive.terminals(leaving) if others else set()
    if others:
        raise Refused(
            what,
            f"The {{kernel}} had terminals that other programs have now: {_terminals(others)}.",
            "Close these terminals (a terminal of JupyterLab's or an ssh session; `tty` in it says its name), and try "
            "again.",
            terminals=sorted(others),
        )


def refuse_for_copies(what: str, folder: Path, count: int) -> None:
    """Refuse so many copies of a tree, where they, the running kernel and others cannot all have what it has.

    Raises
    ------
    Refused : naming the files or terminals; `what` is said to have happened.
    """
    locked = {path for path, _ in _locked(folder, Path("/"), ())}
    if count > 1:
        locked |= {lock.path for lock in images.locks(folder) if lock.writes and not lock.path.startswith(ELSEWHERE)}
    if locked:
        raise Refused(
            what,
            f"Only one program can have these files locked: {', '.join(sorted(locked))}.",
            "Close them (a file that h5py writes, a database of DuckDB's), or finish what writes to them, and try "
            "again; open them again in the copies.",
            files=sorted(locked),
        )
    terminals = images.terminals(folder)
    if terminals and (count > 1 or any(Path(f"/dev/pts/{number}").exists() for number in terminals)):
        raise Refused(
            what,
            f"It has terminals, which a copy cannot have as well: {_terminals(terminals)}.",
            "End what runs in them (a child of pexpect's, a `!` command), and try again.",
            terminals=sorted(terminals),
        )


def lost_locks(folder: Path, root: Path, outer: Callable[[int], int | None]) -> list[str]:
    """Return which locks a restored tree does not have again, in words: of files that it has mapped, too.

    `outer` gives the pid of a process of the namespace as this process knows it.
    """
    wanted = [lock for lock in images.locks(folder) if lock.is_lost]
    held = exclusive.held_locks() if wanted else []
    lost = {
        lock.path
        for lock in wanted
        if not any(
            other.pid == outer(lock.pid) and other.file == _file(root, lock.path) and _overlap(lock, other)
            for other in held
        )
    }
    return [
        f"The lock of {path} is not held again, since the file is mapped, too (as SQLite with a WAL and LMDB do it): "
        "before other programs write there, close the database and open it again."
        for path in sorted(lost)
    ]


def _file(root: Path, path: str) -> tuple[int, int] | None:
    try:
        about = (root / path.removeprefix("/")).stat()
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _terminals(numbers: Collection[int]) -> str:
    return ", ".join(f"/dev/pts/{number}" for number in sorted(numbers))


def _by(pid: int) -> str:
    return f" (process {pid}, {processes.name(pid)})" if pid > 0 and processes.start_time(pid) is not None else ""


def _locked(folder: Path, root: Path, leaving: Collection[int]) -> Iterator[tuple[str, int]]:
    """Yield the files of which somebody has a lock that a lock of the saved tree excludes, and who took it."""
    wanted = [lock for lock in images.locks(folder) if not lock.path.startswith(ELSEWHERE)]
    held = exclusive.held_locks(leaving) if wanted else []
    for lock in wanted:
        file = _file(root, lock.path)  # None: who looks at all files says that it is gone
        for other in held:
            if other.file == file and _exclude(lock, other):
                yield lock.path, other.pid


def _exclude(lock: images.Lock, other: exclusive.HeldLock) -> bool:
    return (lock.writes or other.writes) and _overlap(lock, other)


def _overlap(lock: images.Lock, other: exclusive.HeldLock) -> bool:
    last = lock.start + lock.length - 1 if lock.length else None
    apart = (other.end is not None and other.end < lock.start) or (last is not None and last < other.start)
    return lock.is_whole == other.is_whole and not apart
