"""A store with many snapshots, made in a moment."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path

from jupyter_gpuckpt.store import Store


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
    for number in range(1, count):
        name = f"many-{number:04}"
        path = root / "snapshots" / f"{name}.json"
        path.write_bytes(dataclasses.replace(first, name=name, id=uuid.uuid4().hex).to_json())
        path.chmod(0o600)
