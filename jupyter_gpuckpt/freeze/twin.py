"""The memory of saved processes, copied while they run on: out of a child that each was made to fork while paused.

That child, the twin, is made by our library in criu (`criu_memory.c`), which writes down what is to be copied.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import itertools
import os
import select
import signal
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import images, pages

__all__ = ["Void", "asked_for", "copy_memory", "end"]

_NOTED = "twin-*.regions"
_SAVED = "saved"  # there when nothing else is missing
_NUMBER = 8  # bytes
_ENTRY = struct.Struct("<QQQ")  # first address, end, and whether the bytes are in a file
_BLOCK = 4 << 20  # bytes that a thread copies at once
_THREADS = 4
_PATIENCE = 30.0  # for how long a killed twin may take to give up its memory, in seconds


_local = threading.local()


class Void(OSError):
    """A dump that left out memory which nobody has: its images are of no use."""

    def __init__(self, why: str, number: int | None = None) -> None:
        super().__init__(why)
        self.errno = number


def asked_for(first: int, folder: str) -> Mapping[str, str]:
    """Return what criu's environment has to have, so that it leaves the memory of a tree to `copy_memory`.

    `first` is the tree's first process. What is to be copied is written into `folder`, as criu's namespace names it.
    Where the system cannot do this, criu copies all memory, as it does without.
    """
    return {"GPUCKPT_DUMP_TWINS": str(first), "GPUCKPT_DUMP_TWINS_FOLDER": folder}


def copy_memory(folder: Path, into: Path, outer: Callable[[int], int | None]) -> bool:
    """Copy the memory that a dump left out into its images, while the processes run on; tell whether there was any.

    Parameters
    ----------
    folder : where our library has written what is to be copied; the twins are to be ended by `end`.
    into : criu's images.
    outer : gives the pid of a process of the namespace as this process knows it.

    Raises
    ------
    Void : not all of it could be read.
    OSError : the images cannot be written.
    """
    left_out = sorted(folder.glob(_NOTED))
    for noted in left_out:
        raw = noted.read_bytes()
        if not raw:
            raise Void("its memory could not be copied while it was paused")
        twin = outer(_twin_in(raw))
        wanted = list(_ENTRY.iter_unpack(raw[_NUMBER:]))
        if twin is None and not all(is_in_file for *_, is_in_file in wanted):
            raise Void("the process that had its memory is gone")
        if twin is not None:
            _is_killed_first(twin)
        memory = Path(f"/proc/{twin}/mem") if twin is not None else None
        _Copy(into, int(noted.stem.removeprefix("twin-")), memory, noted.with_suffix(".bytes")).run(wanted)
    return bool(left_out)


def end(folder: Path, outer: Callable[[int], int | None]) -> None:
    """End the twins that a dump made, if there are any, and wait until they have given up their memory."""
    for noted in folder.glob(_NOTED):
        raw = noted.read_bytes()
        twin = outer(_twin_in(raw)) if len(raw) >= _NUMBER else None
        if twin is not None:
            _kill(twin)
        noted.with_suffix(".bytes").unlink(missing_ok=True)
        noted.unlink(missing_ok=True)
    (folder / _SAVED).unlink(missing_ok=True)


def _is_killed_first(pid: int) -> None:
    """Have the system kill a twin before all others where memory runs out: the program loses nothing by that."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def _kill(pid: int) -> None:
    try:
        held = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(held, signal.SIGKILL)
        select.select([held], [], [], _PATIENCE)
    except ProcessLookupError:
        pass
    finally:
        os.close(held)


def _twin_in(noted: bytes) -> int:
    return int.from_bytes(noted[:_NUMBER], "little")


@dataclass(frozen=True)
class _Run:
    """A run of pages: its addresses, and where its bytes are: in one of the files (0 is the twin's memory)."""

    begin: int
    end: int
    source: int
    at: int


_TWIN, _BYTES, _IMAGE = 0, 1, 2


