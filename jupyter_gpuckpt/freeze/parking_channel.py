"""How the keeper talks to the library in a process that parks its GPU memory (`kernel/driver/channel.c`).

In every process with a CUDA context the library has a thread, which waits for a signal of its own. When it comes, the
two talk line by line through two FIFOs in the run folder, which are named by the process's pid. No program's own signal
handler sees the signal: it goes to that thread alone, which is known to block it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from ..linux import proc
from ..linux.processes import inner_pid, open_files
from ..linux.readiness import readable

__all__ = [
    "CHANGED",
    "STILL_AT_WORK",
    "THREAD",
    "ParkingChannel",
    "Places",
    "Sharing",
    "bring_gpus_together",
    "bring_imports_back",
    "keep_gpus_apart",
    "make_fifos",
    "parkable",
    "path_of",
    "peer_access_asked_for",
    "put_imports_away",
    "refuse",
    "run_on",
    "sharing",
    "waits",
    "watch_gate",
]

CHANGED = "changed"
"""What of the FIFOs (`path_of`) tells who has a process's memory open that it has other memory by now."""
THREAD = "gpuckpt-parking"
"""The name of that thread."""
_SIGNAL = 62
_HERE = 5.0  # how long the thread may take to answer the signal, in seconds
_SHARES = 60.0  # how long it may take over others' memory, for which it asks them, in seconds
_SWITCHES = 30.0  # how long it may take to switch access to memory, in seconds
STILL_AT_WORK = -2
"""What is returned in place of a CUresult where GPUs did not come to an end of what they were given."""

Places = list[tuple[str, int]]
"""The UUIDs of the GPUs that a process sees, in its order, with bytes on each."""

