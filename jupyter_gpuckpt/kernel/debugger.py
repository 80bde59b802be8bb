"""The notebook's debugger across a restore: its connections were closed, so it has to be able to start fresh.

ipykernel starts debugpy in the kernel, and debugpy a process (the adapter) that both talk to over TCP. A restored
debugpy has lost its adapter, which ends by itself; requests to it would never be answered, and block its channel.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ipykernel import compiler
from ipykernel import debugger as debugging

from ..errors import SaveFailed
from .rebinding import disconnect

log = logging.getLogger("gpuckpt.agent")

_usual_folder = compiler.get_tmp_directory
_usual_start = debugging.Debugger.start

_TOLD_WITHIN = 3.0
"""Seconds within which debugpy tells ipykernel that threads go on: later than it answers the request to continue."""


def keep_cells_private() -> None:
    """Have ipykernel put the cells that are debugged into a folder whose name no other user can know.

    Its own is called by the process's id (ipykernel 7, `compiler.get_tmp_directory`), which in namespaces is the same
    for every kernel: of two users the second could debug nothing, and whoever made that folder first could read the
    cells. Until 7.3 everybody can read what is in it, too.
    """
    own = f"{_usual_folder()}_{os.urandom(8).hex()}"
    for module in (compiler, debugging):
        module.get_tmp_directory = lambda: own
    debugging.Debugger.start = _start
    atexit.unregister(_remove_cells)
    atexit.register(_remove_cells, os.getpid())


def _start(self: Any) -> Any:
    Path(compiler.get_tmp_directory()).mkdir(mode=0o700, parents=True, exist_ok=True)
    return _usual_start(self)


def _remove_cells(pid: int) -> None:
    if os.getpid() == pid:  # a child that was forked ends, too
        shutil.rmtree(compiler.get_tmp_directory(), ignore_errors=True)


def refuse_stopped(kernel: Any) -> None:
    """Refuse to save a cell that is stopped at a breakpoint: nobody could have it go on in the restored kernel.

    Raises
    ------
    SaveFailed : one is; nothing was changed.
    """
    debugger = getattr(kernel, "debugger", None)
    deadline = time.monotonic() + _TOLD_WITHIN
    while debugger is not None and debugger.stopped_threads:
        if time.monotonic() > deadline:
            raise SaveFailed(
                "The kernel was not saved; it is unchanged.",
                "The debugger has stopped it at a breakpoint.",
                "Continue or stop the debugger, and save again.",
            )
        time.sleep(0.02)


def mend(kernel: Any, done: threading.Event) -> None:
    """Make the debugger of a kernel that was just restored able to start; called in the kernel's control thread."""
    try:
        keep_cells_private()  # the folder that it had is the saved kernel's
        _reconnect(kernel)
        _start_afresh(kernel)
    except Exception:
        log.exception("the debugger cannot be used until the kernel is restarted")
    finally:
        done.set()


def _reconnect(kernel: Any) -> None:
    """Lead the debugger's own connection to the shell channel to the port that it has now."""
    socket = kernel.parent.debug_shell_socket
    before = socket.last_endpoint.decode()
    now = f"{before.rpartition(':')[0]}:{kernel.parent.shell_port}"
    if now != before:
        disconnect(socket)
        socket.connect(now)


def _start_afresh(kernel: Any) -> None:
    """End a debugger that has lost its connections, so that the next one can be started."""
    api = sys.modules.get("debugpy.server.api")
    if api is None or not api.listen.called:
        return
    debugger = kernel.debugger
    if debugger.is_started:
        debugger.stop()
    debugger.is_started = debugger.debugpy_initialized = False
    debugger.breakpoint_list, debugger.stopped_threads = {}, set()
    client = debugger.debugpy_client
    client.debugpy_port = -1
    client.message_queue = type(client.message_queue)(client.message_queue.event_callback, client.log)
    _forget_session(api)


def _forget_session(api: Any) -> None:
    """Undo debugpy's ``listen``, which it has no call for."""
    pydevd: Any = sys.modules["pydevd"]
    pydevd.stoptrace()
    # A thread of its own that found the connection closed may be ending it as well, and is waited for half a second
    # at most: the next debugger would join one that nothing reaches.
    pydevd.set_global_debugger(None)
    pydevd.SetupHolder.setup = None
    # It has every Python child debugged, by way of an adapter that is gone: none could start any more.
    for module in filter(None, (os, subprocess, sys.modules.get("_posixsubprocess"))):
        for name in [name for name in vars(module) if name.startswith("original_")]:
            setattr(module, name.removeprefix("original_"), getattr(module, name))
            delattr(module, name)
    api.listen.called = False
