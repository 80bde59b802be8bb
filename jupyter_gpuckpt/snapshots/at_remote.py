"""Snapshots of what was stopped, at the remote of GPUCKPT_REMOTE: sent there at a stop, fetched from there at a start.

A remote knows no tags and no leases: what is whose goes by names, and one server or job of a name uses it at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from .. import settings
from ..errors import GpuckptError, NoSuchSnapshot, Replayed
from ..store import Manifest, Progress, Store, name_of
from ..store.transfer.pull import pull
from ..store.transfer.push import push
from ..store.transfer.remote_listing import listed
from ..store.transfer.remote_store import RemoteStore
from ..store.transfer.remotes.remote import remote_at
from ..store.transfer.sealing import own_secrets
from .summary import HIBERNATED

__all__ = ["AtRemote", "remove_one", "send_all"]

log = logging.getLogger("gpuckpt")


class AtRemote:
    """The remote that the settings name, for the snapshots of one store."""

    def __init__(self, store: Store) -> None:
        """Open it; it is made a store of snapshots where it is none yet.

        Raises
        ------
        GpuckptError : it cannot be used.
        """
        self._store = store
        self._at = RemoteStore(remote_at(settings.remote()), own_secrets(), create=True)

    @property
    def shown(self) -> str:
        """The address as it may be shown."""
        return self._at.shown

    def send(self, name: str, progress: Progress | None = None) -> None:
        """Send a snapshot there, in place of one of its name.

        Raises
        ------
        GpuckptError : it has not arrived.
        """
        push(self._store, name, self._at, replace=True, progress=progress)

    def fetch(self, wanted: Callable[[Manifest], bool]) -> tuple[list[Manifest], list[GpuckptError]]:
        """Fetch what is wanted of that, and newer than what the store has of its name.

        Returns what was fetched, and what was wrong with others. One that is older than what was here before is left
        alone: it was removed here, and could not be removed there.

        Raises
        ------
        GpuckptError : the remote cannot be read.
        """
        fetched, faults = [], []
        for one in listed(self._at, self._store.trust):
            try:
                if one.error is not None:
                    raise one.error
                if one.manifest is not None and wanted(one.manifest) and self._fetch(one.manifest):
                    fetched.append(one.manifest)
            except Replayed as e:
                log.info("not fetched from %s: %s", self.shown, e.why)
            except GpuckptError as e:
                faults.append(e)
        return fetched, faults

    def _fetch(self, manifest: Manifest) -> bool:
        if self._store.holds(manifest):
            return False
        name = manifest.name
        try:
            here = self._store.get(name)
        except NoSuchSnapshot:
            here = None
        # Clocks of machines differ: one that came from that of here is newer, whatever time it has.
        if here is not None and here.id != manifest.parent and here.created >= manifest.created:
            return False
        if here is not None:
            self._store.pin(name, False)
        pull(self._store, self._at, name, replace=here is not None, quota=settings.store_quota())
        if name_of(name).startswith(f"{HIBERNATED}-"):
            self._store.tag(name, [HIBERNATED])
            self._store.pin(name, True)
        return True

    def remove(self, wanted: Callable[[Manifest], bool]) -> None:
        """Remove what is wanted of the snapshots there.

        Raises
        ------
        GpuckptError : the remote cannot be read or written.
        """
        for one in listed(self._at, self._store.trust):
            if one.manifest is not None and wanted(one.manifest):
                self._at.remove_manifest(one.name)


def remove_one(store: Store, name: str, snapshot_id: str) -> None:
    """Remove the snapshot of a kernel that runs again; a failure is told in the log."""
    try:
        AtRemote(store).remove(lambda manifest: (manifest.name, manifest.id) == (name, snapshot_id))
    except (GpuckptError, OSError):
        log.exception("the snapshot %s of a kernel that runs again could not be removed at the remote", name)


def send_all(store: Store, names: Iterable[str]) -> None:
    """Send snapshots, each by itself; what was not sent is told in the log."""
    try:
        at = AtRemote(store)
    except (GpuckptError, OSError) as e:
        log.error("only in the store of this machine, not at the remote: %s (%s)", ", ".join(names), e)
        return
    for name in names:
        try:
            at.send(name)
            log.info("%s was sent to %s", name, at.shown)
        except (GpuckptError, OSError) as e:
            log.error("only in the store of this machine, not at %s: %s (%s)", at.shown, name, e)
