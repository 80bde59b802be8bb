"""Who a hibernated kernel belongs to: one keeper at a time, on whatever machine, may bring it back from its snapshot.

A lease is a lock like that of a session, ``leases/ID`` with the snapshot's id: the system drops it with its holder.
Unlike a session, it keeps nothing in the store; the snapshot of a hibernated kernel is pinned.
"""

from __future__ import annotations

from contextlib import suppress

from ..errors import Busy
from .durable import make_folder
from .failures import storing
from .layout import Layout
from .reach import locks_reach
from .sessions import Holder, Session, held, holder

__all__ = ["lease_holder", "take_lease"]


def take_lease(layout: Layout, snapshot_id: str, by: str) -> Session:
    """Take the lease of a snapshot for `by`, a notebook or kernel; it lasts until it is closed.

    Raises
    ------
    Busy : somebody has it; who, is said.
    StoreError : its file cannot be written.
    """
    with storing("The hibernated kernel cannot be claimed.", layout.root):
        make_folder(layout.leases)
        try:
            return Session(layout.leases, "kernel", of=snapshot_id, by=by)
        except Busy:
            has_it = lease_holder(layout, snapshot_id)
            raise Busy(
                "The hibernated kernel cannot be brought back here.", _why(has_it), _then(layout, has_it)
            ) from None


def _why(has_it: Holder | None) -> str:
    if has_it is None:
        return "Somebody else is bringing it back."
    return (
        f"It belongs to {has_it.by or 'another kernel'} on {has_it.host} (process {has_it.pid}), since {has_it.since}."
    )


def _then(layout: Layout, has_it: Holder | None) -> str:
    if has_it is None or has_it.is_of_this_machine:
        return "Use it there."
    if locks_reach(layout.leases):
        return (
            f"Use it there. If {has_it.host} is down, the file server drops the lease within a few minutes: try again."
        )
    return (
        "Use it there. Locks on this file system are not seen by other machines: only if "
        f"{has_it.host} is down, run `rm {layout.leases / has_it.id}`, and try again."
    )


def lease_holder(layout: Layout, snapshot_id: str) -> Holder | None:
    """Return who has the lease of a snapshot; None where nobody has. Raises `OSError`."""
    with suppress(FileNotFoundError):
        if snapshot_id in held(layout.leases):
            return holder(layout.leases, snapshot_id) or Holder(snapshot_id, "kernel", 0, "", "")
    return None
