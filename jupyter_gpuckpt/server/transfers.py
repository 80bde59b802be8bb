"""Snapshots on their way: sent elsewhere and fetched from there, downloaded and uploaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace as replaced
from typing import BinaryIO

from .. import settings
from ..errors import GpuckptError, Refused
from ..operations.results import Summary
from ..quick_dataclass import dataclass
from ..snapshots.naming import find_among
from ..snapshots.summary import summary
from ..store import Manifest, Progress, Store, check_key, name_of
from ..store.transfer.container import import_snapshot, look_at
from ..store.transfer.pull import pull
from ..store.transfer.push import push
from ..store.transfer.remote_listing import listed
from ..store.transfer.remote_store import RemoteStore
from ..store.transfer.remotes.remote import remote_at
from ..store.transfer.sealing import Secrets, own_secrets
from .download import Send, download
from .events import Events
from .operations import Operation, Operations
from .upload import Head, Upload

__all__ = ["Transfers"]

_UPLOADED = "The file"
"""What errors call what a client sends."""


@dataclass(frozen=True, kw_only=True)
class Pushed(Summary):
    """A snapshot was sent elsewhere."""

    url: str
    sent: int
    """Bytes."""
    found: int
    """Bytes that were there already."""
    seconds: float
    encrypted: bool
    key: str | None
    recipients: list[str]
    signed: str | None


@dataclass(frozen=True, kw_only=True)
class Pulled(Summary):
    """A snapshot was fetched from elsewhere."""

    url: str
    fetched: int
    """Bytes."""
    found: int
    """Bytes that were here already."""
    seconds: float


@dataclass(frozen=True)
class Looked:
    """What a file with a snapshot is, by how it begins."""

    snapshot: Summary | None
    """None where these bytes are too few to tell."""
    needs: int
    """How many of its first bytes are needed for that."""
    here: bool
    """Whether the store has the snapshot."""
    taken: bool
    """Whether another one has its name."""


class Transfers:
    """What a server sends and fetches; `key_of` returns the key of the snapshot that a request names."""

    def __init__(
        self, store: Store, operations: Operations, events: Events, key_of: Callable[[str], Awaitable[str]]
    ) -> None:
        self._store, self._operations, self._events, self._key_of = store, operations, events, key_of

    async def push(self, name: str, url: str, replace: bool) -> Operation:
        """Begin to send a snapshot elsewhere.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible, Untrusted : as `Store.trusted`.
        Refused : the address cannot be used.
        """
        name = await self._key_of(name)
        await asyncio.to_thread(self._store.trusted, name)
        remote = await asyncio.to_thread(remote_at, url)

        def work(progress: Progress) -> Pushed:
            began = time.monotonic()
            there = RemoteStore(remote, own_secrets(), create=True)
            done = push(self._store, name, there, replace=replace, progress=progress)
            return Pushed(
                **vars(summary(done.manifest)),
                **vars(there.encryption),
                url=there.shown,
                sent=done.sent,
                found=done.found,
                seconds=time.monotonic() - began,
            )

        return self._operations.do(Operation("push", "", name), work)

    async def pull(self, url: str, name: str, replace: bool, older: bool, passphrase: str) -> Operation:
        """Begin to fetch a snapshot from elsewhere; without a name, the only one that is there.

        The passphrase, where it is not empty, is tried in place of the one in the settings.

        Raises
        ------
        BadName : no snapshot can be called that.
        Refused : the address cannot be used.
        """
        if name:
            check_key(name.rpartition(":")[2])
        remote = await asyncio.to_thread(remote_at, url)

        def work(progress: Progress) -> Pulled:
            began = time.monotonic()
            there = RemoteStore(remote, _secrets(passphrase))
            quota = settings.store_quota()
            key = name
            if ":" in name:
                found = listed(there, self._store.trust)
                key = find_among((one.manifest for one in found if one.manifest is not None), name)
            done = pull(self._store, there, key, replace=replace, older=older, quota=quota, progress=progress)
            return Pulled(
                **vars(summary(done.manifest)),
                url=there.shown,
                fetched=done.fetched,
                found=done.found,
                seconds=time.monotonic() - began,
            )

        return self._operations.do(Operation("pull", "", name), work)

    async def export(self, name: str, begin: Callable[[int], None], send: Send) -> None:
        """Send a snapshot as one file, by `send`, once `begin` was told how many bytes that has.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible, Untrusted : as `download`.
        """
        await download(self._store, await self._key_of(name), begin, send)

    async def look_at(self, head: bytes, size: int, older: bool, passphrase: str) -> Looked:
        """Judge a file of so many bytes with a snapshot by how it begins, as `import_from` will, and say what it is.

        The passphrase, where it
        is not empty, is tried in place of the one in the settings.

        Raises
        ------
        Damaged, Sealed, Untrusted, Incompatible : as `import_snapshot`.
        Refused : there is no room for it.
        """

        def look() -> Looked:
            self._refuse_too_large(size)
            source = Head(head)
            try:
                manifest = look_at(self._store, source, _UPLOADED, _secrets(passphrase), older=older)
            except GpuckptError:
                if len(head) < source.wanted <= size:
                    return Looked(None, source.wanted, here=False, taken=False)
                raise
            here = self._store.holds(manifest)
            taken = not here and manifest.name in self._store.keys(name_of(manifest.name))
            return Looked(summary(manifest), len(head), here=here, taken=taken)

        return await asyncio.to_thread(look)

    async def import_from(self, size: int, replace: bool, older: bool, passphrase: str) -> Upload:
        """Begin to bring in a snapshot of which a client sends the file, of so many bytes; passphrase as `look_at`.

        Raises
        ------
        Refused : there is no room for it.
        """
        await asyncio.to_thread(self._refuse_too_large, size)

        def work(source: BinaryIO) -> Manifest:
            quota = settings.store_quota()
            secrets = _secrets(passphrase)
            return import_snapshot(self._store, source, _UPLOADED, secrets, replace=replace, older=older, quota=quota)

        return Upload(work)

    async def imported(self, upload: Upload) -> Summary:
        """Return the snapshot that a client has sent all of, once it is in the store. Raises as `import_snapshot`."""
        manifest = await upload.finish()
        self._events.snapshots("pulled", manifest.name)
        return summary(manifest)

    def _refuse_too_large(self, size: int) -> None:
        free, quota = self._store.free(), settings.store_quota()
        left = free if quota is None else min(free, quota - self._store.used())
        if size > left:
            raise Refused(
                "The snapshot was not imported: there is not enough space.",
                f"The file has {size / 1e6:,.0f} MB; {max(0, left) / 1e6:,.0f} MB are free for {self._store.root}.",
                "Remove snapshots that you no longer need, or set GPUCKPT_STORE to a folder on a larger disk.",
                needed=size,
                free=left,
            )


def _secrets(passphrase: str) -> Secrets:
    """Return what opens what is encrypted; a passphrase that was given goes before the one in the settings."""
    own = own_secrets()
    return replaced(own, passphrase=lambda: passphrase) if passphrase else own
