"""A program of this package in a process of its own: told lines, answering with lines, and killable."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping

from ..linux.readiness import readable

__all__ = ["LineProgram"]

_LOOK_AGAIN = 0.002
_DEATH_TIMEOUT = 5.0
"""Seconds to wait for a killed program; one that sits in the kernel's driver is left to itself."""


class LineProgram:
    """``python -m MODULE ARGUMENTS`` as a child process, in a session of its own, with the descriptors `fds`.

    Neither `tell` nor `hear` may be called from two threads at once; `kill` may be called from any.
    """

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None, fds: Collection[int] = ()
    ) -> None:
        self._heard = b""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - close closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            pass_fds=tuple(fds),
            start_new_session=True,  # neither a terminal's Ctrl-C nor the kernel's group reaches it
        )

    @property
    def pid(self) -> int | None:
        """The process id; None when it has ended."""
        return None if self._process.poll() is not None else self._process.pid

    def tell(self, line: bytes) -> None:
        """Send a line of a few hundred bytes, which fits a pipe; one that has ended does not hear it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def hear(self, limit: float) -> bytes:
        """Return the next line, or nothing when the program has ended.

        Raises
        ------
        TimeoutError : no line came within `limit` seconds.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._heard:
            left = deadline - time.monotonic()
            if left <= 0 or not readable(pipe, seconds=left):
                raise TimeoutError
            read = os.read(pipe, 65536)
            if not read:
                return b""
            self._heard += read
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def wait(self, limit: float) -> None:
        """Wait until it has ended.

        Raises
        ------
        TimeoutError : it has not within `limit` seconds.
        """
        if not self._has_ended(limit):
            raise TimeoutError

    def kill(self) -> None:
        """Kill it and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        deadline = time.monotonic() + _DEATH_TIMEOUT
        self._has_ended(_DEATH_TIMEOUT)
        # What it had started is a child of this process now, if that adopts such (PR_SET_CHILD_SUBREAPER).
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(-self._process.pid, os.WNOHANG) == (0, 0):
                    time.sleep(_LOOK_AGAIN)

    def _has_ended(self, limit: float) -> bool:
        """Tell whether it ends within so many seconds; `subprocess` would look for that only every now and then."""
        with contextlib.suppress(ProcessLookupError):  # another thread has just seen it end
            if self._process.poll() is None:
                end = os.pidfd_open(self._process.pid)
                try:
                    readable(end, seconds=limit)
                finally:
                    os.close(end)
        return self._process.poll() is not None

    def close(self) -> None:
        """Close its pipes: it hears the end of its input."""
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def last_words(self) -> str:
        """Return the last line that it wrote on its standard error."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "no error output")
