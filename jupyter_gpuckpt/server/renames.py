"""Has a kernel know what its notebook is called now: one that outlives the server is offered to the notebook again.

Jupyter Server has no place for this to be hooked in, so that the method of its session manager is wrapped by which
clients tell it of another path.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from .. import settings
from ..keeper import client
from ..keeper.record import KernelFolder

__all__ = ["tell_of_renames"]

log = logging.getLogger("gpuckpt")

_PATIENCE = 5.0  # seconds that a keeper may take to answer


def tell_of_renames(session_manager: Any, root: Path) -> None:
    """Have kernels told where their notebooks lie in the server's folder `root` (called once, when it starts)."""
    update_session = session_manager.update_session

    async def update_and_tell(session_id: str, **changed: Any) -> None:
        await update_session(session_id, **changed)
        if not changed.get("path"):
            return
        try:
            session = await session_manager.get_session(session_id=session_id)
            if session["type"] == "notebook":
                await asyncio.to_thread(_tell, session["kernel"]["id"], root / session["path"].lstrip("/"))
        except Exception as e:  # noqa: BLE001 - the notebook was renamed all the same
            log.warning("A kernel was not told of the new name of its notebook: %s", e)

    session_manager.update_session = update_and_tell


def _tell(kernel_id: str, notebook: Path) -> None:
    folder = KernelFolder(settings.kernels_dir() / kernel_id)
    if not folder.path.exists():
        return  # a plain kernel
    with client.connect(folder) as keeper:
        keeper.request("renamed", {"notebook": str(notebook)}, timeout=_PATIENCE)
