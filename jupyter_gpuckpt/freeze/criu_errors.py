"""What criu's log says of a failure: the first error, its cause as far as it is known, and what a user can do.

criu has no numbers for its errors. Here alone they are told by their words.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

__all__ = ["Cause", "CriuError", "first_line", "in_log"]

_MARK = "Error ("
"""criu marks errors with ``Error (file:line):``."""
_HARMLESS = (
    "RLIMIT_NOFILE",
    "Can't check shutdown state",
    "Unable to create tun",
    "reported by netlink",
    "Unable to create a veth pair",
    "net: Unexpected error",
)
"""Of errors in criu's log: a limit that stays as it is; a TCP connection somewhere on the machine that is closed and
not forgotten yet (TIME_WAIT), which Linux says less of; what criu tries out of network devices that no kernel has."""
_PROGRAM_FAILED = "exited, status="
"""What criu says of a program that it ran: its own words stand before."""
_STAMP = re.compile(r"^\([\d.]+\)\s*(\d+: )?")
_OWN = re.compile(r"^(\([\d.]+\)\s*(\d+: )?)?(Error|Warn) |^\s*$")


class Cause(Enum):
    """Why criu failed: a part of its words, and what a user can do. The first that fits is it."""

    OLD_CRIU = ("Can't get 1:16 opt", "This CRIU is too old for this Linux: run `gpuckpt setup`, and try again.")
    DISK_FULL = (
        "No space left",
        "Free disk space, or save to a folder on another disk: `gpuckpt save @ NAME --to FOLDER`.",
    )
    OUTER_CONNECTION = (
        "half of stream unix",
        "Close the connection to the other program (a database, a display, an ipc socket) and try again.",
    )
    DEVICE = (
        "handle_device_vma",
        "A process of the {kernel} maps a device that cannot be saved. If it has only just begun to use a GPU, save "
        "again; otherwise end it and try again.",
    )
    FILE_CHANGED = ("bad size", "Put the file back as it was when the {kernel} was saved.")
    PORT_TAKEN = ("Address already in use", "Another program listens at a port of the snapshot; end it and try again.")
    FILE_SYSTEM_GONE = (
        "Can't lookup mount",
        "Close files on file systems that were mounted or unmounted after the {kernel}'s start, and POSIX message "
        "queues, and try again.",
    )
    OPEN_DEVICE = (
        "of that type [",
        "A process of the {kernel} has a device open that cannot be saved (`ls -l /dev` has its numbers); close it and "
        "try again.",
    )
    NETLINK = (
        "The socket has data to read",
        "Have the {kernel} read what waits in its netlink socket, or close it, and try again.",
    )
    CREDENTIALS = (
        "Control messages in queue",
        "Have the {kernel} read what waits in its Unix sockets with SO_PASSCRED, and try again.",
    )
    PACKETS = (
        "packetized mode",
        "A pipe of the {kernel} keeps packets apart (pipe2 with O_DIRECT), which CRIU cannot save: close it and try "
        "again.",
    )
    SHARED_MEMORY = (
        "Can't make VM id",
        "A child of the {kernel} shares all memory with its parent (clone with CLONE_VM), which CRIU cannot save: end "
        "it and try again.",
    )
    RENAMED_SOCKET = (
        "Unable too cut",  # these are criu's words
        "A Unix socket of the {kernel} was renamed after it was bound, which CRIU cannot save: close it and try again.",
    )
    SECRET_MEMORY = ("/secretmem", "End the process that uses memfd_secret, and try again.")
    OTHER_ROOT = (
        "Unable to connect a transport socket",
        "A process that has changed its root folder (chroot) cannot be saved; end it and try again.",
    )
    OTHER_USER = (
        "Can't get rlimit",
        "A process of the {kernel} is another user's, for which CRIU needs CAP_SYS_RESOURCE: start the container with "
        "it (`--cap-add SYS_RESOURCE`), or end that process and try again.",
    )
    INTERRUPTED = (
        "task interruption",
        "A child ended at the very moment at which CRIU looked into its parent; save again.",
    )
    FILE_WATCHER = ("inotify", "Stop the file watcher in the {kernel} and try again.")
    IO_URING = ("io_uring", "Stop the code that uses io_uring in the {kernel} (CRIU cannot save it) and try again.")
    SECCOMP = (
        "suspending seccomp",
        "End the processes with a seccomp filter (a browser, a sandbox) in the {kernel} and try again.",
    )
    NO_MEMORY = (
        "Cannot allocate memory",
        "Free memory, or give the {kernel} more (in a job of Slurm's: `--mem`), and try again.",
    )
    NO_RIGHT = ("Permission denied", "Run `gpuckpt doctor`: it checks the rights that are needed.")
    UNKNOWN = ("", "Run `gpuckpt doctor`; if it finds nothing, look into criu's log above that line.")

    def __init__(self, words: str, advice: str) -> None:
        self.words, self.advice = words, advice

    @classmethod
    def of(cls, error: BaseException) -> Cause:
        """Return the cause of an error that is not criu's: the system's have numbers."""
        number = error.errno if isinstance(error, OSError) else None
        return _OF_THE_SYSTEM.get(number or 0, cls.UNKNOWN)


_OF_THE_SYSTEM = {
    errno.ENOSPC: Cause.DISK_FULL,
    errno.EADDRINUSE: Cause.PORT_TAKEN,
    errno.EACCES: Cause.NO_RIGHT,
    errno.ENOMEM: Cause.NO_MEMORY,
}


@dataclass(frozen=True)
class CriuError:
    """An error in criu's own words (nothing where it named none), and its cause."""

    words: str
    cause: Cause

    @classmethod
    def said(cls, words: str) -> CriuError:
        """Return the error that these words of criu's are."""
        return cls(words, next(cause for cause in Cause if cause.words in words))

    def without_disk(self, folder: Path) -> CriuError:
        """Return this error as it is where `folder`, with the log, has no room: the log may be cut off, and names what
        failed, not why."""
        if self.cause is Cause.DISK_FULL:
            return self
        cut = f" ({self.words})" if self.words else ""
        return CriuError(f"No space left on the disk, not even for criu's log: {folder}{cut}", Cause.DISK_FULL)


def first_line(text: str) -> str:
    """Return the first line of criu's words that names an error, or the first line at all.

    Errors after which it goes on as if nothing had been are passed over.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _is_harmless(line)]
    return ([line for line in lines if _MARK in line] or lines or [""])[0]


def in_log(log: Path) -> CriuError:
    """Return the first error in a log of criu's, without its time stamp."""
    try:
        text = log.read_text("utf-8", "replace")
    except OSError:
        text = ""
    line = first_line(text)
    if _PROGRAM_FAILED in line:
        before = text[: text.index(line)].splitlines()
        words = (said for said in before if not _OWN.match(said) and not _is_harmless(said))
        return CriuError.said(next(words, line).strip())
    return CriuError.said(_STAMP.sub("", line) if _MARK in line else "")


def _is_harmless(line: str) -> bool:
    return any(words in line for words in _HARMLESS)
