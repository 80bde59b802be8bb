"""The extension of Jupyter Server: kernels are started by our provisioner unless something else is asked for.

A file in ``jupyter_server_config.d`` can only switch extensions on; that is why this setting is made by one.
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
    """Start kernels whose specification names no provisioner by ours (called by Jupyter Server at its start).

    A provisioner that the person chose, by configuration or by environment, stays.
    """
    chosen = "default_provisioner_name" in app.config.KernelProvisionerFactory
    if not chosen and not os.environ.get(KernelProvisionerFactory.default_provisioner_name_env):
        KernelProvisionerFactory.instance(parent=app).default_provisioner_name = PROVISIONER
