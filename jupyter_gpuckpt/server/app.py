"""The extension of Jupyter Server: what is configured, the default provisioner, the REST API, the server's stop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_server.extension.application import ExtensionApp
from jupyter_server.serverapp import ServerApp
from traitlets import CUnicode

from .. import settings
from ..errors import Refused
from ..setting import Setting
from ..store import Store
from . import hibernate_instead
from .events import Events
from .left_kernels import hold_left_kernels
from .metrics import register
from .notebooks import follow_files, follow_sessions
from .routes import handlers
from .service import Service

__all__ = ["PROVISIONER", "Gpuckpt"]

PROVISIONER = "gpuckpt-provisioner"

_CONFIGURED = tuple(one for one in settings.ALL if one.configurable == "Gpuckpt")


class Gpuckpt(ExtensionApp):
    """Saves and restores kernels.

    What is set here wins over the environment variable that sets the same, and is handed on by it to the kernels and
    terminals that the server starts. A command line elsewhere knows the variables alone.
    """

    name = "gpuckpt"
    _hibernating: asyncio.Task[None] | None = None
    vars().update({one.trait: CUnicode(help=one.help).tag(config=True) for one in _CONFIGURED})

    @classmethod
    def get_extension_package(cls) -> str:
        """Return what a server that is started by this class has to load."""
        return __package__ or ""

    def initialize_settings(self) -> None:
        """Settle what was configured, and which provisioner kernels get that name none (called at the server's start).

        One that the user chose, by configuration or by environment, stays.

        Raises
        ------
        Refused : a value cannot be understood.
        """
        assert self.serverapp is not None
        for one in _CONFIGURED:
            if text := getattr(self, one.trait):
                _hand_on(one, text)
        chosen = "default_provisioner_name" in self.serverapp.config.KernelProvisionerFactory
        if not chosen and not os.environ.get(KernelProvisionerFactory.default_provisioner_name_env):
            KernelProvisionerFactory.instance(parent=self.serverapp).default_provisioner_name = PROVISIONER

    def initialize_handlers(self) -> None:
        """Add the API, and have kernels and snapshots follow notebooks (called at the server's start)."""
        server = self.serverapp
        assert server is not None
        assert server.event_logger is not None  # made before any extension is loaded
        events = Events(server.event_logger)
        service = Service(events, server.kernel_manager)
        register(service.look)
        hibernate_instead.hibernate_when_culled(server.kernel_manager)
        if settings.remote():
            hibernate_instead.fetch_from_remote(Store(settings.store_dir()))
        root = Path(server.kernel_manager.root_dir).absolute()
        follow_sessions(server.session_manager, server.kernel_manager, root)
        follow_files(server.event_logger, Store(settings.store_dir()), events, root)
        if settings.resume() == "auto":
            hold_left_kernels(service, server.session_manager, root, server.io_loop)
        self.handlers.extend(handlers(service))
        _stop_at_interrupt(server)

    async def stop_extension(self) -> None:
        """Hibernate kernels where the settings say so (called when the server stops, before it ends them).

        It is called once for each signal: a second one, such as Slurm sends at a time limit, waits for the first, too.
        """
        assert self.serverapp is not None
        if self._hibernating is None:
            hibernate = hibernate_instead.hibernate_before_stop(self.serverapp.kernel_manager)
            self._hibernating = asyncio.create_task(hibernate)
        await asyncio.shield(self._hibernating)


def _stop_at_interrupt(server: ServerApp) -> None:
    """Have a server without a terminal stop at SIGINT, by which JupyterHub's own spawners stop it, as at SIGTERM.

    Jupyter Server leaves SIGINT to Python there, and ends without ending its kernels. Where it has a terminal, its own
    handler is set already.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: server.stop(from_signal=True))


def _hand_on(one: Setting[Any], text: str) -> None:
    before = os.environ.get(one.variable)
    os.environ[one.variable] = text
    try:
        one()
    except Refused as e:
        if before is None:
            del os.environ[one.variable]
        else:
            os.environ[one.variable] = before
        raise Refused(
            f"The setting Gpuckpt.{one.trait} cannot be understood.", e.why, "Correct it in Jupyter's configuration."
        ) from None
