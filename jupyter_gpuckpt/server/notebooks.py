"""Has snapshots and kernels follow their notebooks to other names and folders, and kernels those they are given to.

Jupyter Server tells by an event that a file or folder was renamed. It has no place to hook in where a session changes,
so that the methods of its session manager are wrapped by which it notes which notebook has which kernel.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from jupyter_events import EventLogger

from .. import settings
from ..client import keepers
from ..client.record import KernelFolder
from ..errors import GpuckptError
from ..operations.requests import Renamed
from ..snapshots.naming import follow, path_after
from ..store import Store
from .events import Events

__all__ = ["follow_files", "follow_sessions"]

log = logging.getLogger("gpuckpt")

_CONTENTS = "https://events.jupyter.org/jupyter_server/contents_service/v1"
_PATIENCE = 5.0  # seconds that a keeper may take to answer


def follow_sessions(session_manager: Any, kernel_manager: Any, root: Path) -> None:
    """Have kernels belong to the notebooks in the server's folder `root` that have them (called once, at its start)."""

    async def settle(session_id: str) -> None:
        try:
            session = await session_manager.get_session(session_id=session_id)
            if session["type"] != "notebook":
                return
            kernel_id = session["kernel"]["id"]
            others = [s for s in await session_manager.list_sessions() if s["type"] == "notebook"]
            paths = [s["path"] for s in (session, *others) if s["kernel"]["id"] == kernel_id]
            notebooks = [str(root / path.lstrip("/")) for path in paths]
            belongs_to = await asyncio.to_thread(_belong_to_one, kernel_id, notebooks)
            if belongs_to and hasattr(kernel_manager, "update_env"):  # for a restart
                kernel_manager.update_env(kernel_id=kernel_id, env={"JPY_SESSION_NAME": belongs_to})
        except Exception as e:  # noqa: BLE001 - the session is as it was wanted all the same
            log.warning("A kernel was not told which notebook it belongs to: %s", e)

    def then_settle(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def wrapped(session_id: str, **changed: Any) -> Any:
            answer = await method(session_id, **changed)
            await settle(session_id)
            return answer

        return wrapped

    session_manager.save_session = then_settle(session_manager.save_session)
    session_manager.update_session = then_settle(session_manager.update_session)


def _belong_to_one(kernel_id: str, notebooks: Sequence[str]) -> str:
    """Have a kernel belong to the first of the notebooks that have it, unless it belongs to one of them; return it."""
    folder = KernelFolder(settings.kernels_dir() / kernel_id)
    if not folder.path.exists():
        return ""  # a plain kernel
    belongs_to = folder.launch().notebook
    if belongs_to in notebooks:
        return belongs_to
    _tell(folder, notebooks[0])
    return notebooks[0]


def _tell(folder: KernelFolder, notebook: str) -> None:
    with keepers.connect(folder) as keeper:
        keeper.ask(Renamed(notebook=notebook), timeout=_PATIENCE)


def follow_files(logger: EventLogger, store: Store, events: Events, root: Path) -> None:
    """Have kernels and snapshots follow notebooks that the server renames or moves (called once, at its start)."""
    in_order = asyncio.Lock()

    async def hear(logger: EventLogger, schema_id: str, data: dict[str, Any]) -> None:
        if data["action"] != "rename":
            return
        old, new = (str(root / data[key].strip("/")) for key in ("source_path", "path"))
        async with in_order:
            try:
                await asyncio.to_thread(_tell_kernels, old, new)
                for name in await asyncio.to_thread(follow, store, old, new):
                    events.snapshots("renamed", name)
            except Exception:
                log.exception("The snapshots of %s could not follow it to %s", old, new)

    logger.add_listener(schema_id=_CONTENTS, listener=hear)


def _tell_kernels(old: str, new: str) -> None:
    for folder in keepers.folders():
        try:
            notebook = path_after(folder.launch().notebook, old, new)
            if notebook is not None:
                _tell(folder, notebook)
        except (GpuckptError, OSError, ValueError) as e:  # it has ended meanwhile, or does not answer
            log.warning("The kernel %s was not told of the new name of its notebook: %s", folder.path.name, e)
