"""Twins: children that saved processes were made to fork while paused, and that have their memory of that instant.

They are made by our library in criu (`criu_memory.c`), which writes down what is to be copied of each. `memory_copy`
copies it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from . import shared_memory

__all__ = ["MappingsChanged", "Noted", "Twin", "Void", "asked_for", "dump_is_over", "end"]

_NOTED, _KEPT = "twin-{}.regions", "kept-{}.regions"
_BYTES, _GIVEN, _PAUSED = ".bytes", ".given", ".paused"
_SAVED = "saved"  # there when nothing else is missing
_NUMBER = 8  # bytes
_ENTRY = struct.Struct("<QQQ")  # first address, end, and whether the bytes are in a file
_PATIENCE = 30.0  # for how long a killed twin may take to give up its memory, in seconds
_FIRST_TO_GO = "1000"  # of oom_score_adj (proc_pid_oom_score_adj(5))


class Void(OSError):
    """A dump that left out memory which nobody has: its images are of no use."""

    def __init__(self, why: str, number: int | None = None) -> None:
        super().__init__(why)
        self.errno = number


class MappingsChanged(Void):
    """The list of mappings that was read before the pause was not right any more in it."""


def asked_for(first: int, folder: str, *, reads_ahead: bool) -> Mapping[str, str]:
    """Return what criu's environment has to have, so that it leaves the memory of a tree to `memory_copy.copy`.

    `first` is the tree's first process. What is to be copied is written into `folder`, as criu's namespace names it.
    Where the system cannot do this, criu copies all memory, as it does without. With `reads_ahead`, the list of the
    first process's mappings is read before it is paused.
    """
    ahead = {"GPUCKPT_DUMP_MAPPINGS_AHEAD": "1"} if reads_ahead else {}
    return {"GPUCKPT_DUMP_TWINS": str(first), "GPUCKPT_DUMP_TWINS_FOLDER": folder, **ahead}


class Noted:
    """What is written down of a process and its twin.

    Attributes
    ----------
    process : its pid in the namespace.
    """

    def __init__(self, folder: Path, process: int, *, kept: bool = False) -> None:
        self._folder, self.process = folder, process
        self._path = self._named(_KEPT if kept else _NOTED)

    @classmethod
    def all_in(cls, folder: Path, *, kept: bool = False) -> list[Noted]:
        """Return those of the last dump, or of the twins that are kept of one before."""
        pattern = _KEPT if kept else _NOTED
        before, after = pattern.split("{}")
        names = sorted(path.name for path in folder.glob(pattern.format("*")))
        return [cls(folder, int(name.removeprefix(before).removesuffix(after)), kept=kept) for name in names]

    @property
    def bytes_beside(self) -> Path:
        """The file with the pages that the twin does not have."""
        return self._beside(_BYTES)

    def read(self) -> tuple[int, list[tuple[int, int, int]]]:
        """Return the twin's pid in the namespace, 0 for none, and the areas to be copied.

        Of each area first address, end, and whether its pages are in `bytes_beside`, in this order.

        Raises
        ------
        Void : nothing is known of the process.
        """
        raw = self._path.read_bytes()
        if not raw:
            raise Void("its memory could not be copied while it was paused")
        return int.from_bytes(raw[:_NUMBER], "little"), list(_ENTRY.iter_unpack(raw[_NUMBER:]))

    def check_mappings(self, twin: int | None) -> None:
        """See that criu was given the right list of mappings; `twin` is the twin's pid as this process knows it.

        Raises
        ------
        MappingsChanged : it was not.
        Void : nobody knows: the twin has ended.
        """
        given = self._beside(_GIVEN)
        if not given.exists():
            return  # criu has read it itself
        paused = self._beside(_PAUSED)
        right = paused if twin is None else Path(f"/proc/{twin}/smaps")
        try:
            flags = _flags(right.read_bytes())
        except OSError:
            flags = []
        if not flags:
            raise Void("the process that had its memory is gone")
        if _flags(given.read_bytes()) != flags:
            raise MappingsChanged("It changed how it uses its memory (madvise) at the moment in which it was paused.")
        for path in (given, paused):
            path.unlink(missing_ok=True)

    def keep(self) -> None:
        """Write down that the twin is kept until the next save."""
        self._path = self._path.rename(self._named(_KEPT))

    def forget(self) -> None:
        """Remove what is written down: the twin has ended."""
        if self._path == self._named(_NOTED):
            for suffix in (_BYTES, _GIVEN, _PAUSED):
                self._beside(suffix).unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)

    def _beside(self, suffix: str) -> Path:
        return self._named(_NOTED).with_suffix(suffix)

    def _named(self, pattern: str) -> Path:
        return self._folder / pattern.format(self.process)


def _flags(smaps: bytes) -> list[tuple[bytes, frozenset[bytes]]]:
    """Return the mappings of a list (proc_pid_smaps(5)), each with its flags, but whether it was written to."""
    found: list[tuple[bytes, frozenset[bytes]]] = []
    mapping = b""
    for line in smaps.splitlines():
        if line.startswith(b"VmFlags:"):
            found.append((mapping, frozenset(line.split()[1:]) - {b"sd"}))
        elif not line[:1].isupper():
            mapping = line
    return found


def end(folder: Path, outer: Callable[[int], int | None], *, kept: bool = False) -> None:
    """End the twins that a dump made, if there are any, and with `kept` those that are kept of one before."""
    for noted in [*Noted.all_in(folder), *(Noted.all_in(folder, kept=True) if kept else ())]:
        with contextlib.suppress(OSError):  # it is gone, or none was made
            if (pid := outer(noted.read()[0])) is not None:
                Twin(pid).kill()
        noted.forget()
    shared_memory.forget(folder)
    dump_is_over(folder)


def dump_is_over(folder: Path) -> None:
    """Have the next dump begin as this one did."""
    (folder / _SAVED).unlink(missing_ok=True)


class Twin:
    """A twin, and its memory, which are the same until it is killed.

    Attributes
    ----------
    memory, pagemap : descriptors of its files in /proc.
    """

    def __init__(self, pid: int) -> None:
        """Open it; `pid` is as this process knows it. Raises `OSError` where it is gone."""
        self.pid = pid
        with contextlib.ExitStack() as undoing:
            self._held = os.pidfd_open(pid)
            undoing.callback(os.close, self._held)
            self.memory, self.pagemap = (self._open(name, undoing) for name in ("mem", "pagemap"))
            if self.has_ended(0):
                raise ProcessLookupError
            # Where memory runs out it is killed before all others: the program loses nothing by that.
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/oom_score_adj").write_text(_FIRST_TO_GO)
            self._closing = undoing.pop_all()

    def _open(self, name: str, undoing: contextlib.ExitStack) -> int:
        fd = os.open(f"/proc/{self.pid}/{name}", os.O_RDONLY)
        undoing.callback(os.close, fd)
        return fd

    def has_ended(self, seconds: float) -> bool:
        """Tell whether it has ended, which is waited for so many seconds."""
        return bool(select.select([self._held], [], [], seconds)[0])

    def kill(self) -> None:
        """End it, wait until it has given up its memory, and close it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._held, signal.SIGKILL)
            self.has_ended(_PATIENCE)
        self._closing.close()

    def own_bytes(self) -> int:
        """Return how many bytes of memory it has for itself, since others wrote to theirs. Raises `OSError`."""
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_", "Swap:"))) << 10
