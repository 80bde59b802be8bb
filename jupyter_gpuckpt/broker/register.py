"""Which sleepers the broker has started, and for whom: kept in files of root's, so that a new broker knows them too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import KernelLost
from ..linux import processes
from .changeable import refuse_changeable_folder

__all__ = ["Register"]


class Register:
    """The broker's folder: ``sleepers`` (0700) has a file for each, named by its pid; `images_at` is a mount point."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.images_at = str(folder / "images")

    def make(self) -> None:
        """Make the folders, and forget sleepers that have ended.

        Raises
        ------
        Unavailable : others than root could replace them, or what is in them.
        OSError : they cannot be made.
        """
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        refuse_changeable_folder(self.folder)
        for path, mode in ((self.folder, 0o755), (self._sleepers, 0o700), (Path(self.images_at), 0o755)):
            path.mkdir(mode=mode, exist_ok=True)
            path.chmod(mode)
        self.pids()

    @property
    def _sleepers(self) -> Path:
        return self.folder / "sleepers"

    def add(self, pid: int, uid: int, in_container: bool = False) -> None:
        """Note a sleeper that was started for a user, of the machine or of a container."""
        # At once: who looks at them meanwhile would forget one of which the note is empty yet.
        written = self.folder / f"new-sleeper-{pid}"
        written.touch(mode=0o600)
        written.write_text(_entry(pid, uid, in_container))
        written.replace(self._sleepers / str(pid))

    def has(self, pid: int, uid: int, in_container: bool = False) -> bool:
        """Tell whether the process that has this pid now is a sleeper that was started for this user.

        Of which container it is, is not said.
        """
        try:
            return (self._sleepers / str(pid)).read_text() == _entry(pid, uid, in_container)
        except OSError:
            return False

    def pids(self) -> list[int]:
        """Return the pids of all sleepers. Those that have ended are forgotten: of a container's, nobody tells."""
        found = []
        for path in self._sleepers.iterdir():
            with contextlib.suppress(OSError):
                if path.read_text().startswith(f"{processes.start_time(int(path.name))} "):
                    found.append(int(path.name))
                else:
                    path.unlink()
        return found

    @contextlib.contextmanager
    def opened(self, pid: int) -> Iterator[int]:
        """Hold the note of a sleeper open, as a descriptor.

        Raises
        ------
        KernelLost : it has ended.
        """
        try:
            descriptor = os.open(self._sleepers / str(pid), os.O_RDONLY)
        except FileNotFoundError:
            raise KernelLost("The kernel's namespace is gone.", "Its process 1 ended.") from None
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def forget(self, pid: int) -> None:
        """Forget a process that has ended, if it was a sleeper."""
        (self._sleepers / str(pid)).unlink(missing_ok=True)


def _entry(pid: int, uid: int, in_container: bool) -> str:
    """Return what tells one process of all that ever have its pid, and its user; nothing equals that of no process."""
    where = " container" if in_container else ""
    return f"{processes.start_time(pid) or os.urandom(8).hex()} {uid}{where}"
