"""Which machine this is: several can share the folders of a user's home."""

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

    @classmethod
    def this(cls) -> Host:
        """Return this one."""
        try:
            machine = Path("/etc/machine-id").read_text().strip()
        except OSError:
            machine = ""
        return cls(platform.node(), machine, Path("/proc/sys/kernel/random/boot_id").read_text().strip())

    def is_this(self) -> bool:
        """Tell whether it is this machine, in this boot or an earlier one; one of which nothing is known counts as it.

        A machine may get another name while it runs.
        """
        this = Host.this()
        return self.boot in ("", this.boot) or (self.name, self.machine) == (this.name, this.machine)
