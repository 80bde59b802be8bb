"""Hibernating kernels where Jupyter Server would kill them: when it culls idle ones, and when it stops.

What a user shuts down or restarts ends as always. A kernel that was resumed is hibernated again whatever the settings
say: the snapshot that it came from is gone. Jupyter Server has no place to hook in where it culls, so that the method
of its kernel manager is wrapped that it calls for this reason alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection
from contextvars import ContextVar
from typing import Any

from jupyter_client.utils import ensure_async

from .. import settings
from ..client import keepers
from ..client.listing import hibernated
from ..client.preemption import hibernate_all, write_report
from ..client.record import KernelFolder
from ..errors import GpuckptError
from ..operations.requests import Hibernate
from ..operations.results import KernelStatus
from ..snapshots.summary import HIBERNATED
from ..store import Manifest, Store, name_of

__all__ = ["fetch_from_remote", "hibernate_before_stop", "hibernate_when_culled"]

log = logging.getLogger("gpuckpt")

_STARTING = 60.0  # how long kernels that are just being started are waited for, in seconds
_LOOK = 0.02
_culling: ContextVar[bool] = ContextVar("gpuckpt_culling", default=False)
"""Whether the kernel manager does what it does for the sake of culling."""


def hibernate_when_culled(manager: Any) -> None:
    """Have kernels of a server hibernated instead of culled where that is so set (called once, when it starts)."""
    cull_kernel_if_idle, shutdown_kernel = manager.cull_kernel_if_idle, manager.shutdown_kernel

    async def cull_or_hibernate(kernel_id: str) -> None:
        token = _culling.set(True)
        try:
            await cull_kernel_if_idle(kernel_id)
        finally:
            _culling.reset(token)

    async def shut_down(kernel_id: str, *args: Any, **kwargs: Any) -> Any:
        folder = _folder(kernel_id) if _culling.get() else None
        if folder is not None and ("cull" in settings.hibernate_on() or _was_resumed(folder)):
            kernel = manager.get_kernel(kernel_id)
            await _start_none_anew([kernel])
            try:
                await asyncio.to_thread(_hibernate, folder)
            except GpuckptError as e:
                kernel.start_restarter()
                log.warning("The idle kernel %s was neither hibernated nor culled: %s", kernel_id, e)
                return None
        return await ensure_async(shutdown_kernel(kernel_id, *args, **kwargs))

    manager.cull_kernel_if_idle, manager.shutdown_kernel = cull_or_hibernate, shut_down


def _hibernate(folder: KernelFolder) -> None:
    with keepers.connect(folder) as keeper:
        found = keeper.ask(Hibernate(end=True))
    log.info("The idle kernel %s was hibernated as %s.", folder.path.name, found.name)


async def hibernate_before_stop(manager: Any) -> None:
    """Hibernate the kernels of a server that stops, which is about to end them; where the settings do not say so, only
    those that were resumed, and have those stay hibernated that are it already."""
    began = time.monotonic()
    from ..provisioner import starts as under_way  # here, since it is loaded with the first kernel

    coming = dict(under_way)
    try:
        if coming:
            # One that was hibernated is to be so again. Until it has come up, its snapshot is what it was.
            starts = map(asyncio.wrap_future, coming.values())
            await asyncio.wait([*map(asyncio.ensure_future, starts)], timeout=settings.hibernate_deadline())
        held = list(manager.list_kernel_ids())
        await _start_none_anew([manager.get_kernel(kernel_id) for kernel_id in held])
        ids = [*held, *(one for one in coming if (folder := _folder(one)) is not None and _was_resumed(folder))]
        waited = time.monotonic() - began
        await asyncio.to_thread(_hibernate_for_good, set(ids), "stop" in settings.hibernate_on(), waited)
    except Exception:  # the server is to stop all the same
        log.exception("kernels could not be hibernated")
    if settings.remote():
        await asyncio.to_thread(_send_to_remote)


async def _start_none_anew(kernels: Collection[Any]) -> None:
    """Have no kernel started for one that is about to be hibernated: its end is no crash. Waits for those under way.

    jupyter_client 8.10 cannot shut a kernel down that is just being started anew: it asks how its start went
    (`InvalidStateError`). A server that stops would then stay, with all of its kernels.
    """
    deadline = time.monotonic() + _STARTING
    for kernel in kernels:
        kernel.stop_restarter()
    while not all(kernel.ready.done() for kernel in kernels) and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK)
    for kernel in kernels:
        kernel.stop_restarter()  # each start begins to watch over the kernel again


def _send_to_remote() -> None:
    """Send all that is hibernated, also what the culler has hibernated before; what is there already is not sent."""
    from ..snapshots.at_remote import send_all  # which a server without a remote does not need

    try:
        store = Store(settings.store_dir())
        send_all(store, [found.name for found in hibernated(store)])
    except Exception:  # the server is to stop all the same
        log.exception("hibernated kernels could not be sent to the remote")


def fetch_from_remote(store: Store) -> None:
    """Fetch hibernated kernels that the store lacks; what is wrong with one is told in the log."""
    from ..snapshots.at_remote import AtRemote  # likewise

    try:
        fetched, faults = AtRemote(store).fetch(_is_hibernated_kernel)
    except (GpuckptError, OSError) as e:
        log.error("hibernated kernels could not be fetched: %s", e)
        return
    for manifest in fetched:
        log.info("%s was fetched from the remote", manifest.name)
    for fault in faults:
        log.error("a hibernated kernel was not fetched: %s", fault)


def _is_hibernated_kernel(manifest: Manifest) -> bool:
    return name_of(manifest.name).startswith(f"{HIBERNATED}-") and not manifest.kernel.get("job")


def _was_resumed(folder: KernelFolder) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return folder.state().resumed is not None
    return False


def _hibernate_for_good(ids: Collection[str], all_of_them: bool, waited: float) -> None:
    folders = [folder for folder in map(_folder, ids) if folder is not None]
    if not all_of_them:
        folders = [folder for folder in folders if folder.is_hibernated() or _was_resumed(folder)]
    if not folders:
        return
    limit = settings.hibernate_deadline()
    deadline = None if limit is None else max(0.0, limit - waited)
    outcomes = hibernate_all(folders, deadline, _and_end)
    for outcome in outcomes:
        log.log(
            logging.INFO if outcome.saved else logging.ERROR,
            "kernel %s (%s) was %s",
            outcome.kernel_id,
            outcome.notebook or "no notebook",
            f"saved as {outcome.name}" if outcome.saved else f"not saved: {outcome.why}",
        )
    log.warning("What became of the kernels when the server stopped: %s", write_report(outcomes, deadline))


def _and_end(_: KernelStatus) -> Hibernate:
    return Hibernate(end=True)


def _folder(kernel_id: str) -> KernelFolder | None:
    """Return the folder of a kernel that a keeper holds; None for a plain one."""
    folder = KernelFolder(settings.kernels_dir() / kernel_id)
    return folder if folder.path.exists() else None
