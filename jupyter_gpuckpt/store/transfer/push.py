"""Send a snapshot to a remote: only the chunks that it lacks, in packs made for that, and the manifest last.

The order of writes: packs, each with a part of the index of its own behind it; ``index/ID``; ``contents/ID``; a look
whether all packs are there; ``snapshots/NAME.json``, by a write that fails where something is. What a push that was
broken off has sent is found by the parts of its packs.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ...errors import Damaged, NameTaken, NoSuchSnapshot, RemoteError
from ..index import Index
from ..manifest import Manifest
from ..outgoing import Outgoing
from ..pack import Location, PackBuilder
from ..parallel import Progress, Tally, run_all
from ..store import Store
from .remote_store import RemoteStore
from .sealing import Plain

__all__ = ["Pushed", "push"]

_PACK = 16 * 1024 * 1024
"""How long a pack grows before the next is begun, in bytes: long enough that asking costs little beside sending, and
short enough that several fit in memory."""

_PART_LIMIT = 256 * 1024 * 1024
"""How long a part of the index can be that somebody else wrote, in bytes: for 7 TiB."""


@dataclass(frozen=True)
class Pushed:
    """What was sent."""

    manifest: Manifest
    sent: int
    """Bytes of chunks that were sent, as they are stored."""
    found: int
    """Bytes of chunks that the remote had already."""


def push(
    store: Store, name: str, at: RemoteStore, *, replace: bool = False, progress: Progress | None = None
) -> Pushed:
    """Send the snapshot `name`; with `replace`, in place of one of that name. `progress` gets the stage ``send``.

    Raises
    ------
    BadName, NoSuchSnapshot, Damaged, Untrusted : as `Store.trusted`.
    NameTaken : another snapshot of that name is there.
    RemoteError : the remote refused, or cannot be reached; what has arrived is not sent again.
    """
    with store.outgoing(name) as outgoing:
        manifest = outgoing.manifest
        there = _there(at, name)
        if there is not None and there != outgoing.raw and not replace:
            raise _taken(name, at)
        needed = outgoing.chunks()
        known = _known(at, needed)
        missing = [key for key in needed if key not in known]
        sending = _Sending(at, outgoing, progress, sum(needed[key].stored for key in missing))
        sending.run(missing)
        index = {**known, **sending.placed}
        _commit(at, outgoing, index, sending.sizes, there, replace)
        sending.tidy_up()
        store.trust.note_newest(outgoing.raw, manifest)
        return Pushed(manifest, sending.total, sum(at.stored for key, at in needed.items() if key in known))


def _there(at: RemoteStore, name: str) -> bytes | None:
    try:
        return at.manifest(name)
    except NoSuchSnapshot:
        return None


def _taken(name: str, at: RemoteStore) -> NameTaken:
    return NameTaken(
        f"Another snapshot named {name} is at {at.shown}.",
        "snapshots are only overwritten on request",
        f"Give yours another name (`gpuckpt mv {name} NEW`), or add --replace.",
        name=name,
        remote=at.shown,
    )


def _known(at: RemoteStore, needed: Mapping[bytes, Location]) -> Index:
    """Return where the remote has chunks that are needed, by all parts of its index."""
    packs = at.packs()
    known: Index = {}

    def read(part: str, tally: Tally) -> None:
        with suppress(FileNotFoundError, Damaged, ValueError):  # deleted meanwhile; or nothing new relies on it
            for key, where in at.part(part, _PART_LIMIT).among(needed).items():
                if where.size == needed[key].size and _is_there(where, packs, at):
                    known[key] = where
        tally.add(0)

    parts = sorted(part for part, size in at.parts().items() if size <= at.seal.room(_PART_LIMIT))
    run_all([partial(read, part) for part in parts], lambda _: None, at.threads)
    return known


def _is_there(where: Location, packs: Mapping[str, int], at: RemoteStore) -> bool:
    size = packs.get(where.pack)
    return size is not None and (not isinstance(at.seal, Plain) or where.offset + where.stored <= size)


class _Sending:
    """The chunks that are sent, and where they are then."""

    def __init__(self, at: RemoteStore, outgoing: Outgoing, progress: Progress | None, total: int) -> None:
        self._at = at
        self._outgoing = outgoing
        self._where = outgoing.chunks()
        self._report = (lambda done: progress("send", done, total)) if progress else (lambda _: None)
        self.total = total
        self.placed: Index = {}
        self.sizes: dict[str, int] = {}
        """The packs that were sent, with the sizes that they have at the remote."""

    def run(self, missing: list[bytes]) -> None:
        run_all([partial(self._send, batch) for batch in self._batches(missing)], self._report, self._at.threads)

    def _batches(self, missing: list[bytes]) -> Iterator[list[bytes]]:
        batch: list[bytes] = []
        size = 0
        for key in missing:
            batch.append(key)
            size += self._where[key].stored
            if size >= _PACK:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _send(self, batch: list[bytes], tally: Tally) -> None:
        pack = PackBuilder(uuid.uuid4().hex)
        for key in batch:
            pack.put(key, self._where[key], self._outgoing.stored(key))
            tally.add(0)
        self.sizes[pack.name] = self._at.write_pack(pack)
        self._at.write_part(pack.session, pack.placed)
        self.placed.update(pack.placed)
        tally.add(sum(at.stored for at in pack.placed.values()))

    def tidy_up(self) -> None:
        """Delete the parts that only a push that is broken off needs; what stays goes with a collection."""
        jobs = [partial(self._forget, pack.partition("-")[0]) for pack in self.sizes]
        with suppress(RemoteError):
            run_all(jobs, lambda _: None, self._at.threads)

    def _forget(self, part: str, tally: Tally) -> None:
        self._at.delete_part(part)
        tally.add(0)


def _commit(
    at: RemoteStore, outgoing: Outgoing, index: Index, sent: Mapping[str, int], there: bytes | None, replace: bool
) -> None:
    manifest, raw = outgoing.manifest, outgoing.raw
    at.write_part(manifest.id, {key: index[key] for key in outgoing.chunks()})
    at.write_contents(manifest, outgoing.raw_contents)
    packs = at.packs()
    for where in index.values():
        if not _is_there(where, packs, at) or packs[where.pack] != sent.get(where.pack, packs[where.pack]):
            raise RemoteError(
                f"The snapshot {manifest.name} did not arrive at {at.shown}.",
                f"the pack {where.pack} is not there, or not as long as it was sent",
                "Send it again; if somebody is running `gc` there, wait until that is done.",
                remote=at.shown,
            )
    if there == raw:
        return
    if replace and there is not None:
        at.replace_manifest(manifest.name, raw)
    elif there is None and not at.create_manifest(manifest.name, raw):
        if not replace and _there(at, manifest.name) != raw:
            raise _taken(manifest.name, at)
        at.replace_manifest(manifest.name, raw)
    if _there(at, manifest.name) != raw:
        raise RemoteError(
            f"The snapshot {manifest.name} may not be at {at.shown}.",
            "its manifest reads back differently: somebody may have sent another one at the same moment",
            f"See what is there (`gpuckpt remote {at.shown}`), and send it again.",
            remote=at.shown,
        )