_PLACE = re.compile(rb"([0-9a-f]{32})=([0-9]{1,18})")
_MOST = 4096
"""Bytes of a line at most: what says more is no library of ours."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Sharing:
    """What of other processes' GPU memory a process has open (`kernel/driver/sharing.c`).

    Attributes
    ----------
    imports : how many blocks, by handles of the library's.
    by_driver : whether it may have shared memory by the driver's own handles.
    owners : whose the blocks are, by pids in their own namespace; empty where that is not known.
    """

    imports: int = 0
    by_driver: bool = True
    owners: tuple[int, ...] = ()


class ParkingChannel:
    """The FIFOs of one process, by its pid in its own namespace."""

    def __init__(self, run_dir: Path, pid: int) -> None:
        self._heard = b""
        self._is_over = False
        self._to, self._from = (
            os.open(name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW) for name in make_fifos(run_dir, pid)
        )
        self._forget(self._from)

    def call(self, pid: int, limit: float = _HERE) -> Places | None:
        """Begin to talk to a process (`pid` on this machine); return what it can park; None without an answer."""
        self._forget(self._to, self._from)
        thread = _thread(pid)
        if thread is None or _libc.tgkill(pid, thread, _SIGNAL) != 0:
            return None
        words = self.hear(limit, b"here").split()
        found = [_PLACE.fullmatch(word) for word in words[1:]]
        if not words or None in found:
            return None
        return [(f"GPU-{UUID(one[1].decode())}", int(one[2])) for one in found if one is not None]

    def _forget(self, *fifos: int) -> None:
        """Leave out what is left of an earlier talk: one that was broken off, or that the process ended first."""
        self._heard, self._is_over = b"", False
        for fifo in fifos:
            with contextlib.suppress(BlockingIOError):
                os.read(fifo, 65536)

    def say(self, line: str) -> None:
        """Say a line."""
        os.write(self._to, os.fsencode(line) + b"\n")

    def hear(self, limit: float, first: bytes = b"") -> bytes:
        """Return the next line, or the next that begins with this word; nothing where none comes in so many seconds."""
        deadline = time.monotonic() + limit
        while True:
            while b"\n" not in self._heard:
                left = deadline - time.monotonic()
                if left <= 0 or len(self._heard) > _MOST or not readable(self._from, seconds=left):
                    return b""
                self._heard += os.read(self._from, 65536)
            line, _, self._heard = self._heard.partition(b"\n")
            self._is_over |= line.startswith(b"not ")
            if not first or line.split()[:1] == [first]:
                return line

    def end(self) -> None:
        """End a talk, unless the process has: one that was restored may be older, and not know all that is asked."""
        if not self._is_over:
            self.say("no")
            self.hear(_HERE, b"not")

    def sharing(self) -> Sharing:
        """Return what of others' GPU memory the process has open."""
        self.say("imports")
        words = self.hear(_HERE, b"imports").split()[1:]
        if not words or not all(word.isdigit() for word in words):
            return Sharing()
        imports, *more = map(int, words)
        return Sharing(imports, not more or more[0] > 0, tuple(more[1:]))

    def put_imports_away(self) -> bool:
        """Have the process close others' memory, and keep its addresses; tell whether it did."""
        return self._did(b"away")

    def bring_imports_back(self) -> bool:
        """Have the process open again what it has put away; tell whether it did."""
        return self._did(b"back")

    def peer_access_asked_for(self) -> bool | None:
        """Tell whether the process has asked for its GPUs' access to each other's memory; None where it cannot say."""
        self.say("peers")
        words = self.hear(_HERE).split()
        return words[1] == b"1" if words[:1] == [b"peers"] and len(words) > 1 else None

    def wait_for_gpus(self, limit: float) -> int:
        """Wait until the GPUs have done what the process gave them, for so many seconds; return 0 or a CUresult.

        `STILL_AT_WORK` where they have not.
        """
        self.say(f"wait {round(limit * 1000)}")
        return self._said(limit + _HERE, b"waited")

    def keep_gpus_apart(self, limit: float) -> int:
        """Have the process take that access away, while its calls wait at the gate; return as `wait_for_gpus` does."""
        if result := self.wait_for_gpus(limit):
            return result
        self.say("apart")
        return self._said(_SWITCHES, b"apart")

    def bring_gpus_together(self) -> None:
        """Have the process give back what it has taken away."""
        self.say("together")
        self.hear(_SWITCHES, b"together")

    def _said(self, limit: float, what: bytes) -> int:
        words = self.hear(limit, what).split()[1:]
        return int(words[0]) if words and words[0].lstrip(b"-").isdigit() else STILL_AT_WORK

    def _did(self, what: bytes) -> bool:
        self.say(what.decode())
        return self.hear(_SHARES, what) == what + b" 0"

    def close(self) -> None:
        """Close the FIFOs."""
        os.close(self._to)
        os.close(self._from)


def parkable(run_dir: Path, pid: int) -> Places:
    """Return what a process (`pid` on this machine) could park now; nothing for one without the library."""
    with _talk(run_dir, pid) as (_, places):
        return places or []


def sharing(run_dir: Path, pid: int) -> Sharing:
    """Return what of others' GPU memory a process (`pid` on this machine) has open."""
    with _talk(run_dir, pid) as (channel, places):
        return channel.sharing() if channel is not None and places is not None else Sharing()


def put_imports_away(run_dir: Path, pid: int) -> bool:
    """Have a process (`pid` on this machine) close others' memory, as `ParkingChannel.put_imports_away`."""
    with _talk(run_dir, pid) as (channel, places):
        return channel is not None and places is not None and channel.put_imports_away()


def bring_imports_back(run_dir: Path, pid: int) -> bool:
    """Have a process (`pid` on this machine) open it again; a process without the library has put nothing away."""
    with _talk(run_dir, pid) as (channel, places):
        return channel is None or (places is not None and channel.bring_imports_back())


def peer_access_asked_for(run_dir: Path, pid: int) -> bool | None:
    """Tell whether a process (`pid` on this machine) has asked for its GPUs' access to each other's memory.

    By the driver's own peer access. None where it has no library that could `keep_gpus_apart`.
    """
    with _talk(run_dir, pid) as (channel, places):
        return channel.peer_access_asked_for() if channel is not None and places is not None else None


