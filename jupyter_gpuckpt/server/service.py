"""What the API offers, apart from HTTP: one object that answers every question without holding the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_server.gateway.gateway_client import GatewayClient

from .. import __version__, settings
from ..checked import to_json
from ..client import keepers
from ..client.adoption import ADOPT, FRESH
from ..client.listing import STATUS_TIMEOUT, hibernated, running_kernels
from ..client.record import KernelFolder
from ..errors import Busy, GpuckptError, NoSuchKernel, Refused, Unavailable
from ..freeze.cuda_calls import CudaWorker
from ..operations import results
from ..operations.requests import Auto, AutoSleep, Awake, Executed, Request, Restore, Status
from ..operations.results import Forked, KernelStatus, ListedKernel
from ..snapshots.other_stores import of_store, store_in
from ..snapshots.saved import kernel_of
from ..spelling import in_a_cell
from ..store import Manifest, Store, check_key, check_name
from ..store.trust import parse_key
from .events import Events
from .limits import Limit
from .logs import keeper_log
from .operations import Operation, Operations
from .snapshots import Snapshots

if TYPE_CHECKING:
    from .transfers import Transfers

__all__ = ["Service"]

_ID = re.compile(r"[A-Za-z0-9-]{1,200}", re.ASCII)
"""What a kernel's id may look like: it becomes the name of a folder."""
_ANSWER = STATUS_TIMEOUT + 5.0
"""For how long a keeper may be silent that waits for its kernel to answer a question, in seconds."""
_JUDGED_FOR = 60.0
"""For how long the judgement holds that this machine can or cannot save kernels, in seconds."""


_MOST_LOOKS = 16
"""How many requests that read a disk, ask a keeper or start a process are worked on at once."""
_RETRY_AFTER = 1
"""When one beyond that may ask again, in seconds."""

_FEATURES = ("fork", "push", "pull", "export", "import", "sleep", "hibernate", "undo")


