"""A store with many snapshots, made in a moment."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path

from jupyter_gpuckpt.store import Manifest, StoredFile


def store_of(root: Path, count: int) -> None:
    """Make a store of so many small snapshots of one notebook, as far as listings look."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    (root / "format.json").write_text('{"features":[],"format":1}\n')
    for folder in ("snapshots", "data", "locks"):
        (root / folder).mkdir(mode=0o700, exist_ok=True)
    one = Manifest(
        name="x",
        id="0" * 32,
        message="one of many",
        created="",
        parent=None,
        files={"pages": StoredFile(40_000_000, "0" * 64)},
        size=40_000_000,
        kernel={"notebook": "/home/me/many.ipynb", "kernel_id": "k", "execution_count": 3},
        machine={},
        cuda={},
        process={"frozen_seconds": 0.1},
    )
    for number in range(count):
        name = f"many-{number:04}"
        created = f"2026-01-01T{number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}.000000+00:00"
        manifest = dataclasses.replace(one, name=name, id=uuid.uuid4().hex, created=created)
        path = root / "snapshots" / f"{name}.json"
        path.write_bytes(manifest.to_json())
        path.chmod(0o600)
