"""Asking a Jupyter server that holds a kernel to hold another one as well: a copy of it.

A server tells in a file of Jupyter's runtime folder where it listens and with which token. Ours, or its extension, has
an address for this in its REST API.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_runtime_dir

__all__ = ["ADOPT", "FRESH", "ask"]

ADOPT = "gpuckpt_adopt"
"""An argument of `KernelManager.start_kernel`: the kernel of that id runs already, and is only to be held."""

FRESH = "gpuckpt_fresh"
"""Another: the kernel is to be a fresh one, whatever was hibernated."""

log = logging.getLogger("gpuckpt.keeper")

_TIMEOUT = 20.0


def ask(pids: Iterable[int], kernel_id: str) -> bool:
    """Ask the servers with these pids to hold a kernel; return whether one does now."""
    return any(_asked(pid, kernel_id) for pid in pids)


def _asked(pid: int, kernel_id: str) -> bool:
    server = _server(pid)
    if not server.get("url", "").startswith("http"):
        return False
    from urllib.error import URLError
    from urllib.request import ProxyHandler, Request, build_opener

    request = Request(  # noqa: S310 - http, as looked at above
        f"{server['url']}api/gpuckpt/kernels/{kernel_id}/adopt",
        data=b"{}",
        headers={"Authorization": f"token {server.get('token', '')}", "Content-Type": "application/json"},
    )
    try:
        # It is on this machine: a proxy would be told the token.
        with build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError, ValueError) as e:
        log.info("the server %d does not hold kernel %s: %s", pid, kernel_id, e)
        return False


def _server(pid: int) -> dict[str, Any]:
    """Return what a server with this pid tells of itself; nothing where it is none, or somebody else's."""
    path = Path(jupyter_runtime_dir(), f"jpserver-{pid}.json")
    with contextlib.suppress(OSError, ValueError), path.open() as file:
        if os.fstat(file.fileno()).st_uid == os.getuid():
            found = json.load(file)
            return found if isinstance(found, dict) else {}
    return {}
