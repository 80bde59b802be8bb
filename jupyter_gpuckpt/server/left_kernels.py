"""Kernels that outlived the server that held them: the server that starts holds them, and their notebooks have them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from ..client.listing import all_left_running
from ..operations.results import KernelStatus
from .service import Service

__all__ = ["hold_left_kernels"]

log = logging.getLogger("gpuckpt")


def hold_left_kernels(service: Service, session_manager: Any, root: Path, loop: Any) -> None:
    """Hold what was left for notebooks in the server's folder `root` (called once, at its start).

    A notebook that is opened meanwhile waits for that: it is to have its own kernel.
    """
    done = asyncio.Event()
    session_exists = session_manager.session_exists

    async def hold() -> None:
        try:
            for kernel in await asyncio.to_thread(all_left_running):
                await _hold(kernel, service, session_manager, root)
        except Exception:
            log.exception("kernels that outlived their server were not taken over")
        finally:
            done.set()

    async def exists(path: str) -> bool:
        await done.wait()
        return bool(await session_exists(path))

    session_manager.session_exists = exists
    loop.add_callback(hold)


async def _hold(kernel: KernelStatus, service: Service, session_manager: Any, root: Path) -> None:
    if not Path(kernel.notebook).is_relative_to(root):
        return
    path = Path(kernel.notebook).relative_to(root).as_posix()
    try:
        await service.adopt(kernel.kernel_id)
        session = {"path": path, "name": Path(path).name, "type": "notebook", "kernel_name": kernel.name}
        await session_manager.create_session(**session, kernel_id=kernel.kernel_id)
    except Exception as e:  # noqa: BLE001 - whatever the managers raise; another server may have been faster
        log.warning("The kernel of %s, which outlived its server, was not taken over: %s", path, e)
    else:
        log.info("The kernel of %s outlived its server, and was taken over.", path)
