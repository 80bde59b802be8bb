"""Whose a snapshot's name is: each notebook has names of its own, and so do all kernels without one together.

The store knows snapshots by their keys (`store.names`), people by a name and a notebook. What people type is a name,
``notebook:name`` with as much of the notebook's path as they like, or a key.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from .. import __version__, settings
from ..errors import Damaged, GpuckptError, NoSuchSnapshot, NotOwn, Refused, Untrusted
from ..operations.results import AUTOMATIC, Summary
from ..store import BeingSaved, Manifest, Store, check_key, check_name, key_of, name_of, name_taken
from .summary import is_automatic, is_of, is_of_notebook, labels, notebooks, summary

__all__ = [
    "NOT_RESTORED",
    "Owner",
    "choose_key",
    "find",
    "find_among",
    "find_own",
    "follow",
    "latest_own",
    "new_key",
    "own_to_come",
    "path_after",
    "refuse_other_kind",
]

NOT_RESTORED = "The snapshot was not restored; nothing was touched."
_AS_STEP = re.compile(r"^auto/(?=[0-9])")
"""How people may begin the name of an automatic snapshot, too: no name has a slash."""
_MOST = 10
"""How many names an error lists."""


@dataclass(frozen=True)
class Owner:
    """A kernel, as the one whose names are meant."""

    kernel_id: str
    notebook: str
    """Empty where it has none."""
    job: str
    copy_of: str
    parent: str | None
    """The id of the snapshot that it last came from or went to."""
    title: str
    """What others are told of who saves a snapshot of it."""

    @property
    def word(self) -> str:
        """What to call it at the beginning of a sentence."""
        return "This job" if self.job else "This notebook" if self.notebook else "This kernel"

    def saved(self, manifest: Manifest) -> bool:
        """Tell whether a snapshot is this kernel's, or its notebook's."""
        return is_of(manifest, self.kernel_id, self.notebook)

    def shares_names_with(self, manifest: Manifest) -> bool:
        """Tell whether no two snapshots of one name can be this kernel's and that one's."""
        return self.saved(manifest) or self.notebook == manifest.kernel.get("notebook", "")

    def line(self, store: Store) -> Iterator[Manifest]:
        """Yield what the kernel came from, newest first: its notebook may have had another name then."""
        known = {manifest.id: manifest for manifest in store.list()} if self.parent or self.copy_of else {}
        one = known.pop(self.parent or "", None)
        while one is not None:
            yield one
            one = known.pop(one.parent or "", None)
        if self.copy_of:
            yield from (manifest for manifest in known.values() if manifest.kernel.get("kernel_id") == self.copy_of)


# -- to a key


def choose_key(store: Store, name: str, owner: Owner, *, replace: bool) -> tuple[str, bool]:
    """Return the key under which a kernel saves what is to be called `name`, and whether it replaces the one there.

    Raises
    ------
    BadName : no snapshot can be called that.
    NameTaken : one of its notebook is, and is not to be replaced.
    """
    check_name(name)
    keys = store.keys(name)
    own = [manifest for manifest in _read(store, keys) if owner.shares_names_with(manifest)]
    if own and not replace:
        raise name_taken(name)
    if own:
        return min(manifest.name for manifest in own), True
    return _free_key(keys, name, owner.notebook), False


def new_key(store: Store, key: str, name: str) -> str:
    """Return the key of a snapshot that is to be called `name` from now on.

    Raises
    ------
    BadName : no snapshot can be called that.
    NoSuchSnapshot, Damaged, Incompatible : there is none that has `key`, or it cannot be read.
    NameTaken : another one of its notebook is called that.
    """
    check_name(name)
    notebook = str(store.get(key).kernel.get("notebook", ""))
    keys = store.keys(name)
    if any(manifest.kernel.get("notebook", "") == notebook for manifest in _read(store, keys)):
        raise name_taken(name, replaceable=False)
    return _free_key(keys, name, notebook)


def _free_key(taken: Collection[str], name: str, notebook: str) -> str:
    """Return a key that no snapshot has for one that a notebook has under `name`."""
    # One of a notebook that had this path and was renamed has the first of these.
    keys = (key_of(name, notebook + "/" * times) for times in itertools.count())
    return name if name not in taken else next(key for key in keys if key not in taken)


def path_after(path: str, old: str, new: str) -> str | None:
    """Return where a file is after `old` was renamed to `new`, a file or folder; None where it stays what it was."""
    return new + path[len(old) :] if path == old or path.startswith(f"{old}/") else None


def follow(store: Store, old: str, new: str) -> Sequence[str]:
    """Have the snapshots of a notebook belong to it where it is now, or those of a folder's; return their keys.

    Those that somebody else signed stay what they are.

    Raises
    ------
    StoreError : the store cannot be read or written.
    """
    moved = []
    for snapshot in store.listed(Summary, summary, __version__)[0]:
        path = path_after(snapshot.notebook, old, new)
        if path is not None:
            with suppress(NoSuchSnapshot, Damaged, Untrusted, Refused):
                moved.append(store.move(snapshot.name, {"notebook": path}).name)
    return moved


def find(store: Store, text: str, owner: Owner | None = None) -> str:
    """Return the key of the snapshot that the user means, `owner`'s own before all others.

    Raises
    ------
    BadName, NoSuchSnapshot : the text names no snapshot.
    Refused : it names several.
    """
    notebook, colon, name = text.rpartition(":")
    name = _AS_STEP.sub(AUTOMATIC, name)
    check_key(name)
    if name_of(name) != name:
        return name
    keys = store.keys(name)
    if len(keys) < 2 and not colon:
        return keys[0] if keys else name  # where there is none, whoever looks for it says so
    found = _read(store, keys)
    if colon:
        return _one(text, _of_notebook(found, name, notebook), found)
    own = [] if owner is None else _own(store, found, owner)
    # That of a kernel without a notebook has no other way to be said.
    return _one(text, own or [manifest for manifest in found if not manifest.kernel.get("notebook")] or found, found)


def of_notebook(manifests: Iterable[Manifest], notebook: str) -> list[Manifest]:
    """Return the snapshots that were saved from a notebook, which a user names by its path, the end of it, or name.

    Raises
    ------
    NoSuchSnapshot : there is none; the error says which notebooks have some.
    """
    manifests = list(manifests)
    found = [manifest for manifest in manifests if is_of_notebook(manifest, notebook)]
    if found:
        return found
    others = [shlex.quote(other) for other in notebooks(manifests)]
    more = f" and {len(others) - _MOST} more" if len(others) > _MOST else ""
    raise NoSuchSnapshot(
        f"There is no snapshot of a notebook {notebook}.",
        f"There are snapshots of: {', '.join(others[:_MOST])}{more}."
        if others
        else "There are no snapshots of any notebook.",
        "`gpuckpt list` shows all snapshots and their notebooks.",
        notebook=notebook,
    )


def find_among(manifests: Iterable[Manifest], text: str) -> str:
    """Return the key of the one of some snapshots that is meant, of a remote say: a text without a notebook is a key.

    Raises
    ------
    NoSuchSnapshot, Refused : as `find`.
    """
    notebook, colon, name = text.rpartition(":")
    if not colon:
        return text
    found = [manifest for manifest in manifests if name_of(manifest.name) == name]
    return _one(text, _of_notebook(found, name, notebook), found)


def _of_notebook(found: Sequence[Manifest], name: str, notebook: str) -> list[Manifest]:
    """Return those of the snapshots called `name` that are of a notebook with this path, or one that ends so."""
    exactly = [manifest for manifest in found if manifest.kernel.get("notebook", "") == notebook]
    chosen = exactly or [manifest for manifest in found if is_of_notebook(manifest, notebook)]
    if chosen:
        return chosen
    others = ", ".join(labels(found, always=True).values())
    raise NoSuchSnapshot(
        f"There is no snapshot named {name} of a notebook {notebook}.",
        f"Of that name there are: {others}." if others else "No notebook has a snapshot of that name.",
        "`gpuckpt list` shows all names.",
        name=name,
    )


def _one(text: str, chosen: Sequence[Manifest], found: Sequence[Manifest]) -> str:
    """Return the key of the one that was chosen of all that are called so. Raises `Refused` where there are several."""
    # Of two of one notebook, which only a fetch can bring about, it is the one that lists show under this name.
    keys = {str(m.kernel.get("notebook", "")): m.name for m in sorted(chosen, key=lambda m: m.name, reverse=True)}
    if len(keys) > 1:
        names = [labels(found)[key] for key in keys.values()]
        raise Refused(
            f"{text} is the name of {len(names)} snapshots.",
            f"They are {', '.join(names)}.",
            f"Name one of them, for example {names[0]}.",
            names=names,
        )
    return next(iter(keys.values()), text)


def find_own(store: Store, text: str, owner: Owner) -> str:
    """Return the key of the snapshot that a kernel is to be put back to, if that is its own.

    Raises
    ------
    BadName, NoSuchSnapshot, Refused : as `find`.
    Refused : also where it is a job's and the owner is none, or the other way round.
    NotOwn : it is another notebook's; ``data["from"]`` is how to say that it is meant all the same.
    Damaged, Incompatible : it cannot be told whose it is.
    """
    try:
        key = find(store, text, owner)
    except Refused as e:
        raise _not_own(text, store, owner, list(e.data["names"])) from None
    manifest = store.get(key)
    if _own(store, [manifest], owner):
        return key
    refuse_other_kind(manifest, owner.job)
    raise _not_own(text, store, owner, [labels(_read(store, store.keys(name_of(key))), always=True)[key]])


def refuse_other_kind(manifest: Manifest, job: str) -> None:
    """Raise `Refused` where a snapshot is a job's and is to be restored in a kernel, or the other way round.

    Parameters
    ----------
    job : where it is to be restored; empty for a kernel.
    """
    saved = str(manifest.kernel.get("job", ""))
    if saved and not job:
        name = name_of(manifest.name)
        raise Refused(
            NOT_RESTORED,
            f"{name} was saved from the job {saved}, and here is a kernel.",
            f"In a terminal, `jupyter gpuckpt restore {saved} {name}` restores that job; with `--as NEW`, it starts "
            "as a new job instead.",
        )
    if job and not saved:
        raise Refused(
            NOT_RESTORED,
            f"{name_of(manifest.name)} was saved from a notebook's kernel, and here is the job {job}.",
            "Restore it in a notebook; `gpuckpt list` shows what was saved from what.",
        )


def _not_own(text: str, store: Store, owner: Owner, names: Sequence[str]) -> NotOwn:
    others = (name if ":" in name else f"{name} of a kernel without a notebook" for name in names)
    return NotOwn(
        f"{text} was not restored; nothing was touched.",
        f"{owner.word} has no {'such snapshot' if ':' in text else 'snapshot of that name'}; others have: "
        f"{', '.join(others)}.",
        f"If you mean {'one of these' if len(names) > 1 else 'that one'}: {_from(names[0], store)}.",
        **{"from": names[0], "names": names},
    )


def _from(label: str, store: Store) -> str:
    """Return what to type for the snapshot of another notebook."""
    where = "" if store.root == settings.store_dir() else f" --store {shlex.quote(str(store.root))}"
    return f"`gpuckpt restore @ --from {shlex.quote(label)}{where}`"


def own_to_come(store: Store, owner: Owner) -> BeingSaved | None:
    """Return what another process is saving for this kernel or its notebook, if anything.

    That of a kernel which was restarted, or has died, goes on with what it had taken.
    """
    return next((s for s in store.being_saved() if s.is_by(owner.title) and s.pid != os.getpid()), None)


def latest_own(store: Store, owner: Owner) -> str:
    """Return the key of the newest snapshot of this kernel or its notebook, or else of what it came from.

    An automatic one counts where there is no other: it is what was there before a crash.

    Raises
    ------
    NoSuchSnapshot : there is none; it says which there are of others. Or it is being saved by another process, such as
        the keeper before this one.
    """
    coming = own_to_come(store, owner)
    manifests = [manifest for manifest in store.list() if bool(manifest.kernel.get("job")) == bool(owner.job)]
    saved = [manifest for manifest in manifests if owner.saved(manifest)]
    of_somebody = (manifest for manifest in saved if not is_automatic(manifest))
    own = next(of_somebody, None) or next(owner.line(store), None)
    if coming is not None and (own is None or not name_of(coming.key).startswith(AUTOMATIC)):
        raise store.not_yet_saved(coming)
    own = own or next(iter(saved), None)
    if own is not None:
        return own.name
    if owner.job:
        raise NoSuchSnapshot(
            "There is no snapshot to restore.",
            "The job has none.",
            "Save one first: `gpuckpt save @ NAME`.",
        )
    what = f"Nothing was restored: {owner.word[0].lower()}{owner.word[1:]} has no snapshot."
    if not manifests:
        raise NoSuchSnapshot(what, "No other notebook has one either.", "Save one first: `gpuckpt save @ NAME`.")
    shown = labels(manifests, always=True)
    names = [shown[manifest.name] for manifest in manifests[:_MOST]]
    more = f" and {len(manifests) - _MOST} more" if len(manifests) > _MOST else ""
    raise NoSuchSnapshot(
        what,
        f"Others have: {', '.join(names)}{more}.",
        f"To restore one of these here: {_from(names[0], store)}.",
        **{"from": names[0], "names": names},
    )


def _own(store: Store, found: Sequence[Manifest], owner: Owner) -> list[Manifest]:
    """Return those of some snapshots that are a kernel's: of it or its notebook, or else what it came from."""
    own = [manifest for manifest in found if owner.shares_names_with(manifest)]
    if own:
        return own
    ids = {manifest.id for manifest in found}
    return [manifest for manifest in owner.line(store) if manifest.id in ids][:1]


def _read(store: Store, keys: Iterable[str]) -> list[Manifest]:
    """Return the manifests that can be read, newest first."""
    found = []
    for key in keys:
        with suppress(GpuckptError):
            found.append(store.get(key))
    return sorted(found, key=lambda manifest: manifest.created, reverse=True)
