"""Remove old snapshots by a rule; never pinned ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...errors import StoreError
from ..manifest import Manifest

if TYPE_CHECKING:
    from ..store import Store

__all__ = ["beyond_last", "beyond_size", "keep_last", "keep_under"]


def keep_last(store: Store, count: int, of: Callable[[Manifest], bool] = lambda _: True, newest: str = "") -> list[str]:
    """Remove what is `beyond_last`, and return the names.

    Raises
    ------
    StoreError : one could not be removed; those before it are.
    """
    return _remove(store, beyond_last(store, count, of, newest))


def keep_under(store: Store, size: int, of: Callable[[Manifest], bool] = lambda _: True, newest: str = "") -> list[str]:
    """Remove what is `beyond_size`, and return the names. Raises as `keep_last` and `beyond_size`."""
    return _remove(store, beyond_size(store, size, of, newest))


def beyond_last(
    store: Store, count: int, of: Callable[[Manifest], bool] = lambda _: True, newest: str = ""
) -> list[str]:
    """Return the names of all but the newest `count` snapshots, of those for which `of` is true.

    Pinned ones are not among them, and count. `newest` is the id of the one that is known to be the newest: the clock,
    which tells it of all others, may have been set back.
    """
    return [m.name for m in _newest_first(store, of, newest)[count:] if not store.labels(m).pinned]


def beyond_size(
    store: Store, size: int, of: Callable[[Manifest], bool] = lambda _: True, newest: str = ""
) -> list[str]:
    """Return the names of the oldest snapshots for which `of` is true, without which the store takes `size` bytes.

    Neither the newest one nor pinned ones are among them.

    Raises
    ------
    StoreError : it cannot be known what a removal would free.
    """
    used, names = store.used(), list[str]()
    for manifest in _newest_first(store, of, newest)[:0:-1]:
        would = store.would_collect(names)
        if would.obstacle:
            raise StoreError(
                "No old snapshots were removed.",
                f"It would free nothing: {would.obstacle}.",
                "`gpuckpt check` says what is damaged.",
            )
        if used - (would.freed if names else 0) <= size:
            break
        if not store.labels(manifest).pinned:
            names.append(manifest.name)
    return names


def _newest_first(store: Store, of: Callable[[Manifest], bool], newest: str) -> list[Manifest]:
    found = [m for m in store.list() if of(m)]
    return sorted(found, key=lambda m: m.id != newest)  # the others stay in their order


def _remove(store: Store, names: Sequence[str]) -> list[str]:
    for name in names:
        store.remove(name)
    return list(names)
