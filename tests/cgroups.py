"""A real cgroup with a limit of memory, of whichever version this machine has."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_VERSION_1, _VERSION_2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@dataclass
class Cgroup:
    """A cgroup that a test made."""

    folder: Path

    @property
    def name(self) -> str:
        return "/" + self.folder.name

    @property
    def limit(self) -> Path:
        """The file with how many bytes its processes may take."""
        version_1 = self.folder / "memory.limit_in_bytes"
        return version_1 if version_1.exists() else self.folder / "memory.max"

    def used(self) -> int:
        """Return how many bytes its processes have."""
        version_1 = self.folder / "memory.usage_in_bytes"
        return int((version_1 if version_1.exists() else self.folder / "memory.current").read_text())

    def join(self, pid: int | None = None) -> None:
        """Take this process, or another, and what it will start, into it."""
        (self.folder / "cgroup.procs").write_text(str(pid or os.getpid()))

    def kill(self) -> None:
        """Kill all processes in it: a test has failed, and ends none of what it has started."""
        for pid in (self.folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def killed(self) -> int:
        """Return how many processes were killed in it for lack of memory."""
        for file in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(FileNotFoundError):
                lines = dict(line.split() for line in (self.folder / file).read_text().splitlines())
                return int(lines.get("oom_kill", 0))
        return 0


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Cgroup]:
    """Make a cgroup whose processes may take `limit` bytes; skip the test where this machine lets none be made."""
    version_1 = (_VERSION_1 / "memory.limit_in_bytes").exists()
    folder = (_VERSION_1 if version_1 else _VERSION_2) / f"gpuckpt-test-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
        Cgroup(folder).limit.write_text(str(limit))
    except OSError as e:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no cgroup with a limit of memory can be made here: {e}")
    group = Cgroup(folder)
    try:
        yield group
    except BaseException:
        group.kill()
        raise
    finally:
        deadline = time.monotonic() + 20
        while True:
            try:
                folder.rmdir()
                break
            except OSError:  # its last processes are ending
                assert time.monotonic() < deadline, f"processes are left in {folder}"
                time.sleep(0.05)
