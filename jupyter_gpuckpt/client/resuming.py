"""Which hibernated kernel a notebook is opened with again, and a keeper that brings it up in place of a fresh one."""

from __future__ import annotations

import subprocess

from .. import settings
from ..operations.requests import Restore
from ..store import Manifest, Store
from . import keepers
from .listing import hibernated
from .record import KernelFolder, Launch

__all__ = ["find", "resume"]


def find(launch: Launch) -> Manifest | None:
    """Return the newest snapshot of a hibernated kernel that the notebook of a kernel about to start had.

    None where there is none, or where it is another machine's now; or where it is one of another kernelspec.

    Raises
    ------
    StoreError : the store cannot be read.
    """
    if not launch.notebook or not launch.agent:
        return None
    store = Store(settings.store_dir())
    for found in hibernated(store):
        if (found.notebook, found.kernel_name) == (launch.notebook, launch.name):
            return None if found.held else store.get(found.name)
    return None


def resume(launch: Launch, manifest: Manifest) -> tuple[subprocess.Popen[bytes], KernelFolder]:
    """Start a keeper that brings a hibernated kernel up from its snapshot, which is removed then.

    Raises
    ------
    GpuckptError : it could not be brought up; nothing is left behind, and the snapshot is as it was.
    """
    return keepers.start_keeper(launch, Restore(key=manifest.name, resume=True), "resume")
