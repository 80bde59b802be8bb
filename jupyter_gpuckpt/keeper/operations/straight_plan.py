"""What of a snapshot's host memory may be written straight into its processes."""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Sequence
from pathlib import Path

from ...freeze import images
from ...freeze.placing import reaches_read_only
from ...freeze.straight_runs import StraightRuns, plan
from ...snapshots.saved import processes_of
from ...store import Contents, Manifest, Store
from .parts import CRIU_IMAGES

__all__ = ["straight_runs"]


def straight_runs(store: Store, manifest: Manifest, contents: Contents) -> Sequence[StraightRuns]:
    """Return these runs of pages, by process; nothing where they are few.

    Raises
    ------
    NoSuchSnapshot, Damaged : it cannot be read.
    """
    tree = f"{CRIU_IMAGES}/pstree.img"
    of_process = {
        pid: (f"{CRIU_IMAGES}/pagemap-{pid}.img", f"{CRIU_IMAGES}/mm-{pid}.img")
        for pid in processes_of(manifest).processes
    }
    wanted = [tree, *(path for both in of_process.values() for path in both)]
    _, _, read = store.read_files(manifest.name, wanted)
    # One that had ended has no memory.
    memory = {pid: (read[pagemap], read[mm]) for pid, (pagemap, mm) in of_process.items() if mm in read}
    chunks = {
        Path(path).name: list(itertools.accumulate(chunk.size for chunk in contents.files[path]))
        for path in contents.files
        if path.startswith(f"{CRIU_IMAGES}/pages-")
    }
    with contextlib.suppress(IndexError, KeyError, ValueError, struct.error):  # as another version of criu wrote it
        return plan(images.parents(read[tree]), memory, chunks, read_only=reaches_read_only())
    return []
