"""What the tests of moving snapshots share: two people, remotes, and a count of what travels."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.transfer.remote_store import RemoteStore
from jupyter_gpuckpt.store.transfer.remotes.remote import Remote, remote_at
from jupyter_gpuckpt.store.transfer.sealing import Secrets
from jupyter_gpuckpt.store.trust import Trust

LARGE = {"pages-1.img": os.urandom(300_000), "vram/0": bytes(500_000), "log": b"a line of a log\n" * 9000}


def person(folder: Path, name: str) -> Store:
    """Return the store of somebody with keys of their own."""
    return Store(folder / name / "store", Trust(folder / name / "keys"))


def flipped(content: bytes, at: int) -> bytes:
    """Return bytes of which one is another."""
    at %= len(content)
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def secrets_of(store: Store, **how: object) -> Secrets:
    return Secrets(store.trust.folder, **how)  # type: ignore[arg-type]


def at(address: str | Path, store: Store, create: bool = True, **how: object) -> RemoteStore:
    """Return what is at an address, as the owner of a store sees it."""
    return RemoteStore(remote_at(str(address)), secrets_of(store, **how), create=create)


@dataclass
class Counting(Remote):
    """A remote that counts, and can be told to do something before or after each request."""

    inner: Remote
    before: Callable[[str, str], None] = lambda _, __: None
    read_bytes: int = 0
    written_bytes: int = 0
    requests: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shown = self.inner.shown

    def _note(self, what: str, path: str) -> None:
        self.before(what, path)
        self.requests.append((what, path))

    def read(self, path: str, start: int, size: int) -> bytes:
        self._note("read", path)
        found = self.inner.read(path, start, size)
        self.read_bytes += len(found)
        return found

    def write(self, path: str, content: bytes) -> None:
        self._note("write", path)
        self.inner.write(path, content)
        self.written_bytes += len(content)

    def create(self, path: str, content: bytes) -> bool:
        self._note("create", path)
        self.written_bytes += len(content)
        return self.inner.create(path, content)

    def list(self, folder: str) -> dict[str, int]:
        self._note("list", folder)
        return self.inner.list(folder)

    def delete(self, path: str) -> None:
        self._note("delete", path)
        self.inner.delete(path)


def counted(address: str | Path, store: Store, **how: object) -> tuple[RemoteStore, Counting]:
    """Return what is at an address, and the count of what travels there."""
    counting = Counting(remote_at(str(address)))
    return RemoteStore(counting, secrets_of(store, **how), create=True), counting
