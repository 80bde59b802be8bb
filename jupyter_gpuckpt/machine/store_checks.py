"""Checks of the place that snapshots are kept in."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import psutil

from jupyter_gpuckpt import settings

from ..errors import GpuckptError
from ..store.layout import Layout
from .checks import Check, judge

__all__ = ["store_checks"]

_GIB = 1 << 30
_LITTLE_SPACE = _GIB // 2
_GONE_AT_RESTART = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_ELSEWHERE = "set GPUCKPT_STORE to a folder on a disk with free space"


def store_checks() -> list[Check]:
    """Return the checks of the store's folder, which need not be there yet."""
    store = settings.store_dir().absolute()
    # `Path.exists` would raise on a folder that may not be looked into.
    there = next(p for p in (store, *store.parents) if os.path.exists(p))  # noqa: PTH110
    return [_writable(store, there), _space(there), _filesystem(there)]


def _writable(store: Path, there: Path) -> Check:
    problem = ""
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"!")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = f"{there}: {error.strerror}"
    means = "Snapshots are stored here, and are on disk before a save reports that it is done."
    if not problem:
        try:
            Layout(store).readable()
        except GpuckptError as e:  # as a save would say it
            return judge("store", False, f"{e.what} {e.why}", means, e.then)
    return judge(
        "store",
        not problem,
        problem or (f"{store}" if there == store else f"{store} (will be created)"),
        means,
        f"Make the folder writable, or {_ELSEWHERE}.",
    )


def _space(there: Path) -> Check:
    usage = shutil.disk_usage(there)
    return judge(
        "disk space",
        usage.free >= _LITTLE_SPACE,
        f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free",
        "A snapshot takes at most the memory that the kernel uses, GPU memory included; often far less.",
        f"Free disk space, or {_ELSEWHERE}.",
    )


def _filesystem(there: Path) -> Check:
    kind = _kind_of_filesystem(there)
    return judge(
        "filesystem",
        kind not in _GONE_AT_RESTART,
        kind,
        "Snapshots survive a restart of the machine only on a disk.",
        f"To keep snapshots, {_ELSEWHERE}.",
        required=False,
    )


def _kind_of_filesystem(path: Path) -> str:
    path = path.resolve()
    # Of several mounts over one another the last one is seen.
    kinds = {
        Path(mount.mountpoint): mount.fstype
        for mount in psutil.disk_partitions(all=True)
        if path.is_relative_to(mount.mountpoint)
    }
    return kinds[max(kinds, key=lambda point: len(point.parts))] if kinds else "unknown"
