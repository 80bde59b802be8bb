"""Remove old snapshots by a rule; never pinned ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..manifest import Manifest

if TYPE_CHECKING:
    from ..store import Store

__all__ = ["keep_last", "keep_under"]


def keep_last(store: Store, count: int, of: Callable[[Manifest], bool] = lambda _: True, newest: str = "") -> list[str]:
    """Remove all but the newest `count` snapshots, of those for which `of` is true; return the names of the removed.

    Pinned ones stay, and count. `newest` is the id of the one that is known to be the newest: the clock, which tells
    it of all others, may have been set back.

    Raises
    ------
    StoreError : one could not be removed; those before it are.
    """
    return _remove(store, _newest_first(store, of, newest)[count:])


def keep_under(store: Store, size: int, of: Callable[[Manifest], bool] = lambda _: True, newest: str = "") -> list[str]:
    """Remove the oldest snapshots for which `of` is true until the store takes at most `size` bytes; as `keep_last`.

    The newest one is never removed.
    """
    removed = []
    for manifest in _newest_first(store, of, newest)[:0:-1]:
        if store.used() <= size:
            break
        removed += _remove(store, [manifest])
    return removed


def _newest_first(store: Store, of: Callable[[Manifest], bool], newest: str) -> list[Manifest]:
    found = [m for m in store.list() if of(m)]
    return sorted(found, key=lambda m: m.id != newest)  # the others stay in their order


def _remove(store: Store, manifests: Iterable[Manifest]) -> list[str]:
    removed = []
    for manifest in manifests:
        if not store.labels(manifest).pinned:
            store.remove(manifest.name)
            removed.append(manifest.name)
    return removed
