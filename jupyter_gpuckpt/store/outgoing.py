"""A snapshot that is to leave the store: what it is made of, and its chunks as they are stored, each verified.

What is a delta here is sent by itself: so no delta is anywhere else, and none is there without its base.
"""

from __future__ import annotations

from types import TracebackType

from .codec import Bytes, encode
from .contents import Contents
from .index import Index
from .layout import Layout
from .manifest import Manifest
from .pack import Location, PackReader
from .reading import damage, locate, parse_contents, raw_contents
from .sessions import Session

__all__ = ["Outgoing"]


class Outgoing:
    """A snapshot that nobody can delete before `close`; a context manager."""

    def __init__(self, layout: Layout, manifest: Manifest, raw: bytes, session: Session | None) -> None:
        """Take over `session`, which began before the manifest was read. Raises `Damaged`, `OSError`."""
        self.manifest = manifest
        self.raw = raw
        """The manifest as it lies in the store, with its signature."""
        self._session = session
        self._sent: Index = {}
        """As what deltas are sent."""
        try:
            self.raw_contents = raw_contents(layout, manifest)
            self.contents: Contents = parse_contents(manifest, self.raw_contents)
            self._index: Index = locate(layout, manifest, self.contents)
            self._packs = PackReader(layout.packs, self._index)
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        """Find out how long the deltas are by themselves: that is said before they are sent. Raises `Damaged`."""
        for key in {chunk.hash for chunk in self.contents.chunks()}:
            if (at := self._index[key]).base:
                codec, stored = self._by_itself(key, at)
                self._sent[key] = at._replace(stored=len(stored), codec=codec, base=b"")

    def chunks(self) -> dict[bytes, Location]:
        """Return as what each chunk is sent, in the order in which the files need them."""
        keys = (chunk.hash for chunk in self.contents.chunks())
        return {key: self._sent.get(key) or self._index[key] for key in keys}

    def stored(self, key: bytes) -> Bytes:
        """Return a chunk as it is sent, good until this thread reads the next. Raises `Damaged`."""
        at = self._index[key]
        return self._by_itself(key, at)[1]

    def _by_itself(self, key: bytes, at: Location) -> tuple[int, Bytes]:
        """Return codec and stored bytes of a chunk that is no delta. Raises `Damaged`."""
        try:
            return encode(memoryview(self._packs.read(key, at))) if at.base else (at.codec, self._packs.stored(key, at))
        except (OSError, ValueError) as e:
            why = (e.strerror or str(e)) if isinstance(e, OSError) else str(e)
            raise damage(self.manifest, "", f"chunk {key.hex()[:16]} in pack {at.pack}: {why}") from e

    def __enter__(self) -> Outgoing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let it go; more than once is harmless."""
        if self._session is not None:
            self._session.close()
            self._session = None
