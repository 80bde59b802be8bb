"""A Jupyter server with the extension; with ``--help-all``, all that can be configured of it."""

from __future__ import annotations

from ..provisioner import GpuckptProvisioner
from .app import Gpuckpt

Gpuckpt.classes = [*Gpuckpt.classes, GpuckptProvisioner]
Gpuckpt.launch_instance()  # type: ignore[no-untyped-call]
