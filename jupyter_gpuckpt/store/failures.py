"""Turn what the operating system says about the store's disk into errors a user can act on."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StoreError

__all__ = ["store_failure", "storing"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CLOSED = {errno.EROFS, errno.EACCES, errno.EPERM}
_UNLOCKABLE = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def store_failure(what: str, cause: OSError, root: Path) -> StoreError:
    """Return the error to raise where `cause` stopped the store in `root` from doing its work.

    Its data: ``errno`` (the name, such as ENOSPC), ``store`` (the folder), ``free`` (bytes, or
    None where even that cannot be read).
    """
    number = cause.errno or 0
    free = _free_bytes(root)
    why = os.strerror(number) if number else str(cause)
    if cause.filename is not None:
        why += f": {os.fsdecode(cause.filename)}"
    if number in _FULL:
        room = "" if free is None else f"; {free / 1e6:,.1f} MB are free there"
        why += f" (the store is {root}{room})"
        then = (
            "Remove a snapshot that you no longer need (`gpuckpt rm NAME`), or save to a folder on another disk "
            "(`gpuckpt save @ NAME --to FOLDER`; or set GPUCKPT_STORE, where the server starts, for all future saves)."
        )
    elif number in _CLOSED:
        why += f" (the store is {root})"
        then = "Set GPUCKPT_STORE to a folder that you can write."
    elif number in _UNLOCKABLE:
        why += f" (the store is {root})"
        then = "Set GPUCKPT_STORE to a folder on a file system with file locks (flock)."
    else:
        why += f" (the store is {root})"
        then = (
            "Look for errors of that disk (`dmesg`), then try again, or set GPUCKPT_STORE to a folder on another disk."
        )
    return StoreError(what, why, then, errno=errno.errorcode.get(number, str(number)), store=str(root), free=free)


@contextmanager
def storing(what: str, root: Path) -> Iterator[None]:
    """Raise a `StoreError` that begins with `what` for any `OSError` of the block."""
    try:
        yield
    except OSError as e:
        raise store_failure(what, e, root) from e


def _free_bytes(folder: Path) -> int | None:
    try:
        room = os.statvfs(folder)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize
