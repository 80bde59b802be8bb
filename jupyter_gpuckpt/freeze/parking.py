"""Parking a process's GPU memory for a checkpoint, as seen from outside: what is parked the driver need not copy.

The process makes its memory so that it can be handed to another (`jupyter_gpuckpt/kernel/driver/`);
`vram_holder` is that other; `thread_stopper` keeps everything off the GPU at that moment. In a snapshot what was
parked is one file beside those of `vram`, and the process is saved waiting for it to come back.

Whatever goes wrong before the process has handed its memory over costs time and nothing else: the driver copies it
then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..errors import DriverError, GpuckptError
from ..linux.processes import inner_pid, threads_by_inner
from . import ptrace
from .cuda_waits import CudaWaits
from .gpu_processes import ended
from .holder_programs import start_holder
from .line_program import LineProgram
from .parking_channel import STILL_AT_WORK, ParkingChannel, path_of, waits
from .ranges import Range, size_of
from .staging_buffer import StagingBuffer

__all__ = ["HASH", "PARKED", "Elsewhere", "Parked", "Parking", "Seen", "giving_back", "is_supported", "single_hashes"]

log = logging.getLogger("gpuckpt.parking")

PARKED = "-parked"
"""How the names of the files with parked memory end."""
_RING = f"-ring{PARKED}"
"""How the name of the file ends through which it is brought."""

HASH = 32
"""Bytes of a hash (`vram_hashes`, which takes CUDA to import)."""
KNOWN, MADE, IN_USE = "known", "made", "in-use"
"""What of the files in the run folder (`path_of`) has the hashes of what need not be copied, those of all that was
parked, and the ranges of what is brought or awaited that are not zero."""
WANTED, BORROWED, WRONG = "wanted", "borrowed", "wrong"
"""And which of them has the hashes of all chunks of what is brought, the ranges of it that were borrowed, and those
that turned out to be wrong."""
_RANGE = struct.Struct("<QQ")
"""Where one begins, and its bytes."""

FileState = Literal["new", "awaited", "kept", "brought"]

_PROTOCOLS = ([b"3"], [b"4"], [b"5"], [b"6"])
"""How process, keeper and holder talk to each other (parking.c, `vram_holder`)."""
_WAITS = [b"6"]
"""How one talks that waits for its GPUs when it is asked to."""
_PREPARE_TIMEOUT = 60.0
_LENDS = 1.0  # how long a running process may take to say what it has, in seconds; it may hang
_ARRIVE_TIMEOUT = 5.0  # how long the process may take to come to the place where it parks, in seconds
_STILL_TIMEOUT = 0.5  # how long its threads have to fall asleep, in seconds
_TAKE_TIMEOUT = 70.0  # longer than the process's own limit (parking.c)
_COPY_TIMEOUT = 300.0
_END_TIMEOUT = 5.0
_LOOKS_AGAIN = 1.0  # after how many seconds it is seen whether a process that says nothing has ended


def single_hashes(hashes: bytes) -> list[bytes]:
    """Return hashes that stand one after the other."""
    return [hashes[at : at + HASH] for at in range(0, len(hashes), HASH)]


def is_supported() -> bool:
    """Tell whether there is parking on this kind of machine."""
    return ptrace.is_supported()


@dataclass(frozen=True)
class Parked:
    """What is known of parked memory.

    Attributes
    ----------
    pid, thread : the process and its thread that waits for the memory, numbered as in their own namespace.
    places : the UUIDs of the GPUs that the process sees, in its order, with the bytes on each; the file has them in
        this order, too.
    """

    pid: int
    thread: int
    places: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Bytes on all GPUs together."""
        return sum(size for _, size in self.places)

    @property
    def gpus(self) -> dict[str, int]:
        """Bytes by the UUID of the GPU, of those that have any."""
        return {gpu: size for gpu, size in self.places if size}

    def without(self, needs: Mapping[str, int]) -> dict[str, int]:
        """Return bytes by the UUID of the GPU less what is parked of them."""
        gpus = self.gpus
        return {gpu: max(0, size - gpus.get(gpu, 0)) for gpu, size in needs.items()}

    @property
    def file(self) -> str:
        """The name of the file with the bytes."""
        return f"{self.pid}{PARKED}"


@dataclass(frozen=True)
class Elsewhere:
    """What of a process's memory is found elsewhere, and need not be copied: zeros never are.

    Attributes
    ----------
    hashes : those of chunks of it, one after the other (`vram_hashes`).
    put_back : given the file and the hashes of all its chunks, writes those into it that are found elsewhere, for the
        case that they are lost on the GPU; may raise `GpuckptError`, `OSError`
        and `ValueError`.
    """

    hashes: bytes
    put_back: Callable[[Path, bytes], None]


@dataclass(frozen=True)
class Seen:
    """What was seen of a process's memory before it was paused: how many bytes are not zero, and would be copied."""

    in_use: int
    new: int


class Parking:
    """The parking of one process.

    Parameters
    ----------
    run_dir : the run folder, through which the process is talked to.
    outside, inside : the folder for the file with the bytes, as this process names it and as the other one does.
    parked : what is to be parked; of memory that is parked already and is to be given back, where it waits.
    file : what there is of the file: nothing yet (``new``), nothing yet but all before it is given back (``awaited``),
        all of it (``kept``). Or nothing, since the bytes are ``brought`` to the GPU (`staging_buffer`, `have_all`).
    gpu_map : the UUIDs of the GPUs to give it back to, by those that it was on, where they are others.
    make_whole : writes all of the file, where the bytes were brought and are lost before the process has them; may
        raise.
    elsewhere : what need not be copied, and the file then lacks; None to copy all but zeros.
    in_use : where what is awaited or brought is not zero; all of it, unless said.
    wanted : the hashes of all chunks of what is brought; 32 zero bytes for what is no chunk. Where they are not said,
        nothing is borrowed, and whoever brings it verifies it.
    program : a program that can hold it, where one was started already (`holder_programs`); it is ended here.

    Attributes
    ----------
    hashes : those of all chunks of the file, which has holes for zeros and for what is known; nothing where they could
        not be made, and it has all.
    runs_since : from when on the process runs without its GPU state (`time.monotonic`); None where it does not.
    """

    def __init__(
        self,
        run_dir: Path,
        outside: Path,
        inside: str,
        parked: Parked,
        file: FileState,
        gpu_map: Mapping[str, str] | None = None,
        make_whole: Callable[[], None] | None = None,
        elsewhere: Elsewhere | None = None,
        in_use: Sequence[Range] | None = None,
        wanted: bytes | None = None,
        program: LineProgram | None = None,
    ) -> None:
        self._holder = program or start_holder()
        self.parked = parked
        self._elsewhere = elsewhere
        self.hashes = b""
        self._is_parked = file != "new"
        self._can_run = self._can_wait = False
        self.runs_since: float | None = None
        self._listens: bool | None = None
        self._waits: CudaWaits | None = None
        self._threads: Mapping[int, int] = {}
        self._file = outside / parked.file
        self._is_whole = file == "awaited" or (file == "kept" and self._file.exists())
        self._make_whole = make_whole
        self._holds = self._ready = self._rests = self._is_copied = False
        used = self._file
        self._buffer: StagingBuffer | None = None
        if file == "brought":
            used = outside / f"{parked.pid}{_RING}"
            self._buffer = StagingBuffer(used)
        self._inside = f"{inside}/{parked.file}"
        self._still: LineProgram | None = None
        self._spare: list[LineProgram] = []
        self._channel = ParkingChannel(run_dir, parked.pid)
        self._socket = 0
        self._notes = {
            what: path_of(run_dir, parked.pid, what) for what in (KNOWN, MADE, IN_USE, WANTED, BORROWED, WRONG)
        }
        self._remove_notes()
        if elsewhere is not None:
            _write(self._notes[KNOWN], elsewhere.hashes)
        if in_use is not None:
            _write(self._notes[IN_USE], b"".join(_RANGE.pack(begin, end - begin) for begin, end in in_use))
        if wanted is not None:
            _write(self._notes[WANTED], wanted)
        places = [((gpu_map or {}).get(gpu, gpu), size) for gpu, size in parked.gpus.items()]
        self._gpus = [gpu for gpu, _ in places]
        self._holder.tell(json.dumps([places, str(used), file, str(run_dir), parked.pid]).encode())
        if self._buffer is not None:
            self._buffer.start(self._holder)

    @property
    def _part(self) -> Path:
        """The file while it is not whole."""
        return self._file.with_name(f"{self._file.name}.part")

    @property
    def holder(self) -> int | None:
        """The pid of the program that holds the memory; None when it has ended."""
        return self._holder.pid

    def get_ready(self) -> bool:
        """Wait until all is ready, and tell whether it is."""
        self.get_still()
        if not self._is_parked:
            self._spare.append(_thread_stopper())  # it is held twice by a save, and once by a restore
        return self._holder_is_ready()

    def get_still(self) -> None:
        """Start what holds the process's threads still, so that it is there when memory is given back."""
        if not self._spare:
            self._spare = [_thread_stopper()]

    @property
    def buffer(self) -> StagingBuffer | None:
        """What takes the bytes to the GPU where they are to be ``brought``; None where they are not."""
        return self._buffer

    def have_all(self) -> bool:
        """Wait until all that is brought is on the GPU, and tell whether it is; where it is not, nothing of it is."""
        if self._buffer is not None:
            self._holds = self._ready = self._buffer.finish()
        if not self._holds:
            log.warning("the GPU memory is not brought to the GPU: %s", self._holder.last_words())
            self._holder.kill()
        return self._holds

    def verify(self) -> bool:
        """See whether all that was brought is right, and tell whether it is; what is not is to be brought once more.

        Nobody fills a room meanwhile. Where whoever brought it has verified it, it is right.
        """
        if self._buffer is None or not self._buffer.verifies or not self._buffer.finish():
            return True
        self._holder.tell(b"verify")
        said, wrong = b"", list[Range]()
        with contextlib.suppress(TimeoutError):
            said = self._holder.hear(_COPY_TIMEOUT)
        if said == b"wrong":
            wrong = self._ranges(WRONG)
            log.warning("%d MB of GPU memory are not what was saved; they are read again", size_of(wrong) / 1e6)
        elif said != b"verified":
            self._holder.kill()  # the file is read then
        self._buffer.lacks(wrong, self.parked.size)
        return not wrong

    def _ranges(self, note: str) -> list[Range]:
        return [(begin, begin + size) for begin, size in _RANGE.iter_unpack(self._notes[note].read_bytes())]

    def preload(self) -> None:
        """Have the bytes brought to the GPU as soon as they are all there, where it has room for them."""
        if self._is_whole and not self._holds and self._holder_is_ready():
            self._holder.tell(b"load")
            self._holds = self._holder_says(b"loaded", _PREPARE_TIMEOUT)

    def _holder_is_ready(self) -> bool:
        if self._holder.pid is None:
            return False
        self.rouse()
        if not self._ready:
            self._ready = self._holder_says(b"ready", _PREPARE_TIMEOUT)
        if not self._ready:
            self._holder.kill()
            log.warning("there is no holder for GPU memory: %s", self._holder.last_words())
        return self._ready

    @property
    def _places(self) -> str:
        return " ".join(str(size) for _, size in self.parked.places)

    def see(self, pid: int) -> Seen | None:
        """Have the holder open the memory of the process (`pid` on this machine), and look at it.

        The process goes on with it; what it has at `park` is what counts. None where it cannot be seen: it is opened
        then, which takes longer, while the process is paused.
        """
        if self._channel.call(pid) is None:
            return None
        # Not in the pause: all mappings and threads are looked at.
        self._waits, self._threads = CudaWaits([pid]), threads_by_inner(pid)
        seen = self._show(self._channel, [size for _, size in self.parked.places], b"see %d" % pid)
        if seen[:1] != [b"seen"]:
            log.warning("the GPU memory of process %d was not seen: %s", pid, self._holder.last_words())
            return None
        return Seen(int(seen[1]), int(seen[2]))

    def borrow(self, lender: int, run_dir: Path) -> None:
        """Have the holder copy on the GPUs, of what is to be brought, what another process has there.

        The process (`lender` on this machine, with this run folder) goes on with its memory, which it may write to:
        what was copied is right when that was seen (`verify`). Nobody fills a room of the buffer yet. Where it cannot
        be done, all is brought.
        """
        if self._buffer is None or not self._buffer.until_ready() or not self._buffer.verifies:
            return
        channel = ParkingChannel(run_dir, inner_pid(lender))
        try:
            places = channel.call(lender, _LENDS)
            if places is None:
                return
            if [gpu for gpu, size in places if size] != self._gpus:
                channel.say("no")
                channel.hear(_ARRIVE_TIMEOUT, b"not")
                return
            sizes = b" ".join(b"%d" % size for _, size in places if size)
            said = self._show(channel, [size for _, size in places], b"borrow %d" % lender, sizes)
        finally:
            channel.close()
        if said != [b"borrowed"]:
            log.warning("no GPU memory of process %d was borrowed: %s", lender, self._holder.last_words())
            return
        there = self._ranges(BORROWED)
        self._buffer.has(there)
        log.info("%d of %d MB of GPU memory were there", size_of(there) / 1e6, self.parked.size / 1e6)

    def _show(self, channel: ParkingChannel, sizes: Sequence[int], command: bytes, more: bytes = b"") -> list[bytes]:
        """Have a process that was called show its memory, and the holder do something with it; return its answer.

        The process goes on with its memory. Nothing is returned where it was not shown.
        """
        channel.say(f"show {' '.join(map(str, sizes))}")
        words = channel.hear(_ARRIVE_TIMEOUT).split()
        said, shown = list[bytes](), b""
        if words[:1] == [b"showing"] and words[2:] in _PROTOCOLS and words[1].isdigit():
            self._holder.tell(b"%s %d %s" % (command, int(words[1]), more))
            try:
                said = self._holder.hear(_TAKE_TIMEOUT).split()
            except TimeoutError:
                self._holder.kill()  # it might still answer, when something else is asked
            shown = channel.hear(_LENDS if said[:1] == [b"not"] else _ARRIVE_TIMEOUT)
        channel.say("no")
        if shown:
            channel.hear(_ARRIVE_TIMEOUT, b"not")
        return said if shown == b"shown" else []

    def stage(self) -> bool:
        """Make memory ready for what will be copied, as far as it was seen, and tell whether that could be done."""
        self._holder.tell(b"stage")
        if not self._holder_says(b"staged", _COPY_TIMEOUT):
            log.warning("no memory is ready for copies of GPU memory: %s", self._holder.last_words())
            self._holder.kill()
            return False
        return True

    def call(self, pid: int) -> None:
        """Have the process (`pid` on this machine) listen, for some seconds: `halt` is to follow, or `go_on`."""
        self._listens = self._channel.call(pid) is not None

    def halt(self, pid: int) -> bool:
        """Have no Python code run in the process (`pid` on this machine) from now on; tell whether none does.

        It may be that there is none in it. `park` is to follow, or `go_on`.
        """
        self._socket = 0
        if self._listens is None:
            self.call(pid)
        if not self._listens:
            return self._not_parked("the process does not answer")
        self._listens = None
        self._channel.say("watch")
        self._channel.say("halt")
        words = self._channel.hear(_ARRIVE_TIMEOUT, b"halted").split()
        if len(words) != 4 or words[3:] not in _PROTOCOLS or not (words[1].isdigit() and words[2].isdigit()):
            self.go_on()
            return self._not_parked("the {kernel} is busy")
        inner, self._socket = int(words[1]), int(words[2])
        self._can_wait = words[3:] == _WAITS
        self.parked = replace(self.parked, thread=inner)
        return True

    def wait_for_gpus(self, limit: float) -> bool:
        """Wait until the GPUs have done what a halted process gave them, for so many seconds; tell whether they have.

        Its calls wait at the gate. One that was restored may be older, and be waited for without a limit in `park`.
        """
        return not self._can_wait or self._channel.wait_for_gpus(limit) != STILL_AT_WORK

    @property
    def channel(self) -> ParkingChannel:
        """How the process is talked to from `halt` on, until it has parked or goes on."""
        return self._channel

    def go_on(self) -> None:
        """Let a process go on that was to park."""
        self._channel.say("no")

    def park(self, pid: int, note: Callable[[Parked], None], until_shut: Callable[[], None] | None = None) -> bool:
        """Have a process hand its memory over in which no Python code runs; tell whether it did.

        Where it did, its threads are paused until `let_go`, or `let_run`: nothing may use the GPU before it is
        checkpointed. With `until_shut`, which waits until no call passes the gate any more, it runs (`let_run`) as soon
        as the memory is handed over, while it gives that up itself; if it can.
        `note` is called before anything is handed over, with what is needed to give the memory back should this program
        die.

        Raises
        ------
        DriverError : it has handed the memory over, and does not give it up.
        """
        self._begin_to_hold(pid, self.parked.thread, "hold")
        try:
            note(self.parked)  # a file is written meanwhile
        except BaseException:
            self.let_go()
            self.go_on()
            raise
        if not self._is_held():
            self.go_on()
            return self._not_parked("its threads did not pause")
        self._holder.tell(b"take %d %d" % (pid, self._socket))
        self._channel.say(f"park {self._places}")
        inside, in_front = (self._waits or CudaWaits([pid])).counts()
        said = self._channel.hear(_TAKE_TIMEOUT)
        words = said.split()
        if words[:1] not in ([b"handed"], [b"parked"]):
            self.let_go()
            return self._not_parked(said.decode("ascii", "replace") or "no answer")
        self._is_parked = self._holds = True
        # Those in front of the driver may be about to call it, but for those that wait at the gate. A restored process
        # may be older, and not say how many do, or say that it has parked when it has given all up.
        self._can_run = not inside and words[1:] == [b"free", b"%d" % in_front]
        if words[:1] == [b"handed"]:
            if until_shut is not None and self._can_run:
                until_shut()
                self.let_run()
            else:
                self._channel.say("stay")
            if self._channel.hear(_TAKE_TIMEOUT) != b"parked":
                raise self._error("given up", "no answer")
        return True

    @property
    def is_parked(self) -> bool:
        """Whether the process has handed its memory over, and not got it back."""
        return self._is_parked

    def let_run(self) -> bool:
        """Let the process run on while the driver has its GPU state, where it can, and tell whether it does.

        It can where none of its threads was in a call of the driver's when they were paused: those that make one wait
        at the gate, or did already. It has to be shut for them by now, and stay so until all is back.
        """
        if self._is_parked and self._can_run and not self._runs:
            self._channel.say("sleep")
            self.let_go()
            self.runs_since = time.monotonic()
        return self._runs

    @property
    def _runs(self) -> bool:
        return self.runs_since is not None

    def let_go(self) -> None:
        """Let the process's threads go on: no call of theirs reaches the GPU any more, or all is as it was."""
        still, self._still = self._still, None
        if still is not None:
            still.tell(b"end")
            try:
                still.wait(_END_TIMEOUT)
            except TimeoutError:
                still.kill()
            still.close()

    def give_up_zeros(self) -> None:
        """Have the holder close the parts in which all is zero; not before the process is checkpointed."""
        if self._is_parked:
            self._holder.tell(b"zeros")

    def finish_copy(self) -> None:
        """Wait until the file has all bytes that are not found elsewhere.

        Raises
        ------
        DriverError : they could not be copied.
        """
        if self._is_parked and not self._is_whole and not self._is_copied:
            self._holder.tell(b"copied")
            said = b""
            with contextlib.suppress(TimeoutError):
                said = self._holder.hear(_COPY_TIMEOUT)
            if said.startswith(b"no room "):
                lacking = int(said.split()[2]) / 1e6
                raise self._error(
                    "copied",
                    f"More of it is in use than before: {lacking:,.0f} MB of host memory are lacking.",
                    "Free memory in the {kernel}, or end other programs, and save again.",
                )
            if said != b"copied":
                raise self._error("copied", self._holder.last_words())
            self._is_copied, self._is_whole = True, self._file.exists()
            with contextlib.suppress(FileNotFoundError):
                self.hashes = self._notes[MADE].read_bytes()
            if not self._is_whole and not self.hashes:
                raise self._error("copied", "what was left out is not known")

    def rest(self) -> None:
        """Have the holder give up all that it has on the GPU: the process has its memory from the file, later."""
        self._holds = self._ready = False
        self._holder.tell(b"rest")
        self._rests = self._holder_says(b"resting", _PREPARE_TIMEOUT)
        if not self._rests:
            self._holder.kill()  # its end does the same

    @property
    def holds(self) -> bool:
        """Whether the holder has the bytes on the GPU."""
        return self._holds and self._holder.pid is not None

    @property
    def rests(self) -> bool:
        """Whether the holder has nothing on the GPU now, and has to be roused before it can fill."""
        return self._rests

    def rouse(self) -> None:
        """Have the holder get ready to fill; it is waited for when it is needed."""
        if self._rests:
            self._rests = False
            self._holder.tell(b"rise")

    def do_without_holder(self) -> None:
        """End the holder, which takes GPU memory of its own: the process reads the file itself, more slowly."""
        self._holder.kill()

    def hold(self, pid: int, *, stay: bool = False) -> None:
        """Hold the process's threads before its memory is given back, until `let_go`; not where it runs (`let_run`).

        With `stay` all of it is paused (SIGSTOP), and goes on then, but for what is held; not to be able to hold them
        is a failure then.

        Raises
        ------
        DriverError : they could not be held.
        """
        if (
            self._is_parked
            and not self._runs
            and not ended(pid)
            and not self._hold_still(pid, self.parked.thread, "hold-stopped" if stay else "hold-all")
        ):
            if stay:
                raise self._error("given back", f"the threads of process {pid} could not be held still")
            log.warning("the threads of process %d could not be held still", pid)

    def give_back(self, pid: int) -> None:
        """Give the process its memory back; its threads are held, and the rest of its GPU state is there.

        Raises
        ------
        DriverError : it could not be given back.
        """
        if self._is_parked:
            self._give_back(pid)

    def take_again(self) -> None:
        """Take what was given back, where it could not be all of it. Raises `DriverError`."""
        self._channel.say("drop")
        if (said := self._channel.hear(_TAKE_TIMEOUT)) != b"dropped":
            raise self._error("taken again", said.decode("ascii", "replace") or "no answer")

    def _hear_of_its_end(self, pid: int) -> bytes:
        """Return what the process says when it has its memory, or that it has not; nothing where it ends before."""
        deadline = time.monotonic() + _COPY_TIMEOUT
        while not ended(pid) and (left := deadline - time.monotonic()) > 0:
            if said := self._channel.hear(min(left, _LOOKS_AGAIN)):
                return said
        return b""

    def _give_back(self, pid: int) -> None:
        why = ""
        if ended(pid) or not waits(pid):
            self._is_parked = False  # it never was: a save was broken off before
            return
        if self._buffer is not None and not self.holds:
            self._have_file_whole()
        if self._is_copied and not self.holds:
            self._finish_copy_all_the_same()
        if self._holder_is_ready() or not self._is_whole:
            self._channel.say("fill" if self._is_whole or self._holds else "no")
            words = self._channel.hear(_ARRIVE_TIMEOUT).split()
            if words[:1] == [b"not"]:
                self._is_parked = False
                return
            if words[:1] == [b"socket"] and words[2:] not in _PROTOCOLS:
                raise self._error(
                    "given back",
                    "it was parked by another version of jupyter_gpuckpt",
                    "Restore it where the version that saved it is installed.",
                )
            if words[:1] == [b"socket"]:
                self._holder.tell(b"fill %d %d %s" % (pid, int(words[1]), words[2]))
                said = self._hear_of_its_end(pid)
                if said == b"done" or ended(pid):
                    self._is_parked = False
                    if self._is_copied and not self._is_whole:
                        with contextlib.suppress(FileNotFoundError):  # it was completed on the way
                            self._part.rename(self._file)
                    return
                why = f"{said.decode('ascii', 'replace')}; {self._holder.last_words()}"
        if self._buffer is not None and not self._is_whole:
            self._have_file_whole()
        self._finish_copy_all_the_same()
        if not self._is_whole:
            raise self._error("given back", why or self._holder.last_words())
        log.warning("the memory of process %d is given back the slow way: %s", pid, why)
        self._holder.kill()  # it has GPU memory that the process needs
        self._channel.say(f"load {self._inside}")
        said = self._hear_of_its_end(pid)
        if said != b"done" and not ended(pid):
            raise self._error("given back", said.decode("ascii", "replace") or "no answer")
        self._is_parked = False

    def _finish_copy_all_the_same(self) -> None:
        """Have the file whole, also where the holder has failed: it ends its copies first."""
        if not self._is_whole:
            self._holder.tell(b"complete")
            self._is_whole = self._holder_says(b"complete", _COPY_TIMEOUT) or self._file.exists()
        if not self._is_whole and self._is_copied and self._elsewhere is not None:
            try:
                self._elsewhere.put_back(self._part, self.hashes)
            except (GpuckptError, OSError, ValueError) as e:
                log.warning("what was not copied is lost: %s", e)
                return
            self._part.rename(self._file)
            self._is_whole = True

    def _have_file_whole(self) -> None:
        log.warning("what was brought to the GPU is lost: %s", self._holder.last_words())
        self._holder.kill()  # it has GPU memory that the process needs
        if self._make_whole is not None:
            self._make_whole()
            self._is_whole = True

    def close(self) -> None:
        """End the programs and close the FIFOs; what is parked stays in the file."""
        self.let_go()
        for spare in self._spare:
            spare.close()
            spare.kill()
        self._holder.close()
        try:
            self._holder.wait(_COPY_TIMEOUT)
        except TimeoutError:
            self._holder.kill()
        if self._buffer is not None:
            self._buffer.close()
        self._remove_notes()
        self._channel.close()

    def _remove_notes(self) -> None:
        for file in self._notes.values():
            file.unlink(missing_ok=True)

    def _hold_still(self, pid: int, inner: int, how: str) -> bool:
        if self._still is not None and self._still.pid is not None:
            return True
        self._begin_to_hold(pid, inner, how)
        return self._is_held()

    def _begin_to_hold(self, pid: int, inner: int, how: str) -> None:
        """Have the threads held but for one; `_is_held` waits for that, and lets them go where they cannot be held."""
        thread = self._threads.get(inner) or threads_by_inner(pid).get(inner)
        if thread is not None:
            self._still = self._spare.pop() if self._spare else _thread_stopper()
            self._still.tell(f"{how} {pid} {thread} {_STILL_TIMEOUT}".encode())

    def _is_held(self) -> bool:
        if self._still is None:
            return False
        for expected in (b"ready", b"still"):
            try:
                said = self._still.hear(_STILL_TIMEOUT + _ARRIVE_TIMEOUT)
            except TimeoutError:
                said = b""
            if said != expected:
                self.let_go()
                return False
        return True

    def _holder_says(self, expected: bytes, limit: float) -> bool:
        try:
            return self._holder.hear(limit) == expected
        except TimeoutError:
            return False

    def _not_parked(self, why: str) -> bool:
        self._holder.kill()  # the driver is not to checkpoint a process whose memory another has open
        log.warning("the GPU memory is not parked: %s", why)
        return False

    def _error(
        self, what: str, why: str, then: str = "Start the {kernel} with GPUCKPT_PARKING=off to save without parking."
    ) -> DriverError:
        return DriverError(
            f"Parked GPU memory could not be {what}.",
            why,
            then,
            call="park",
            pid=self.parked.pid,
            number=None,
            name="PARKING",
        )


@contextlib.contextmanager
def giving_back(
    parkings: Mapping[int, Parking], otherwise: Callable[[], None] | None = None, *, stay: bool = False
) -> Iterator[None]:
    """Give processes, by their pids here, their memory back after the block, which brings the rest of their GPU state.

    Their threads are held from before the block until then; with `stay`, as `Parking.hold` has it, until `let_go`.
    Where one cannot be given its memory back, what of it was is taken again, and `otherwise` is called before they go
    on.

    Raises
    ------
    DriverError : the memory of one could not be given back; that of the others has been.
    """
    everyone = list(parkings.items())
    with ThreadPoolExecutor(max(1, len(everyone))) as together:

        def give_back(one: tuple[int, Parking]) -> DriverError | None:
            pid, parking = one
            try:
                parking.give_back(pid)
            except DriverError as e:
                return e
            return None

        try:
            list(together.map(lambda one: one[1].hold(one[0], stay=stay), everyone))
            yield
            failures = [
                (parking, e) for (_, parking), e in zip(everyone, together.map(give_back, everyone), strict=True) if e
            ]
            if failures and otherwise is not None:
                for parking, _ in failures:
                    parking.take_again()
                otherwise()
            for _, e in failures:
                raise e
        finally:
            if not stay:
                for _, parking in everyone:
                    parking.let_go()


def _write(file: Path, data: bytes) -> None:
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
        f.write(data)


def _thread_stopper() -> LineProgram:
    return LineProgram("jupyter_gpuckpt.freeze.thread_stopper")