class Service:
    """Kernels, snapshots and operations of one server.

    Whatever reads a disk, asks a keeper or starts a process is done in a thread. What it does rarely is imported when
    it is first asked for.
    """

    def __init__(self, events: Events, kernel_manager: Any) -> None:
        self._events, self._kernel_manager = events, kernel_manager
        self._store = Store(settings.store_dir())
        self._worker = CudaWorker()
        self._judged: tuple[float, Unavailable | None] | None = None
        self._resuming: dict[str, str] = {}
        """The names of the snapshots that are being resumed, by operation."""
        self._started: dict[str, str] = {}
        """The kernels that were started for that."""
        self.snapshots = Snapshots(self._store, events, self._path)
        self.operations = Operations(self._changed)
        self.looks = Limit(_MOST_LOOKS, "requests", _RETRY_AFTER)

    def _changed(self, operation: Operation) -> None:
        self._events.operation(operation.outline())
        if operation.ended:
            self._resume_ended(operation)
        change = {"save": "saved", "fork": "saved", "pull": "pulled"}.get(operation.kind)
        if change and operation.state == "done" and operation.name:
            self._events.snapshots(change, operation.name)

    @functools.cached_property
    def transfers(self) -> Transfers:
        """What sends and fetches snapshots."""
        from .transfers import Transfers

        return Transfers(self._store, self.operations, self._events, self.snapshots.key_of)

    def snapshots_in(self, folder: str) -> Snapshots:
        """Return the snapshots in the store in another folder; in the usual one where none is given.

        Raises
        ------
        Refused : it is no absolute path.
        """
        return Snapshots(store_in(folder), None, self._path) if folder else self.snapshots

    # -- kernels

    async def kernels(self, of_server: Mapping[str, str]) -> dict[str, Any]:
        """Return every kernel that can be saved, and those of `of_server` (names by id) that cannot be.

        Each has its notebook's path as ``reconnect`` where it outlived the server that held it, else null.
        ``unavailable`` says why none can be saved on this machine; it is null where nothing speaks against it.
        ``features`` is what this version can do with them that an earlier one could not.
        """
        found, faults = await asyncio.to_thread(running_kernels, self._worker)
        held = {kernel.kernel_id for kernel in found}
        reason = await self._reason()
        why = _elsewhere() if GatewayClient.instance().gateway_enabled else reason or _plain()
        plain = [
            {"kernel_id": kernel_id, "name": name, "why": why.spelled(in_a_cell).as_dict()}
            for kernel_id, name in of_server.items()
            if kernel_id not in held
        ]
        return {
            "kernels": [{**to_json(kernel), "reconnect": self._reconnect(kernel, of_server)} for kernel in found],
            "plain": plain,
            "faults": [fault.spelled(in_a_cell).as_dict() for fault in faults],
            "unavailable": reason.spelled(in_a_cell).as_dict() if reason else None,
            "version": __version__,
            "features": list(_FEATURES),
        }

    def _reconnect(self, kernel: KernelStatus, of_server: Collection[str]) -> str | None:
        """Return the path of the notebook of a kernel that outlived its server; None for any other."""
        is_left = not kernel.attended and kernel.kernel_id not in of_server and kernel.state != "ended"
        return self._path(kernel.notebook) if is_left else None

    async def _reason(self) -> Unavailable | None:
        now = time.monotonic()
        if self._judged is None or now - self._judged[0] > _JUDGED_FOR:
            self._judged = (now, await asyncio.to_thread(_why_unavailable))
        return self._judged[1]

    async def operate(self, kind: type[Request[Any]], kernel_id: str, request: Mapping[str, Any]) -> Operation:
        """Begin an operation on a kernel, or a step, as it is described; with ``store``, on a snapshot in that folder.

        Raises
        ------
        BadName : no snapshot can be called that.
        NoSuchKernel, Unavailable : there is no such kernel, or that cannot be done with it.
        """
        name, wanted, finish = "", dict(request), None
        match kind.op:
            case "save":
                name = check_name(request["name"])
                wanted = _in_store(wanted, "name")
            case "restore":
                name, wanted = await self._to_restore(wanted)
            case "fork":
                # What is saved on the way has a name; a fork leaves none otherwise.
                name, wanted, finish = request["name"], await self._to_fork(wanted), self._hold
        folder = await self._folder(kernel_id)
        return self.operations.start(Operation(kind.op, kernel_id, name), folder, kind, wanted, finish)

    async def _to_restore(self, request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the snapshot's name and the request: without a ``name``, for the latest of the kernel's notebook."""
        name, of_any, elsewhere = request["name"], request["from"], bool(request["store"])
        wanted = _in_store(request, "name", "from")
        if not elsewhere and of_any:
            # As `name`, too: a keeper of an older version, which knows neither, must not take it for one of the latest.
            wanted["key"] = wanted["name"] = await self.snapshots.key_of(of_any)
        elif not elsewhere and name:
            check_key(name)
        return name or wanted["name"], wanted

    async def _to_fork(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the request for copies that this server holds."""
        if request["name"]:
            check_name(request["name"])
        key = await self.snapshots.key_of(request["snapshot"]) if request["snapshot"] else None
        return {**request, "adopt": False, **({"key": key, "snapshot": key} if key else {})}

    async def change(self, kernel_id: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change whether a kernel is ``pinned`` awake and after how many seconds it sleeps (``sleep_after``, 0: never).

        What is not among the changes stays. Returns both.

        Raises
        ------
        NoSuchKernel, Unavailable : there is no such kernel.
        Busy, KeeperGone : it does not answer.
        """
        folder = await self._folder(kernel_id)

        def ask() -> dict[str, Any]:
            with keepers.connect(folder) as keeper:
                if "pinned" in changes:
                    keeper.ask(Awake(on=changes["pinned"]), timeout=_ANSWER)
                if "sleep_after" in changes:
                    keeper.ask(AutoSleep(after=changes["sleep_after"]), timeout=_ANSWER)
                status = keeper.ask(Status(), timeout=_ANSWER)
                return {"kernel_id": status.kernel_id, "pinned": status.pinned, "sleep_after": status.sleep_after}

        return await asyncio.to_thread(ask)

    async def auto(self, kernel_id: str, rule: Mapping[str, Any]) -> results.AutoSaving:
        """Set whether a kernel is saved by itself after its cells, and by what `rule`; without one only return it.

        Raises
        ------
        NoSuchKernel, Unavailable : there is no such kernel.
        Busy, KeeperGone : it does not answer.
        """
        folder = await self._folder(kernel_id)

        def ask() -> results.AutoSaving:
            with keepers.connect(folder) as keeper:
                return keeper.ask(Auto(**rule), timeout=_ANSWER)

        return await asyncio.to_thread(ask)

    def look(self) -> tuple[list[ListedKernel], int]:
        """Return all kernels, and how many are hibernated that nobody holds, for the metrics; asked in a thread."""
        kernels = running_kernels(self._worker)[0]
        with contextlib.suppress(GpuckptError):
            return kernels, sum(not snapshot.held for snapshot in hibernated(self._store))
        return kernels, 0

    async def _hold(self, result: Forked) -> Forked:
        """Hold the copies that a fork has made; one that cannot be held runs on, and the result says so."""
        kernels, warnings = [], [*result.warnings]
        for kernel in result.kernels:
            try:
                await self.adopt(kernel.id)
                kernels.append(dataclasses.replace(kernel, held=True))
            except Exception as e:  # noqa: BLE001 - whatever the kernel manager raises
                kernels.append(kernel)
                warnings.append(f"The server does not hold the copy {kernel.id}: {e}")
        return dataclasses.replace(result, kernels=kernels, warnings=warnings)

    async def adopt(self, kernel_id: str) -> dict[str, Any]:
        """Hold a kernel that runs and that nobody holds, as if this server had started it.

        Raises
        ------
        NoSuchKernel, Unavailable : there is no such kernel.
        Refused : another program holds it.
        """
        if kernel_id not in self._kernel_manager:
            folder = await self._folder(kernel_id)
            launch = await asyncio.to_thread(folder.launch)
            # The kernel manager passes what it does not know on to the provisioner. The environment is for a restart.
            await self._kernel_manager.start_kernel(
                kernel_id=kernel_id, kernel_name=launch.name, env=_environment(launch.notebook), **{ADOPT: True}
            )
        return {"id": kernel_id}

    async def hibernated(self) -> dict[str, Any]:
        """Return the snapshots of hibernated kernels, with the paths of their notebooks as this server has them.

        Raises
        ------
        StoreError : the store cannot be read.
        """
        found = await asyncio.to_thread(hibernated, self._store)
        return {"hibernated": [{**to_json(one), "path": self._path(one.notebook)} for one in found]}

    def _path(self, notebook: str) -> str | None:
        """Return a notebook's path as the contents API has it; None where it does not lie in the server's folder."""
        root = Path(self._kernel_manager.root_dir).absolute()
        return Path(notebook).relative_to(root).as_posix() if Path(notebook).is_relative_to(root) else None

    async def resume(self, name: str, kernel_id: str) -> Operation:
        """Begin to bring a hibernated kernel back: in the kernel of that id, or in a new one where there is none.

        Once it runs, the snapshot is removed, unless somebody gave it another name or tags.

        Raises
        ------
        BadName, NoSuchSnapshot, Untrusted, Damaged, Incompatible : it cannot be used.
        Refused, Busy : its kernel is there, to be woken; or it is being resumed.
        NoSuchKernel, Unavailable : there is no such kernel.
        """
        manifest = await asyncio.to_thread(self._store.trusted, name)
        found = {snapshot.id: snapshot for snapshot in await asyncio.to_thread(hibernated, self._store)}
        snapshot = found.get(manifest.id)
        if snapshot is None:
            raise Refused(f"{name} was not resumed.", "It is not the snapshot of a hibernated kernel.", "Restore it.")
        if snapshot.held:
            where = f" on {snapshot.host}" if snapshot.host else ""
            raise Refused(
                f"{name} was not resumed.", f"Its kernel still exists{where}, and uses it.", "Wake that kernel."
            )
        if name in self._resuming.values():
            raise Busy(f"{name} was not resumed.", "It is already being resumed.", "Wait for it.")
        started = not kernel_id
        if started:
            kernel_id = await self._start_for(manifest)
        folder = await self._folder(kernel_id)
        operation = Operation("restore", kernel_id, name)
        self._resuming[operation.id] = name
        self._started.update({operation.id: kernel_id} if started else {})

        request = {"key": name, "name": name, "resume": True}
        return self.operations.start(operation, folder, Restore, request)

    async def _start_for(self, manifest: Manifest) -> str:
        """Start a kernel to resume one in, where that one's notebook is."""
        notebook = Path(str(manifest.kernel.get("notebook", "")))
        where = {"cwd": str(notebook.parent)} if notebook.is_absolute() and notebook.parent.is_dir() else {}
        kernel_id: str = await self._kernel_manager.start_kernel(
            kernel_name=kernel_of(manifest).name,
            env=_environment(str(notebook) if notebook.name else ""),
            **{**where, FRESH: True},
        )
        return kernel_id

    def _resume_ended(self, operation: Operation) -> None:
        """End the kernel that was started for a resume which failed."""
        self._resuming.pop(operation.id, None)
        kernel_id = self._started.pop(operation.id, None)
        if kernel_id is not None and operation.state != "done" and kernel_id in self._kernel_manager:
            self._ending = asyncio.ensure_future(self._kernel_manager.shutdown_kernel(kernel_id, now=True))

    async def cancel(self, operation_id: str) -> Operation:
        """Ask for an operation to be cancelled.

        Raises
        ------
        NoSuchOperation : there is none of this id.
        """
        kernel_id = self.operations.get(operation_id).kernel_id
        folder = KernelFolder(settings.kernels_dir() / kernel_id) if kernel_id else None
        return await self.operations.cancel(operation_id, folder)

    async def executed(self, kernel_id: str) -> results.Executed:
        """Return which cells a kernel has executed, and the snapshot that it was last put back to.

        Raises
        ------
        NoSuchKernel, Unavailable : there is no such kernel, or it cannot be saved.
        Busy, KeeperGone : it does not answer.
        """
        folder = await self._folder(kernel_id)

        def ask() -> results.Executed:
            with keepers.connect(folder) as keeper:
                return keeper.ask(Executed(), timeout=_ANSWER)

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

    async def trust(self, key: str, comment: str) -> dict[str, Any]:
        """Trust what the holder of a key has signed and will sign.

        Raises
        ------
        Refused : it is no key.
        """
        found = parse_key(key)
        await asyncio.to_thread(self._store.trust.add, found, comment)
        return {"key": found, "revoked": False}

    # -- the machine

    async def doctor(self) -> dict[str, Any]:
        """Return what speaks for and against saving kernels on this machine."""
        return await asyncio.to_thread(_doctor)


def _in_store(request: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return a request whose ``store`` is said as keepers know it."""
    own = {name: value for name, value in request.items() if name != "store"}
    return of_store(request["store"], own, *names)


def _why_unavailable() -> Unavailable | None:
    from ..machine.capability import why_unavailable

    return why_unavailable()


def _doctor() -> dict[str, Any]:
    from ..machine import doctor

    checks = doctor.examine()
    return {"works": doctor.works(checks), "checks": [dataclasses.asdict(check) for check in checks]}


def _environment(notebook: str) -> dict[str, str]:
    """Return the environment of the kernel of a notebook, or of none, as Jupyter Server makes it."""
    return {**os.environ, "JPY_SESSION_NAME": notebook} if notebook else {**os.environ}


def _plain() -> GpuckptError:
    return Unavailable(
        "This kernel can be neither saved nor restored.",
        "It was not started by gpuckpt: its kernelspec names another provisioner.",
        'Choose the kernel "Python 3 (gpuckpt)" for this notebook.',
    )


def _elsewhere() -> GpuckptError:
    return Unavailable(
        "This kernel runs on a gateway.",
        "This server can neither save nor restore it: that is done where it runs.",
        "Use `gpuckpt save @ NAME` in its cells. If that is unknown there, install jupyter_gpuckpt on the gateway.",
    )
