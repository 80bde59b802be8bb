"""Which control groups a process is in, so that a kernel counts to its user, not to the broker (cgroups(7))."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import Refused
from ..linux import proc

__all__ = ["Places", "join", "mounted_at", "of"]

Places = Mapping[str, str]
"""The group of each hierarchy, by its controllers; by nothing that of cgroup v2."""

_ESCAPE = re.compile(r"\\([0-7]{3})")


def of(pid: int | str) -> Places:
    """Return the groups of a process.

    Raises
    ------
    OSError : it has ended.
    """
    lines = proc.lines(f"/proc/{pid}/cgroup")
    return {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines if line)}


def join(places: Places) -> None:
    """Move this process into these groups.

    Raises
    ------
    Refused : it cannot be: what a user's processes may use would not be the limit of this one.
    """
    here = of("self")
    for controllers, path in places.items():
        if here.get(controllers) == path:
            continue
        try:
            (mounted_at(controllers) / path.lstrip("/") / "cgroup.procs").write_text("0")
        except OSError as e:
            raise Refused(
                "No kernel was started.",
                f"It cannot be counted to its user: the control group {controllers}:{path} cannot be joined: {e}",
                "Run the broker where it may move processes between control groups, not in a container of its own.",
            ) from e


def mounted_at(controllers: str) -> Path:
    """Return where a hierarchy is mounted, named by its controllers; by nothing that of cgroup v2.

    Raises
    ------
    FileNotFoundError : it is not.
    """
    for line in proc.lines("/proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" if not controllers else kind == "cgroup" and _has(options, controllers):
            _, _, device, _, point, *_ = before.split()
            place = Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), point))
            if _is_at(place, device):
                return place
    raise FileNotFoundError(2, f"the hierarchy {controllers or 'v2'} is not mounted")


def _is_at(place: Path, device: str) -> bool:
    """Tell whether a mount is what is seen at its place: another may be mounted over it."""
    try:
        found = place.stat().st_dev
    except OSError:
        return False
    return f"{os.major(found)}:{os.minor(found)}" == device


def _has(options: str, controllers: str) -> bool:
    return set(controllers.split(",")) <= set(options.split(","))
