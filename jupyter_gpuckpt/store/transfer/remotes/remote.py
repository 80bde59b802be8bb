"""Where snapshots can be sent to and fetched from: a few operations on files by path, below an address.

Three things implement them, beside this module: `folder` for a folder of this machine, `sftp` for one of another, and
`fsspec` for all else.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ....errors import Refused, RemoteError

__all__ = ["DRAFT", "PACKAGES", "Address", "Remote", "remote_at"]

PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "sftp": "paramiko",
    "ssh": "paramiko",
}
"""The schemes of addresses besides ``file``, each with the package that is needed for it."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_MASK = "***"

DRAFT = ".tmp"


class Address:
    """The address of a remote: as it is, and as it may be shown.

    Names, passwords and queries (which sign some addresses) are in it, and in nothing that is shown or written.
    """

    def __init__(self, text: str) -> None:
        """Take the address apart.

        Raises
        ------
        Refused : it is none that can be used.
        """
        found = _SCHEME.match(text)
        self.scheme = found[1].lower() if found else "file"
        self.full = text
        if not text.isprintable():
            raise _refused("(not shown)", "It has characters that cannot be printed.")
        if not found:
            if not text or "://" in text:
                raise _refused("(not shown)" if text else "(empty)", "It is neither a path nor a known address.")
            self.shown, self.query, self._secrets = text, "", []
            return
        try:
            parts = urlsplit(text)
            host = parts.netloc.rpartition("@")[2]
        except ValueError as e:
            raise _refused("(not shown)", f"{e}.") from None
        self.shown = f"{self.scheme}://{host}{parts.path}"
        self.query = parts.query
        user = parts.netloc.rpartition("@")[0]
        secrets = [text, user, unquote(user), user.partition(":")[2], unquote(user.partition(":")[2]), parts.query]
        self._secrets = sorted({s for s in secrets if s}, key=len, reverse=True) if user or parts.query else []
        if (self.scheme not in PACKAGES and self.scheme != "file") or "::" in text:
            known = ", ".join(f"{s}://" for s in ("file", *PACKAGES))
            raise _refused(self.shown, f"Addresses begin with one of {known}, or are paths of folders.")

    def hide(self, text: str) -> str:
        """Return a text of somebody else's without what is secret in the address."""
        for secret in self._secrets:
            text = text.replace(secret, self.shown if secret == self.full else _MASK)
        return text


def _refused(shown: str, why: str) -> Refused:
    return Refused(
        f"{shown} cannot be the address of a remote.",
        why,
        "Give a folder's path, or an address such as s3://bucket/folder or https://host/folder.",
    )


class Remote(ABC):
    """A place for files. Paths are relative, with ``/``; contents are small enough to be held in memory.

    Every method raises `RemoteError` where the remote refuses or cannot be reached, and may be called by many threads.
    """

    shown: str
    """The address as it may be shown."""

    @abstractmethod
    def read(self, path: str, start: int, size: int) -> bytes:
        """Return at most `size` bytes of a file from `start` on. Raises `FileNotFoundError` where there is none."""

    @abstractmethod
    def write(self, path: str, content: bytes) -> None:
        """Write a file, whole or not at all, also over one that is there."""

    @abstractmethod
    def create(self, path: str, content: bytes) -> bool:
        """Write a file, whole or not at all; False where there is one."""

    @abstractmethod
    def list(self, folder: str) -> dict[str, int]:
        """Return the files in a folder, by name, with their sizes in bytes; none where there is no such folder.

        Names that end with `DRAFT` are of what is being written, or was when a write was broken off.
        """

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file; harmless where there is none."""

    def read_small(self, path: str, limit: int) -> bytes:
        """Return a whole file.

        Raises
        ------
        FileNotFoundError : there is none.
        RemoteError : it has more than `limit` bytes.
        """
        raw = self.read(path, 0, limit + 1)
        if len(raw) > limit:
            raise RemoteError(
                f"What {self.shown} holds cannot be used.",
                f"{path} has more than the {limit:,} bytes that it can have",
                "Ask whoever runs it what happened to it.",
                remote=self.shown,
                file=path,
            )
        return raw


def remote_at(address: str) -> Remote:
    """Return the remote at an address; nothing is asked of it yet.

    Raises
    ------
    Refused : it is none that can be used, or a package is missing that it needs; the text says which.
    """
    parsed = Address(address)
    if parsed.scheme == "file":
        from .folder import FolderRemote

        path = urlsplit(address).path if _SCHEME.match(address) else address
        return FolderRemote(Path(unquote(path) if _SCHEME.match(address) else path).expanduser().absolute())
    if parsed.scheme in ("sftp", "ssh"):
        from .sftp import SftpRemote

        return SftpRemote(parsed)
    from .fsspec import FsspecRemote

    return FsspecRemote(parsed)
