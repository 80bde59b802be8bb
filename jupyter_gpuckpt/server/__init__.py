"""The extension of Jupyter Server: our provisioner as its default, and the REST API under ``/api/gpuckpt``.

A file in ``jupyter_server_config.d`` can only switch extensions on; that is why the provisioner is set by one.
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """Say where the extension is (called by Jupyter Server when it looks for extensions)."""
    from .app import Gpuckpt

    return [{"module": __name__, "app": Gpuckpt}]
