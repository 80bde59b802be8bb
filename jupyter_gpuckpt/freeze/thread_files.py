"""Files of /proc about one thread (``/proc/PID/task/TID``), which our library in criu opens at a restore's end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from . import images

__all__ = ["asked_for"]


def asked_for(folder: Path) -> Mapping[str, str]:
    """Return what criu's environment has to have for that, in a restore of the images in a folder.

    They have to be as they were saved: `images.rewrite_files` puts files that criu finds in the place of these.
    """
    files = (f"{one.pid}:{one.fd}:{one.flags}:{one.path} " for one in images.thread_files(folder))
    return {"GPUCKPT_RESTORE_THREAD_FILES": "".join(files)}
