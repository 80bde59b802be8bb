"""One snapshot in one file, to be carried about: its manifest, its contents and its chunks, one behind the other.

The file is `MAGIC`, one line of JSON (the mark of a remote, which says how the rest is encrypted), and records: a kind
(4 bytes), a length (8, little-endian), and so many bytes. There is one ``MNFT`` (the signed manifest), one ``CONT``
(the contents), a ``CHNK`` for each chunk (codec, 3 bytes of padding, size (4), hash (32), and the stored bytes), and
``DONE``, of no length, at the end of the file. In an encrypted file, what each record holds is encrypted. There are no
paths in it but those in the contents, so that nothing can be written but into the store.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol
from uuid import uuid4

from ...errors import Damaged, NameTaken, StoreError
from ..chunks import CHUNK, digest
from ..contents import MAX_SIZE as MAX_CONTENTS
from ..durable import FILE_MODE, name_new, sync_folder
from ..manifest import FORMAT, Manifest, check_format, name_in
from ..manifest import MAX_SIZE as MAX_MANIFEST
from ..pack import plausible, verified
from ..parallel import Progress
from ..store import Store
from .sealing import Plain, Seal, Secrets, make_seal, open_seal

__all__ = ["Sink", "export_snapshot", "import_snapshot", "look_at", "write_file"]

MAGIC = b"gpuckpt export 2\n"
_RECORD = struct.Struct("<4sQ")
_CHUNK = struct.Struct("<B3xI32s")
_MARK_LIMIT = 64 * 1024
_PIECE = 4 * 1024 * 1024


class Sink(Protocol):
    """What an exported snapshot can be written to: a stream, or whatever passes it on."""

    def write(self, content: bytes, /) -> object:
        """Take in all of these bytes."""

    def flush(self) -> object:
        """Pass on what was taken in: no more comes."""


def export_snapshot(
    store: Store,
    name: str,
    out: Sink,
    secrets: Secrets,
    progress: Progress | None = None,
    announce: Callable[[int], object] | None = None,
) -> Manifest:
    """Write the snapshot `name` to a stream, encrypted if `secrets` ask for that; `progress` gets the stage ``write``.

    `announce` is told first how many bytes that will be; not where it is encrypted.

    Raises
    ------
    BadName, NoSuchSnapshot, Damaged, Untrusted : as `Store.trusted`.
    Refused : it cannot be encrypted for whom it should be.
    OSError : the stream cannot be written.
    """
    with store.outgoing(name) as outgoing:
        members, seal = make_seal(secrets)
        mark = json.dumps({**members, "format": FORMAT}, separators=(",", ":"), sort_keys=True)
        begins = MAGIC + mark.encode("ascii") + b"\n"
        chunks = outgoing.chunks()
        total, done = sum(at.stored for at in chunks.values()), 0
        if announce is not None and isinstance(seal, Plain):
            records = [begins, outgoing.raw, outgoing.raw_contents]
            framing = (3 + len(chunks)) * _RECORD.size + len(chunks) * _CHUNK.size
            announce(sum(map(len, records)) + total + framing)
        out.write(begins)
        _write(out, b"MNFT", seal.close(outgoing.raw))
        _write(out, b"CONT", seal.close(outgoing.raw_contents))
        for key, at in chunks.items():
            _write(out, b"CHNK", seal.close(_CHUNK.pack(at.codec, at.size, key) + outgoing.stored(key)))
            done += at.stored
            if progress is not None:
                progress("write", done, total)
        _write(out, b"DONE", b"")
        out.flush()
        return outgoing.manifest


def _write(out: Sink, kind: bytes, content: bytes) -> None:
    out.write(_RECORD.pack(kind, len(content)))
    out.write(content)


def write_file(path: Path, fill: Callable[[BinaryIO], Manifest], *, replace: bool) -> Manifest:
    """Have `fill` write a file for its owner alone, which is there when all of it is on the disk.

    Raises
    ------
    NameTaken : there is one at that path, and it is not to be replaced.
    StoreError : it cannot be written.
    """
    draft = path.with_name(f".{uuid4().hex}.tmp")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE)
        try:
            with os.fdopen(fd, "wb", buffering=1 << 20) as out:
                manifest = fill(out)
                out.flush()
                os.fsync(out.fileno())
            if replace:
                draft.rename(path)
            else:
                name_new(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(path.parent)
    except FileExistsError:
        raise NameTaken(f"{path} exists already.", "files are only overwritten on request", "Add --replace.") from None
    except OSError as e:
        raise StoreError(
            f"{path} could not be written.",
            e.strerror or str(e),
            "Choose a folder of your own on a disk with free space.",
        ) from e
    return manifest


def import_snapshot(
    store: Store,
    source: BinaryIO,
    shown: str,
    secrets: Secrets,
    *,
    replace: bool = False,
    older: bool = False,
    quota: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Bring the snapshot into the store that a stream holds, which is called `shown`; other arguments as `pull`.

    `progress` gets the stage ``read``. Where it fails, the store is as it was.

    Raises
    ------
    Damaged : the stream is not what `export_snapshot` wrote.
    Sealed : it is encrypted, and no key on this machine fits opens it.
    Untrusted, Incompatible, NameTaken, Pinned, Busy : as `pull`.
    OSError : the stream cannot be read.
    """
    reading = _Reading(source, shown)
    seal, raw, manifest = _begin(store, reading, shown, secrets, older)
    if store.holds(manifest):
        return manifest
    with store.incoming(raw, manifest.name, replace=replace, quota=quota) as incoming:
        limit = min(MAX_CONTENTS, 64 * 1024 * 1024 + manifest.size // 64)
        contents = reading.record(b"CONT", seal, limit)
        if digest(contents).hex() != manifest.contents:
            raise reading.odd("its contents do not have the hash that the manifest names")
        missing = incoming.missing(contents)
        sizes = incoming.sizes()
        due = set(sizes)
        total, done = sum(sizes.values()), 0
        while due:
            record = reading.record(b"CHNK", seal, CHUNK + _CHUNK.size)
            if len(record) < _CHUNK.size:
                raise reading.odd("a chunk is cut")
            codec, size, key = _CHUNK.unpack_from(record)
            stored = record[_CHUNK.size :]
            if key not in due or sizes[key] != size or not plausible(codec, len(stored), size):
                raise reading.odd("it contains a chunk that does not belong to the snapshot, or contains it twice")
            try:
                verified(key, codec, stored, size)
            except ValueError as e:
                raise reading.odd(f"chunk {key.hex()[:16]}: {e}") from e
            if key in missing:
                incoming.put(key, size, codec, stored)
            due.discard(key)
            done += size
            if progress is not None:
                progress("read", done, total)
        reading.end()
        incoming.commit()
    store.trust.note_newest(raw, manifest)
    return manifest


def look_at(store: Store, source: BinaryIO, shown: str, secrets: Secrets, *, older: bool = False) -> Manifest:
    """Return the manifest that a stream begins with, if it may be used. Raises as `import_snapshot`."""
    return _begin(store, _Reading(source, shown), shown, secrets, older)[2]


def _begin(store: Store, reading: _Reading, shown: str, secrets: Secrets, older: bool) -> tuple[Seal, bytes, Manifest]:
    """Read as far as the manifest, and judge it; return it also as it was signed, and what opens the rest."""
    seal = reading.begin(secrets)
    raw = reading.record(b"MNFT", seal, MAX_MANIFEST)
    store.trust.check(raw, shown)
    manifest = Manifest.from_json(raw, name_in(raw, shown))
    if not older:
        store.trust.check_newest(raw, manifest)
    return seal, raw, manifest


class _Reading:
    """A stream that somebody else may have made: nothing is read from it that is longer than it can be."""

    def __init__(self, source: BinaryIO, shown: str) -> None:
        self._source = source
        self._shown = shown

    def odd(self, why: str) -> Damaged:
        """Return the error for a stream that is not what was written."""
        return Damaged(
            f"{self._shown} cannot be imported.",
            why,
            "Ask whoever saved it to export it again (`gpuckpt export NAME FILE`), and compare the files' sizes.",
            file=self._shown,
        )

    def begin(self, secrets: Secrets) -> Seal:
        """Read what everything begins with."""
        if self._exactly(len(MAGIC)) != MAGIC:
            raise self.odd("it is not an exported snapshot")
        line = self._source.readline(_MARK_LIMIT)
        try:
            mark = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            mark = None
        if not isinstance(mark, dict) or not isinstance(mark.get("features"), list):
            raise self.odd("it names no format")
        check_format({**mark, "features": [one for one in mark["features"] if one != "age"]}, self._shown)
        if type(mark.get("format")) is not int or mark["format"] != FORMAT:
            raise self.odd("its format is not known")
        return open_seal(mark, secrets, self._shown)

    def record(self, kind: bytes, seal: Seal, limit: int) -> bytes:
        """Return what the next record holds, which has to be of this kind, and of at most `limit` bytes."""
        content = self._content(kind, seal.room(limit))
        try:
            opened = seal.open(content)
        except ValueError as e:
            raise self.odd(str(e)) from e
        if len(opened) > limit:
            raise self.odd(f"a {kind.decode()} has more than {limit:,} bytes")
        return opened

    def end(self) -> None:
        """Check that it ends here."""
        self._content(b"DONE", 0)
        if self._source.read(1):
            raise self.odd("there is data after its end")

    def _content(self, kind: bytes, limit: int) -> bytes:
        found, length = _RECORD.unpack(self._exactly(_RECORD.size))
        if found != kind:
            raise self.odd(f"{found!a} is where {kind.decode()} is expected")
        if length > limit:
            raise self.odd(f"a {kind.decode()} is said to have {length:,} bytes, at most {limit:,} are possible")
        return self._exactly(length)

    def _exactly(self, size: int) -> bytes:
        # Piece by piece: room is made for as much as is asked for, and that is only said to be there.
        content = bytearray()
        while len(content) < size:
            piece = self._source.read(min(_PIECE, size - len(content)))
            if not piece:
                raise self.odd("it ends too early")
            content += piece
        return bytes(content)
