"""A snapshot that is to leave the store: what it is made of, and its chunks as they are stored, each verified."""

from __future__ import annotations

from types import TracebackType

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
        self._packs = PackReader(layout.packs)
        try:
            self.raw_contents = raw_contents(layout, manifest)
            self.contents: Contents = parse_contents(manifest, self.raw_contents)
            self._index: Index = locate(layout, manifest, self.contents)
        except BaseException:
            self.close()
            raise

    def chunks(self) -> dict[bytes, Location]:
        """Return where each chunk lies, in the order in which the files need them."""
        return {chunk.hash: self._index[chunk.hash] for chunk in self.contents.chunks()}

    def stored(self, key: bytes) -> bytes | bytearray:
        """Return a chunk as it is stored, good until this thread reads the next. Raises `Damaged`."""
        at = self._index[key]
        try:
            return self._packs.stored(key, at)
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
