"""The extension of Jupyter Server: our provisioner as its default, and the REST API under ``/api/gpuckpt``.

A file in ``jupyter_server_config.d`` can only switch extensions on; that is why the provisioner is set by one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from jupyter_client.provisioning.factory import KernelProvisionerFactory

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp

PROVISIONER = "gpuckpt-provisioner"


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """Say where the extension is (called by Jupyter Server when it looks for extensions)."""
    return [{"module": "jupyter_gpuckpt.server"}]


def _load_jupyter_server_extension(app: ServerApp) -> None:
    """Set up provisioner and API (called by Jupyter Server at its start).

    Kernels whose specification names no provisioner are started by ours. One that the person chose, by
    configuration or by environment, stays.
    """
    from .routes import add_routes

    chosen = "default_provisioner_name" in app.config.KernelProvisionerFactory
    if not chosen and not os.environ.get(KernelProvisionerFactory.default_provisioner_name_env):
        KernelProvisionerFactory.instance(parent=app).default_provisioner_name = PROVISIONER
    add_routes(app)