@dataclass(frozen=True)
class _Copy:
    """One copy of a process's memory into its images: out of the twin's memory, and a file of what that has not."""

    images: Path
    pid: int
    memory: Path | None
    rest: Path

    def run(self, wanted: Sequence[tuple[int, int, int]]) -> None:
        pagemap = self.images / f"pagemap-{self.pid}.img"
        raw = pagemap.read_bytes()
        number, own = pages.placed(raw)
        image = self.images / f"pages-{number}.img"
        areas = list(images.private_areas((self.images / f"mm-{self.pid}.img").read_bytes()))
        runs = [_Run(begin, end, _IMAGE, at) for begin, end, at in own]
        runs += _left_out(wanted, areas, [(begin, end) for begin, end, _ in own])
        runs.sort(key=lambda run: run.begin)
        whole = image.with_suffix(".whole")
        with whole.open("xb") as out:
            out.truncate(sum(run.end - run.begin for run in runs))
            with contextlib.ExitStack() as files, ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
                paths = (self.memory or self.rest, self.rest, image)  # by the numbers of `_Run.source`
                sources = [files.enter_context(path.open("rb", buffering=0)).fileno() for path in paths]
                for _ in threads.map(lambda block: _copy(block, sources, out.fileno()), _blocks(runs)):
                    pass
        whole.replace(image)
        pagemap.write_bytes(pages.pagemap(raw, [(run.begin, run.end) for run in runs]))


def _left_out(
    wanted: Sequence[tuple[int, int, int]], areas: Sequence[tuple[int, int]], own: Sequence[tuple[int, int]]
) -> Iterator[_Run]:
    """Yield what criu would have copied, but for what it has copied, of private areas alone: it asks for more."""
    at = 0
    for begin, end, is_in_file in wanted:
        for first, last in _without(_within((begin, end), areas), own):
            yield _Run(first, last, _BYTES, at + first - begin) if is_in_file else _Run(first, last, _TWIN, first)
        at += (end - begin) if is_in_file else 0


def _within(run: tuple[int, int], areas: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    first = bisect.bisect_right(areas, run[0], key=lambda area: area[1])
    for begin, end in itertools.islice(areas, first, None):
        if begin >= run[1]:
            return
        yield max(begin, run[0]), min(end, run[1])


def _without(runs: Iterator[tuple[int, int]], taken: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for begin, end in runs:
        at = begin
        for first, last in taken:
            if last <= at or first >= end:
                continue
            if first > at:
                yield at, first
            at = last
        if at < end:
            yield at, end


_Block = Sequence[tuple[int, int, int, int]]
"""What is copied at once: of each part the source, its place there, its place in the image, and its bytes."""


def _blocks(runs: Sequence[_Run]) -> Iterator[_Block]:
    block: list[tuple[int, int, int, int]] = []
    room = _BLOCK
    to = 0
    for run in runs:
        at, left = run.at, run.end - run.begin
        while left:
            size = min(left, room)
            block.append((run.source, at, to, size))
            at, to, left, room = at + size, to + size, left - size, room - size
            if not room:
                yield block
                block, room = [], _BLOCK
    if block:
        yield block


def _copy(block: _Block, sources: Sequence[int], out: int) -> None:
    """Copy one block, whose parts are one behind the other in the image."""
    if not hasattr(_local, "view"):
        _local.view = memoryview(bytearray(_BLOCK))  # fresh memory for each block costs as much as copying it
    view: memoryview = _local.view[: sum(size for *_, size in block)]
    done = 0
    for source, at, _, size in block:
        try:
            found = os.preadv(sources[source], [view[done : done + size]], at)
        except OSError as e:
            raise Void(f"its memory at {at:#x} cannot be read: {e.strerror}") from e
        if found != size:
            raise Void("the process that had its memory was killed, as the system does without memory", errno.ENOMEM)
        done += size
    os.pwrite(out, view, block[0][2])
