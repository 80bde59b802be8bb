"""What the API offers, apart from HTTP: one object that answers every question without holding the event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any

from .. import __version__, settings
from ..errors import GpuckptError, NoSuchKernel, Unavailable
from ..freeze.cuda_calls import CudaWorker
from ..keeper import client
from ..keeper.listing import STATUS_TIMEOUT, running_kernels
from ..keeper.record import KernelFolder
from ..keeper.summary import details, listing, origins
from ..machine import doctor
from ..machine.capability import why_unavailable
from ..store import Store, check_name
from ..store.difference import difference
from .events import Events
from .logs import keeper_log
from .operations import Operation, Operations

__all__ = ["Service"]

_ID = re.compile(r"[A-Za-z0-9-]+", re.ASCII)
"""What a kernel's id may look like: it becomes the name of a folder."""
_ANSWER = STATUS_TIMEOUT + 5.0
"""For how long a keeper may be silent that waits for its kernel to answer a question, in seconds."""
_JUDGED_FOR = 60.0
"""For how long the judgement holds that this machine can or cannot save kernels, in seconds."""


class Service:
    """Kernels, snapshots and operations of one server.

    Whatever reads a disk, asks a keeper or starts a process is done in a thread.
    """

    def __init__(self, events: Events, features: Sequence[str] = ()) -> None:
        self._events = events
        self._features = list(features)
        self._store = Store(settings.store_dir())
        self._worker = CudaWorker()
        self._judged: tuple[float, Unavailable | None] | None = None
        self.operations = Operations(self._changed)

    def _changed(self, operation: Operation) -> None:
        self._events.operation(operation.outline())
        if operation.kind == "save" and operation.state == "done":
            self._events.snapshots("saved", operation.name)

    # -- kernels

    async def kernels(self, of_server: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return every kernel that can be saved, and those of `of_server` (Jupyter's models) that cannot be.

        ``unavailable`` says why none can be saved on this machine; it is null where nothing speaks against it.
        ``features`` are those of `routes.OPTIONAL` that this version has.
        """
        found, faults = await asyncio.to_thread(running_kernels, self._worker)
        held = {kernel["kernel_id"] for kernel in found}
        reason = await self._reason()
        plain = [
            {"kernel_id": kernel["id"], "name": kernel["name"], "why": (reason or _plain()).as_dict()}
            for kernel in of_server
            if kernel["id"] not in held
        ]
        return {
            "kernels": found,
            "plain": plain,
            "faults": [fault.as_dict() for fault in faults],
            "unavailable": reason.as_dict() if reason else None,
            "version": __version__,
            "features": self._features,
        }

    async def _reason(self) -> Unavailable | None:
        now = time.monotonic()
        if self._judged is None or now - self._judged[0] > _JUDGED_FOR:
            self._judged = (now, await asyncio.to_thread(why_unavailable))
        return self._judged[1]

    async def save(self, kernel_id: str, name: str, message: str, replace: bool) -> Operation:
        """Begin to save a kernel.

        Raises
        ------
        BadName : no snapshot can be called that.
        NoSuchKernel, Unavailable : there is no such kernel, or it cannot be saved.
        """
        check_name(name)
        folder = await self._folder(kernel_id)
        request = {"name": name, "message": message, "replace": replace}
        return self.operations.start(Operation("save", kernel_id, name), folder, request)

    async def restore(self, kernel_id: str, name: str) -> Operation:
        """Begin to put a kernel back to a snapshot; without a name, to the latest of its notebook.

        Raises
        ------
        BadName : no snapshot can be called that.
        NoSuchKernel, Unavailable : there is no such kernel, or it cannot be restored.
        """
        if name:
            check_name(name)
        folder = await self._folder(kernel_id)
        return self.operations.start(Operation("restore", kernel_id, name), folder, {"name": name})

    async def cancel(self, operation_id: str) -> Operation:
        """Ask for an operation to be cancelled.

        Raises
        ------
        NoSuchOperation : there is none of this id.
        """
        kernel_id = self.operations.get(operation_id).kernel_id
        return await self.operations.cancel(operation_id, KernelFolder(settings.kernels_dir() / kernel_id))

    async def executed(self, kernel_id: str) -> dict[str, Any]:
        """Return which cells a kernel has executed, and the snapshot that it was last put back to.

        Raises
        ------
        NoSuchKernel, Unavailable : there is no such kernel, or it cannot be saved.
        Busy, KeeperGone : it does not answer.
        """
        folder = await self._folder(kernel_id)

        def ask() -> dict[str, Any]:
            with client.connect(folder) as keeper:
                found: dict[str, Any] = keeper.request("executed", timeout=_ANSWER)
                return found

        return await asyncio.to_thread(ask)

    async def kernel_log(self, kernel_id: str) -> dict[str, Any]:
        """Return what the keeper of a kernel has logged.

        Raises
        ------
        NoSuchKernel, Unavailable : there is no such kernel, or it cannot be saved.
        """
        folder = await self._folder(kernel_id)
        return {"logs": await asyncio.to_thread(keeper_log, folder)}

    def operation_log(self, operation_id: str) -> dict[str, Any]:
        """Return what was logged during an operation, once it has ended.

        Raises
        ------
        NoSuchOperation : there is none of this id.
        """
        return {"logs": self.operations.get(operation_id).logs}

    async def _folder(self, kernel_id: str) -> KernelFolder:
        folder = KernelFolder(settings.kernels_dir() / kernel_id)
        if not _ID.fullmatch(kernel_id) or not await asyncio.to_thread(folder.path.exists):
            raise await self._reason() or NoSuchKernel(
                "There is no such kernel that can be saved.",
                "It has ended, or it is a plain one: no keeper holds a kernel of that id.",
                'Choose the kernel "Python 3 (gpuckpt)" for the notebook.',
                kernel_id=kernel_id,
            )
        return folder

    # -- snapshots

    async def snapshots(self) -> dict[str, Any]:
        """Return all snapshots, newest first, and as ``faults`` an error for each that cannot be used.

        Raises
        ------
        StoreError, Incompatible : the store cannot be used.
        """
        return await asyncio.to_thread(listing, self._store)

    async def snapshot(self, name: str) -> dict[str, Any]:
        """Return all about one snapshot.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible : as `Store.get`.
        """
        return details(await asyncio.to_thread(self._store.get, name))

    async def origins(self, name: str) -> dict[str, Any]:
        """Return a snapshot and those that its kernel came from, the newest first.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible : as `Store.get`.
        """
        return {"snapshots": await asyncio.to_thread(origins, self._store, name)}

    async def difference(self, old: str, new: str) -> dict[str, Any]:
        """Return what is in one snapshot and not in another.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible : as `Store.get`.
        """
        return await asyncio.to_thread(_difference, self._store, old, new)

    async def remove(self, name: str) -> dict[str, Any]:
        """Remove a snapshot.

        Raises
        ------
        BadName, NoSuchSnapshot, Pinned, Incompatible : as `Store.remove`.
        """
        freed = await asyncio.to_thread(self._store.remove, name)
        self._events.snapshots("removed", name)
        return {"name": name, "freed": freed}

    async def rename(self, name: str, new: str) -> dict[str, Any]:
        """Give a snapshot another name, and return all about it.

        Raises
        ------
        BadName, NoSuchSnapshot, NameTaken, Damaged, Incompatible : as `Store.rename`.
        """
        manifest = await asyncio.to_thread(self._store.rename, name, new)
        self._events.snapshots("renamed", new)
        return details(manifest)

    async def pin(self, name: str, pinned: bool) -> dict[str, Any]:
        """Have a snapshot kept, or no longer; return its labels.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible : as `Store.pin`.
        """
        labels = await asyncio.to_thread(self._store.pin, name, pinned)
        self._events.snapshots("labelled", name)
        return {"name": name, **dataclasses.asdict(labels)}

    # -- the machine

    async def doctor(self) -> dict[str, Any]:
        """Return what speaks for and against saving kernels on this machine."""
        checks = await asyncio.to_thread(doctor.examine)
        return {"works": doctor.works(checks), "checks": [dataclasses.asdict(check) for check in checks]}


def _difference(store: Store, old: str, new: str) -> dict[str, Any]:
    before, after = store.get(old), store.get(new)
    changes = difference(store.contents(before), store.contents(after))
    return {"old": before.name, "new": after.name, "files": [dataclasses.asdict(change) for change in changes]}


def _plain() -> GpuckptError:
    return Unavailable(
        "This kernel can be neither saved nor restored.",
        "It was not started by gpuckpt: its kernelspec names another provisioner, or it runs elsewhere.",
        'Choose the kernel "Python 3 (gpuckpt)" for this notebook.',
    )
