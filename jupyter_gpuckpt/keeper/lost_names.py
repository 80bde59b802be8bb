"""Files that lost the name by which a kernel uses them, and have another one, which nobody knows.

Package managers that keep their packages by hard links (uv, conda) make them of the libraries that they replace under a
running kernel. A snapshot has their content, as it has that of files without any name.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from ..errors import SaveFailed
from ..freeze import images
from ..subject import said

__all__ = ["keep"]

_DELETED = " (deleted)"  # proc_pid_fd(5)
_OWN = "/dev/shm/"  # noqa: S108 - the kernel's own
"""What lies there is packed with the names that criu makes."""


def keep(images_folder: Path, pids: Collection[int]) -> list[str]:
    """Put the content of such files into the images that were just dumped of these processes.

    Returned is what the user should know of it.

    Raises
    ------
    SaveFailed : one could not be read: a restore of these images would fail.
    """
    lost = images.lost_names(images_folder)
    lost = {id_: file for id_, file in lost.items() if not file.path.startswith(_OWN)}
    if not lost:
        return []
    reached = _reached(pids)
    with contextlib.ExitStack() as stack:
        opened: dict[str, BinaryIO] = {}
        for path in sorted({file.path for file in lost.values()}):
            try:
                (at,) = reached[path].values()
                opened[path] = stack.enter_context(at.open("rb"))
            except (KeyError, ValueError, OSError):  # ValueError: there are several that had this name
                raise SaveFailed(
                    "The {kernel} could not be saved; it keeps running.",
                    f"It uses {path}, which was deleted or replaced, still has other names (hard links), and could "
                    "not be read.",
                    "{Restart} so that it uses the current file, and save again.",
                    path=path,
                ) from None
        images.make_nameless(images_folder, {id_: opened[file.path] for id_, file in lost.items()})
    return [
        said(f"{path} was deleted under that name: a restored {{kernel}} writes to a copy, not to its other names.")
        for path in sorted({file.path for file in lost.values() if images.is_written(file.flags)})
    ]


def _reached(pids: Collection[int]) -> dict[str, dict[tuple[int, int], Path]]:
    """Return how what these processes use of deleted files with other names is reached, by name and inode."""
    found: dict[str, dict[tuple[int, int], Path]] = defaultdict(dict)
    for pid in pids:
        for folder in (Path(f"/proc/{pid}/fd"), Path(f"/proc/{pid}/map_files")):
            with contextlib.suppress(OSError):
                for path in folder.iterdir():
                    with contextlib.suppress(OSError):
                        name, about = os.readlink(path), path.stat()  # noqa: PTH115 - a name, and a note behind it
                        if name.endswith(_DELETED) and about.st_nlink:
                            found[name.removesuffix(_DELETED)][about.st_dev, about.st_ino] = path
    return found
