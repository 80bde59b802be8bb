"""Checks of where the store and the folders of running kernels lie, as engines that start servers elsewhere need it."""

from __future__ import annotations

import os
from pathlib import Path

from jupyter_core.paths import jupyter_runtime_dir

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.errors import GpuckptError
from jupyter_gpuckpt.linux.file_systems import LAYERS, MOUNTS, filesystem, is_network, mounted_from, nearest
from jupyter_gpuckpt.store.reach import locks_reach

from .checks import Check, judge

__all__ = ["hibernation_check", "locks_check", "run_folder_check", "shared_store_check", "volume_check"]

_EMPTY_DIR = "/volumes/kubernetes.io~empty-dir/"


def shared_store_check() -> Check:
    """Return whether another machine would find the snapshots."""
    store, kind = settings.store_dir(), filesystem(nearest(settings.store_dir()))[0]
    return judge(
        "shared store",
        is_network(kind),
        f"{store}, on {kind or 'a file system of this machine'}",
        "What is hibernated on one machine goes on on another one only if both have the store.",
        "Set GPUCKPT_STORE to a folder in a file system that all machines mount, for all of them.",
        required=False,
    )


def locks_check() -> list[Check]:
    """Return whether machines that share the store see each other's locks on it; nothing for a disk."""
    folder = nearest(settings.store_dir())
    kind, _ = filesystem(folder)
    if not is_network(kind):
        return []
    return [
        judge(
            "store's locks",
            locks_reach(folder),
            f"{'seen by all machines' if locks_reach(folder) else 'not seen by other machines'} ({kind})",
            "Without them, nothing is deleted that a machine was at work on, and a kernel stays with a machine, until "
            "its file in the store's `locks` or `leases` is gone: also after that machine has died.",
            "Mount it so that locks reach the server: NFS as version 4, or 3 without `nolock` and `local_lock`; Lustre "
            "with `flock`.",
            required=False,
        )
    ]


def run_folder_check() -> Check:
    """Return whether the folders of running kernels and jobs are this machine's alone."""
    try:
        folder = settings.kernels_dir()
    except GpuckptError as e:  # others can write in it
        return judge("run folder", False, e.why, e.what, e.then)
    kind, _ = filesystem(nearest(folder))
    instead = "" if folder.is_relative_to(runtime := jupyter_runtime_dir()) else f", in place of {runtime}"
    return judge(
        "run folder",
        not is_network(kind),
        f"{folder}, on {kind or 'a file system of this machine'}{instead}",
        "Sockets and FIFOs of running kernels are there. Machines that share it leave each other's alone.",
        "Set JUPYTER_RUNTIME_DIR to a folder of the machine that stays for as long as kernels run, "
        f"such as /var/tmp/jupyter-{os.getuid()}. What is in $XDG_RUNTIME_DIR is removed when you log out.",
        required=False,
    )


def volume_check(mounts: Path = MOUNTS) -> Check:
    """Return whether the snapshots outlive the container."""
    folder = nearest(settings.store_dir())
    kind, _ = filesystem(folder, mounts)
    if kind in LAYERS:
        where, kept = "in the container's own layer", False
    elif _EMPTY_DIR in mounted_from(folder, mounts):
        where, kept = "in a volume that ends with its pod (emptyDir)", False
    else:
        where, kept = f"on {kind or 'a file system of its own'}", True
    return judge(
        "store's volume",
        kept,
        f"{settings.store_dir()}, {where}",
        "Snapshots that lie in the container are gone with it.",
        "Mount a volume that outlives it (`--volume`, a PersistentVolumeClaim), and set GPUCKPT_STORE and "
        "GPUCKPT_KEYS to folders there.",
        required=False,
    )


def hibernation_check() -> Check:
    """Return whether a Jupyter server that is stopped hibernates its kernels."""
    try:
        on, deadline = settings.hibernate_on(), settings.hibernate_deadline()
    except GpuckptError as e:  # a value that cannot be understood
        return judge("stop", False, e.why, e.what, e.then, required=False)
    limit = "" if deadline is None else f", for up to {deadline:g} s"
    return judge(
        "stop",
        "stop" in on,
        f"hibernates kernels{limit}" if "stop" in on else "ends kernels",
        "When the engine stops a Jupyter server, its kernels are lost unless they are hibernated.",
        "Set GPUCKPT_HIBERNATE_ON=cull,stop where the server is started.",
        required=False,
    )
