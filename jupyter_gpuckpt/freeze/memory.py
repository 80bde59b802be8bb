"""How much more host memory a process may take before the system or its cgroup runs out."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available"]

_CGROUPS = Path("/sys/fs/cgroup")


def available(pid: int) -> int:
    """Return how many bytes the process can still take: of the system's, and of its cgroup's limit.

    The system's figure is ``MemAvailable``; a cgroup's is ``memory.max`` less what is in use and
    cannot be reclaimed (cgroup v2, every level up to the root; Linux `cgroup-v2.rst`).
    """
    return min([_system(), *(_room(group) for group in _groups(pid))])


def _system() -> int:
    return _field(Path("/proc/meminfo"), "MemAvailable:") * 1024


def _groups(pid: int) -> list[Path]:
    """Return the folders of the process's cgroup and of all above it that set a memory limit."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    own = _CGROUPS / path.lstrip("/")
    chain = [own, *own.parents]
    inside = chain[: chain.index(_CGROUPS) + 1] if _CGROUPS in chain else []
    return [group for group in inside if _limited(group)]


def _limited(group: Path) -> bool:
    limit = group / "memory.max"
    return limit.is_file() and limit.read_text().strip() != "max"


def _room(group: Path) -> int:
    limit = int((group / "memory.max").read_text())
    used = int((group / "memory.current").read_text())
    return max(limit - used + _field(group / "memory.stat", "inactive_file"), 0)


def _field(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        first, *rest = line.split()
        if first == name:
            return int(rest[0])
    return 0
