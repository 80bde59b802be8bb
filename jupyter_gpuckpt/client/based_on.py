"""Which snapshots the kernels and jobs that run are based on: those that they last came from or went to."""

from __future__ import annotations

import contextlib
from collections import defaultdict

from .record import KernelFolder

__all__ = ["based"]


def based() -> dict[str, list[str]]:
    """Return by a snapshot's id what to call the kernels and jobs that are based on it."""
    found: dict[str, list[str]] = defaultdict(list)
    for folder in KernelFolder.all():
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            launch, state = folder.launch(), folder.state()
            if state.parent is not None and folder.has_keeper():
                notebook = launch.notebook.rpartition("/")[2]
                job = f"job {launch.job}" if launch.job else ""
                found[state.parent.id].append(job or notebook or f"kernel {launch.kernel_id[:8]}")
    return dict(found)
