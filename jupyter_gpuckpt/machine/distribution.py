"""Which Linux distribution this is, and how a user installs CRIU on it."""

from __future__ import annotations

import platform
from dataclasses import dataclass

__all__ = ["Distribution", "this_distribution"]

# By the names of os-release(5); the first that is among ID and ID_LIKE counts.
_HOW_TO_INSTALL = {
    "fedora": "dnf install criu",
    "rhel": "dnf install criu",
    "centos": "dnf install criu",
    "arch": "pacman -S criu",
    "suse": "zypper install criu",
    "opensuse": "zypper install criu",
    "alpine": "apk add criu",
}


@dataclass(frozen=True)
class Distribution:
    """What os-release(5) says of this system.

    Attributes
    ----------
    name : as it calls itself, for people.
    ids : its id and those of the distributions it is like, nearest first.
    codenames : the release's code names, its own and its parent distribution's.
    """

    name: str
    ids: tuple[str, ...]
    codenames: frozenset[str]

    def how_to_install_criu(self) -> str:
        """Return what to do here to have CRIU, for a user to read."""
        for name in self.ids:
            if name in _HOW_TO_INSTALL:
                return f"Run `{_HOW_TO_INSTALL[name]}` as root; version 4.1 or newer is needed."
        return "Install CRIU 4.1 or newer so that `criu` is in PATH (see https://criu.org)."


def this_distribution() -> Distribution:
    """Return what this system is; unknown systems have no ids and no code names."""
    try:
        said = platform.freedesktop_os_release()
    except OSError:
        return Distribution("this system", (), frozenset())
    names = ("VERSION_CODENAME", "UBUNTU_CODENAME", "DEBIAN_CODENAME")
    return Distribution(
        said.get("PRETTY_NAME") or said["NAME"],
        (said["ID"], *said.get("ID_LIKE", "").split()),
        frozenset(said[name] for name in names if said.get(name)),
    )
