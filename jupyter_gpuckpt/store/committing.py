"""The last steps of every snapshot, saved here or come from elsewhere: its manifest gets its name, and that lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..errors import NameTaken, StoreError
from .durable import name_new, read_small, sync_folder, write_new
from .layout import Layout
from .manifest import MAX_SIZE
from .sessions import Lock, Session

__all__ = ["Commit", "changing", "name_taken"]


def name_taken(name: str, *, replaceable: bool = True) -> NameTaken:
    """Return the error for a name that a snapshot has already; `replaceable` is whether --replace can be added."""
    then = f"Choose another name, or rename the existing one (`gpuckpt mv {name} NEW`)."
    if replaceable:
        then = f"Choose another name, rename the existing one (`gpuckpt mv {name} NEW`), or add --replace."
    return NameTaken(
        f"A snapshot named {name} exists already.",
        "snapshots are only overwritten on request",
        then,
        name=name,
    )


@contextmanager
def changing(layout: Layout) -> Iterator[None]:
    """Have nobody else remove or replace a manifest meanwhile. Raises `OSError`."""
    lock = Lock.wait(layout.mark)  # a file that is there: a full disk must not keep anybody from removing
    while not lock.stands():  # another mark was put in its place meanwhile
        lock.release()
        lock = Lock.wait(layout.mark)
    try:
        yield
    finally:
        lock.release()


class Commit:
    """Steps 6 to 8 of the order of writes that `store.writer` documents; what the manifest names is on the disk."""

    def __init__(self, layout: Layout, name: str, snapshot_id: str, *, replace: bool) -> None:
        self._layout = layout
        self._name = name
        self._id = snapshot_id
        self._replace = replace
        self.kept = False
        """Whether the manifest may be in place, so that what it needs must stay."""

    def put_in_place(self, signed: bytes, sessions: Sequence[Session]) -> None:
        """Make the snapshot exist with this signed manifest, as work of these sessions.

        Raises
        ------
        NameTaken : another writer was first.
        StoreError : somebody took the lock of a session away.
        OSError : the disk refused.
        """
        try:
            self._write_draft(signed)
            self._require(sessions)
            self._give_name()
        except FileNotFoundError:
            self._require(sessions)  # which is the reason, where others have deleted what was written
            raise
        try:
            # Once more: a machine that was cut off from a file server right before goes on here.
            self._require(sessions)
        except StoreError:
            self._take_back()
            raise

    def _give_name(self) -> None:
        draft, target = self._layout.draft(self._id), self._layout.manifest(self._name)
        self.kept = True  # first: an interrupt may come right after the call
        try:
            if self._replace:
                with changing(self._layout):
                    draft.rename(target)
            else:
                name_new(draft, target)
        except FileExistsError:
            self.kept = False
            raise name_taken(self._name) from None
        except OSError:
            # Failed calls may have taken effect, on a network file system for one.
            self.kept = self._may_be_in_place()
            raise

    def _require(self, sessions: Sequence[Session]) -> None:
        """Raise `StoreError` where others count on the end of a session, and may have deleted what is needed."""
        if not all(session.stands() for session in sessions):
            raise StoreError(
                f"The snapshot {self._name} was not stored.",
                f"its lock file in {self._layout.locks} was deleted, so data that it needs may have been deleted, too; "
                "other machines do that when this one is cut off from the file server for a minute or more",
                "Try again, and do not delete anything in the store by hand.",
                name=self._name,
            )

    def _take_back(self) -> None:
        with changing(self._layout):
            if self._may_be_in_place():
                self._layout.manifest(self._name).unlink(missing_ok=True)
            sync_folder(self._layout.snapshots)
        self.kept = False

    def make_last(self) -> None:
        """Return when the name is on the disk.

        Raises
        ------
        StoreError : the disk did not confirm it; ``data["in_doubt"]`` is true.
        """
        try:
            sync_folder(self._layout.snapshots)
        except OSError as e:
            raise StoreError(
                f"The snapshot {self._name} may not last.",
                f"all of it was written, but the disk did not confirm its name: {e.strerror}",
                "Look for errors of that disk (`dmesg`), then save again under another name.",
                errno=e.errno,
                name=self._name,
                in_doubt=True,
            ) from e

    def _write_draft(self, signed: bytes) -> None:
        draft = self._layout.draft(self._id)
        write_new(draft, signed)
        if read_small(draft, MAX_SIZE) != signed:
            raise OSError(5, "the manifest reads back differently", str(draft))

    def _may_be_in_place(self) -> bool:
        try:
            raw = read_small(self._layout.manifest(self._name), MAX_SIZE)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return self._id.encode("ascii") in raw
