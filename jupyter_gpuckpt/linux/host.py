"""Which machine this is, or which container of it: several can share the folders of a user's home."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Host"]


@dataclass(frozen=True)
class Host:
    """A machine, and which boot of it: pids and locks mean nothing on another one, nor after the next boot."""

    name: str = ""
    """As its users call it."""
    machine: str = ""
    """What systemd calls it (machine-id(5)); machines that were copied may have the same."""
    boot: str = ""
    """proc(5), random/boot_id."""
    names: int = 0
    """The number of its namespace of names (uts_namespaces(7)): a container's is its own, a kernel's its starter's."""

    @classmethod
    def this(cls) -> Host:
        """Return this one."""
        try:
            machine = Path("/etc/machine-id").read_text().strip()
        except OSError:
            machine = ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(platform.node(), machine, boot, Path("/proc/self/ns/uts").stat().st_ino)

    def is_this(self) -> bool:
        """Tell whether it is this machine, in this boot or an earlier one; one of which nothing is known counts as it.

        A machine may get another name while it runs. Containers on it have the same boot.
        """
        this = Host.this()
        same_boot = self.boot in ("", this.boot) and self.names in (0, this.names)
        return same_boot or (self.name, self.machine) == (this.name, this.machine)
