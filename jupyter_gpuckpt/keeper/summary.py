"""What listings and results say of a snapshot; apart from the operations, so that listings start fast."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .. import __version__
from ..errors import GpuckptError
from ..store import Labels, Manifest, Store

HIBERNATED = "hibernated"
"""The tag of the snapshot of a kernel that is on the disk alone, and how its name begins."""


def listing(store: Store) -> dict[str, Any]:
    """Return all snapshots, newest first, each with its tags and pin, and what is wrong with those that are damaged.

    Raises
    ------
    StoreError : the store cannot be read.
    """
    snapshots, faults = store.listed(summary, __version__)
    labels = {snapshot_id: asdict(one) for snapshot_id, one in store.all_labels().items()}
    nothing = asdict(Labels())
    newest_first = sorted(snapshots, key=lambda said: (said["created"], said["name"]), reverse=True)
    return {
        "snapshots": [{**said, **labels.get(said["id"], nothing)} for said in newest_first],
        "faults": [fault.as_dict() for fault in faults],
    }


def summary(manifest: Manifest) -> dict[str, Any]:
    """Return what listings and results say of a snapshot, as JSON types."""
    return {
        "name": manifest.name,
        "id": manifest.id,
        "message": manifest.message,
        "created": manifest.created,
        "size": manifest.size,
        "stored": manifest.stored,
        "parent": manifest.parent,
        "notebook": manifest.kernel.get("notebook", ""),
        "kernel_id": manifest.kernel.get("kernel_id", ""),
        "job": manifest.kernel.get("job", ""),
        "execution_count": manifest.kernel.get("execution_count"),
        "gpu_memory": gpu_memory(manifest),
        "frozen_seconds": manifest.process.get("frozen_seconds"),
    }


def details(manifest: Manifest) -> dict[str, Any]:
    """Return all there is to say of a snapshot, but for its list of files."""
    return {
        **summary(manifest),
        "kernel": manifest.kernel,
        "machine": manifest.machine,
        "cuda": manifest.cuda,
        "process": manifest.process,
    }


def origins(store: Store, name: str) -> list[dict[str, Any]]:
    """Return the summary of a snapshot and of those that its kernel came from, the newest first.

    It ends where one has been removed.

    Raises
    ------
    BadName, NoSuchSnapshot, Damaged, Incompatible : as `Store.get`.
    StoreError : the store cannot be read.
    """
    known = {manifest.id: manifest for manifest in store.list()}
    found: list[Manifest] = []
    next_one: Manifest | None = store.get(name)
    while next_one is not None and next_one not in found:
        found.append(next_one)
        next_one = known.get(next_one.parent or "")
    return [summary(manifest) for manifest in found]


def gpu_memory(manifest: Manifest) -> int:
    """Return the GPU memory that the saved processes held, in bytes."""
    return held_by(manifest.cuda)


def held_by(described: Mapping[str, Any]) -> int:
    """Return the GPU memory, in bytes, of processes that `cuda.describe` tells of."""
    return sum(held for process in described.get("processes", []) for held in process.get("used", {}).values())


def current_name(store: Store, snapshot: Mapping[str, Any]) -> str:
    """Return what a snapshot (``name`` and ``id``) is called now: somebody may have renamed it.

    Raises
    ------
    NoSuchSnapshot, Damaged, Incompatible : as `Store.get`.
    """
    with contextlib.suppress(GpuckptError):
        if store.get(snapshot["name"]).id == snapshot["id"]:
            return str(snapshot["name"])
    found = next((manifest.name for manifest in store.list() if manifest.id == snapshot["id"]), None)
    return found or store.get(snapshot["name"]).name


def is_of(manifest: Manifest, kernel_id: str, notebook: str) -> bool:
    """Tell whether a snapshot was saved from this kernel, or from its notebook where that is known."""
    kernel = manifest.kernel
    return kernel.get("kernel_id") == kernel_id or bool(notebook and kernel.get("notebook") == notebook)


def is_of_notebook(manifest: Manifest, notebook: str) -> bool:
    """Tell whether a snapshot was saved from a notebook with this path, the end of it, or this name."""
    saved = "/" + str(manifest.kernel.get("notebook", ""))
    return saved.endswith((f"/{notebook}", f"/{notebook}.ipynb"))
