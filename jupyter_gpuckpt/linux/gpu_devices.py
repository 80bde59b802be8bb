"""The files of NVIDIA devices that a process has open, and where it has them mapped."""

from __future__ import annotations

import os
from collections.abc import Iterator

from . import proc

__all__ = ["device_files", "device_mappings"]

_DEVICES = "/dev/nvidia"


def device_files(pid: int | str = "self") -> list[int]:
    """Return the descriptors of the NVIDIA device files that a process has open; none when it is gone.

    libcuda and NVML keep ``/dev/nvidiactl`` open while they have anything mapped: a process without device files has
    no mappings of them either, and those cost ten times as much to read.

    Raises
    ------
    PermissionError : the process is not this user's.
    """
    files: list[int] = []
    try:
        names = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - a third of the time, at every fork
    except FileNotFoundError:
        return files
    for name in names:
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith(_DEVICES):  # noqa: PTH115
                files.append(int(name))
        except FileNotFoundError:  # closed by now, as the listing's own descriptor is
            continue
    return files


def device_mappings(pid: int | str = "self") -> Iterator[tuple[int, int]]:
    """Yield where a process has such a file mapped: the first address, and the first one after it."""
    for line in proc.lines(f"/proc/{pid}/maps"):
        columns = line.split(maxsplit=5)
        if len(columns) == 6 and columns[5].startswith(_DEVICES):
            start, _, end = columns[0].partition("-")
            yield int(start, 16), int(end, 16)