def keep_gpus_apart(run_dir: Path, pid: int, limit: float) -> int:
    """Have a process (`pid` on this machine) that is not parked take its GPUs' access to each other's memory away.

    While its calls wait at the gate, and when its GPUs have nothing to do, for which it waits `limit` seconds. Returns
    0; a CUresult or `STILL_AT_WORK` where it did not: they have it as before.
    """
    with _talk(run_dir, pid) as (channel, places):
        return channel.keep_gpus_apart(limit) if channel is not None and places is not None else STILL_AT_WORK


def bring_gpus_together(run_dir: Path, pid: int) -> None:
    """Have a process (`pid` on this machine) give back what it has taken away by `keep_gpus_apart`, if anything."""
    with _talk(run_dir, pid) as (channel, places):
        if channel is not None and places is not None and len(places) > 1:
            channel.bring_gpus_together()


def watch_gate(run_dir: Path, pid: int) -> None:
    """Have a process's CUDA calls look at the gate, until it has been shut and opened again.

    Also until it is not shut for seconds. The calls of a process without the library do not.
    """
    with _talk(run_dir, pid) as (channel, places):
        if channel is not None and places is not None:
            channel.say("watch")
            channel.hear(_HERE, b"watching")


@contextlib.contextmanager
def _talk(run_dir: Path, pid: int) -> Iterator[tuple[ParkingChannel | None, Places | None]]:
    """Give the channel to a process that has the library, and what it can park."""
    if _thread(pid) is None:
        yield None, None
        return
    channel = ParkingChannel(run_dir, inner_pid(pid))
    try:
        places = channel.call(pid)
        yield channel, places
        if places is not None:
            channel.end()
    finally:
        channel.close()


def make_fifos(run_dir: Path, pid: int) -> tuple[Path, Path]:
    """Make what a process is talked to through, which a restored one has open; return the paths."""
    to, back = path_of(run_dir, pid, "to"), path_of(run_dir, pid, "from")
    for name in (to, back, path_of(run_dir, pid, CHANGED)):
        with contextlib.suppress(FileExistsError):
            os.mkfifo(name, 0o600)
    return to, back


def path_of(run_dir: Path, pid: int, what: str) -> Path:
    """Return the path of what is in the run folder for the parking of a process, by its pid in its own namespace."""
    return run_dir / f"parking-{pid}-{what}"


def waits(pid: int) -> bool:
    """Tell whether a process is talking, or waits for its parked memory: it has the FIFOs open."""
    end = f"/parking-{inner_pid(pid)}-to"
    return any(path.endswith(end) for path in open_files(pid))


def refuse(run_dir: Path, pid: int) -> None:
    """Let a process (by its pid in its own namespace) go on that has come to park, should it have; it does not."""
    _tell(run_dir, pid, b"no\n")


def run_on(run_dir: Path, pid: int) -> None:
    """Let the Python of a process run on whose memory is parked, should it be: once the process is checkpointed."""
    _tell(run_dir, pid, b"sleep\n")


def _tell(run_dir: Path, pid: int, line: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads
        fifo = os.open(make_fifos(run_dir, pid)[0], os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(fifo, line)
        finally:
            os.close(fifo)


def _thread(pid: int) -> int | None:
    """Return the library's thread of a process; None where there is none that the signal could be sent to."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                if proc.read(task / "comm").rstrip("\n") == THREAD and _blocks(task):
                    return int(task.name)
    return None


def _blocks(task: Path) -> bool:
    """Tell whether a thread blocks all signals, but perhaps the one it waits for: another would end its process.

    One that has only just been made blocks the C library's own, too.
    """
    line = next((line for line in proc.lines(task / "status") if line.startswith("SigBlk:")), "SigBlk: 0")
    return (int(line.split()[1], 16) | 1 << _SIGNAL - 1) & _ALL == _ALL


_ALL = (1 << 64) - 1 & ~sum(1 << number - 1 for number in (signal.SIGKILL, signal.SIGSTOP, 32, 33))
"""All signals that a thread can block: two are the C library's own."""
