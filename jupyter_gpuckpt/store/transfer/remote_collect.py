"""Delete at a remote what no snapshot there needs. Others may send at the same time: what is needless waits first.

There are no locks at a remote. A part of the index without a snapshot may be of a push under way: it is written down
in ``condemned.json``, and deleted when it has been there for the time of grace. A pack that no part names any more is
deleted so much later again: every push that may have come to rely on it has ended by then.
"""

from __future__ import annotations

import re
import time
from collections.abc import Container

from ...errors import Damaged
from ..names import is_id
from ..upkeep.collect import Collected
from .remote_store import RemoteStore
from .remotes.remote import DRAFT

__all__ = ["GRACE", "collect_remote"]

GRACE = 24 * 3600.0
"""How long what is needless waits, in seconds: no push takes longer."""

_ID = re.compile(rb'"id":"([0-9a-f]{32})"')
_PART_LIMIT = 256 * 1024 * 1024


def collect_remote(at: RemoteStore, grace: float = GRACE, *, dry_run: bool = False) -> Collected:
    """Delete what no snapshot needs, and has not been needed for `grace` seconds; with `dry_run` only say how much.

    Raises
    ------
    RemoteError : the remote cannot be listed or written.
    """
    try:
        return _Collection(at, grace, dry_run).run()
    except Damaged as e:
        return Collected(obstacle=f"{e.why}, so that it cannot be known what is needed")


class _Collection:
    def __init__(self, at: RemoteStore, grace: float, dry_run: bool) -> None:
        self._at = at
        self._grace = grace
        self._dry_run = dry_run
        self._now = time.time()
        self._before = at.condemned()
        self._waiting: dict[str, float] = {}
        self._freed = self._left = 0

    def run(self) -> Collected:
        # In this order: what was there first belongs to a push under way, or has its manifest in place.
        parts = self._at.parts()
        lists = {name: size for name, size in self._at.remote.list("contents").items() if is_id(name)}
        needed = self._needed()
        gone = {i for i in parts.keys() - needed if self._delete(f"index/{i}", parts[i])}
        for i in lists.keys() - needed:
            self._delete(f"contents/{i}", lists[i])
        packs = self._at.packs()
        named = {pack for i in self._at.parts().keys() - gone for pack in self._named(i, packs)}
        for pack in packs.keys() - named:
            self._delete(f"packs/{pack}", packs[pack])
        for folder in ("snapshots", "contents", "index", "packs"):
            for name, size in self._at.remote.list(folder).items():
                if name.endswith(DRAFT):
                    self._delete(f"{folder}/{name}", size)
        if not self._dry_run:
            self._at.write_condemned(self._waiting)
        return Collected(self._freed, self._left)

    def _needed(self) -> set[str]:
        """Return the ids of the snapshots, of all makers; what only looks like one is kept as well."""
        needed: set[str] = set()
        for file, read in self._at.manifests():
            try:
                found = {match.decode("ascii") for match in _ID.findall(read())}
            except FileNotFoundError:
                continue  # removed meanwhile
            if not found:
                raise self._at.unusable(f"snapshots/{file}", "it names no id")
            needed |= found
        return needed

    def _named(self, part: str, packs: Container[str]) -> set[str]:
        try:
            return self._at.part(part, _PART_LIMIT).packs_among(packs)
        except FileNotFoundError:
            return set()  # its push has ended

    def _delete(self, path: str, size: int) -> bool:
        """Delete a file, if its time has come; tell whether it is gone."""
        since = min(self._before.get(path, self._now), self._now)  # the clock may have been set back
        if self._now - since < self._grace:
            self._waiting[path] = since
            self._left += size
            return False
        if not self._dry_run:
            self._at.remote.delete(path)
        self._freed += size
        return True
