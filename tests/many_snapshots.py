"""A store with many snapshots, made in a moment."""

from __future__ import annotations

import dataclasses
import datetime
import uuid
from pathlib import Path

from jupyter_gpuckpt.store import Manifest, Store


def store_of(root: Path, count: int) -> None:
    """Make a store of so many snapshots of one notebook; only the first has any data, which no listing looks at."""
    with Store(root).writer("many-0000") as writer:
        (writer.directory / "pages").write_bytes(b"x")
        first = writer.commit(
            message="one of many",
            parent=None,
            kernel={"notebook": "/home/me/many.ipynb", "kernel_id": "k", "execution_count": 3},
            machine={},
            cuda={},
            process={"frozen_seconds": 0.1},
        )
    history_after(root, first, count - 1)


def history_after(root: Path, first: Manifest, count: int) -> None:
    """Have the store say that the kernel of a snapshot was saved so many times since, each a moment after the other."""
    created, parent = datetime.datetime.fromisoformat(first.created), first.id
    for number in range(1, count + 1):
        name = f"many-{number:04}"
        moment = (created + datetime.timedelta(microseconds=number)).isoformat(timespec="microseconds")
        one = dataclasses.replace(first, name=name, id=uuid.uuid4().hex, created=moment, parent=parent)
        parent = one.id
        path = root / "snapshots" / f"{name}.json"
        path.write_bytes(one.to_json())
        path.chmod(0o600)
