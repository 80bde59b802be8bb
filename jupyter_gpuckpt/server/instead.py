"""Hibernating kernels where Jupyter Server would kill them: when it culls idle ones, and when it stops.

What a person shuts down or restarts ends as always. Jupyter Server has no place for this to be hooked in, so that the
two methods of its kernel manager are wrapped that it calls for these two reasons alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from typing import Any

from jupyter_client.utils import ensure_async

from .. import settings
from ..errors import GpuckptError
from ..keeper import client
from ..keeper.idle.preemption import hibernate_all, write_report
from ..keeper.record import KernelFolder

__all__ = ["install"]

log = logging.getLogger("gpuckpt")

_culling: ContextVar[bool] = ContextVar("gpuckpt_culling", default=False)
"""Whether the kernel manager does what it does for the sake of culling."""


def install(kernel_manager: Any) -> None:
    """Have the kernels of a server hibernated where the settings say so (called once, when it starts)."""
    occasions = settings.hibernate_on()
    if "cull" in occasions:
        _hibernate_when_culled(kernel_manager)
    _hibernate_when_stopped(kernel_manager, "stop" in occasions)


def _hibernate_when_culled(manager: Any) -> None:
    cull_kernel_if_idle, shutdown_kernel = manager.cull_kernel_if_idle, manager.shutdown_kernel

    async def cull_or_hibernate(kernel_id: str) -> None:
        token = _culling.set(True)
        try:
            await cull_kernel_if_idle(kernel_id)
        finally:
            _culling.reset(token)

    async def shut_down(kernel_id: str, *args: Any, **kwargs: Any) -> Any:
        if _culling.get() and (folder := _folder(kernel_id)) is not None:
            kernel = manager.get_kernel(kernel_id)
            kernel.stop_restarter()  # its end is no crash
            try:
                await asyncio.to_thread(_hibernate, folder)
            except GpuckptError as e:
                kernel.start_restarter()
                log.warning("The idle kernel %s was neither hibernated nor culled: %s", kernel_id, e)
                return None
        return await ensure_async(shutdown_kernel(kernel_id, *args, **kwargs))

    manager.cull_kernel_if_idle, manager.shutdown_kernel = cull_or_hibernate, shut_down


def _hibernate(folder: KernelFolder) -> None:
    with client.connect(folder) as keeper:
        found = keeper.request("hibernate", {"end": True})
    log.info("The idle kernel %s was hibernated as %s.", folder.path.name, found["name"])


def _hibernate_when_stopped(manager: Any, all_of_them: bool) -> None:
    shutdown_all = manager.shutdown_all

    async def hibernate_then_shut_down(*args: Any, **kwargs: Any) -> None:
        ids = list(manager.list_kernel_ids())
        try:
            await asyncio.to_thread(_hibernate_before_stop, ids, all_of_them)
        except Exception:  # the server is to stop all the same
            log.exception("kernels could not be hibernated")
        await ensure_async(shutdown_all(*args, **kwargs))

    manager.shutdown_all = hibernate_then_shut_down


def _hibernate_before_stop(ids: Collection[str], all_of_them: bool) -> None:
    """Hibernate kernels for good; with not `all_of_them`, only have those stay so that are hibernated already."""
    folders = [folder for folder in map(_folder, ids) if folder is not None]
    if not all_of_them:
        folders = [folder for folder in folders if folder.state().hibernated is not None]
    if not folders:
        return
    deadline = settings.hibernate_deadline()
    outcomes = hibernate_all(folders, deadline, _and_end)
    for outcome in outcomes:
        log.log(
            logging.INFO if outcome.saved else logging.ERROR,
            "kernel %s (%s) was %s",
            outcome.kernel_id,
            outcome.notebook or "no notebook",
            f"saved as {outcome.name}" if outcome.saved else f"not saved: {outcome.why}",
        )
    if all_of_them:
        log.warning("What became of the kernels when the server stopped: %s", write_report(outcomes, deadline))


def _and_end(_: Mapping[str, Any]) -> dict[str, Any]:
    return {"end": True}


def _folder(kernel_id: str) -> KernelFolder | None:
    """Return the folder of a kernel that a keeper holds; None for a plain one."""
    folder = KernelFolder(settings.kernels_dir() / kernel_id)
    return folder if folder.path.exists() else None
