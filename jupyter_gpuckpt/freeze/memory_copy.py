"""The memory of saved processes, copied out of their twins while they run on.

What has not changed since the save before need not be (`unchanged`), where the twins of that are kept.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import itertools
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import images, pages, shared_memory, unchanged
from .twin import Noted, Twin, Void, dump_is_over

__all__ = ["Before", "Kept", "Memory", "Unreliable", "copy"]

_BLOCK = 4 << 20  # bytes that a thread copies at once
_THREADS = 4
_CHECKED = 8  # parts of those that have not changed that are compared all the same
_KILLED = "the process that had its memory was killed, as the system does without memory"

_local = threading.local()


class Unreliable(Void):
    """Memory has changed that the system said had not: images that were made before may be wrong, too."""


@dataclass(frozen=True)
class Before:
    """What is known of memory from the save before.

    Attributes
    ----------
    kept : its twins.
    held : returns those of some chunks that are stored, and need not be copied.
    digest : returns the hash of some bytes.
    check_all : compare all that has not changed with its hash, and not a few parts of it.
    """

    kept: Kept
    held: Callable[[set[unchanged.Chunk]], set[unchanged.Chunk]]
    digest: Callable[[memoryview], bytes]
    check_all: bool


def copy(folder: Path, into: Path, outer: Callable[[int], int | None], before: Before | None = None) -> Memory:
    """Copy the memory that a dump left out into its images, while the processes run on.

    What has not changed since the save `before` is not copied: the images have holes there. Its twins are ended.

    Parameters
    ----------
    folder : where our library has written what is to be copied.
    into : criu's images.
    outer : gives the pid of a process of the namespace as this process knows it.

    Raises
    ------
    Void : not all of it could be read.
    MappingsChanged : the list of mappings that was read before the pause was not right in it.
    Unreliable : what had not changed has.
    OSError : the images cannot be written.
    """
    shared_memory.describe(folder, into)
    copies: list[Copy] = []
    try:
        for noted in Noted.all_in(folder):
            copies.append(Copy(noted, into, outer))
        dump_is_over(folder)
        with ThreadPoolExecutor(1) as beside:
            ending = [beside.submit(copy.check_mappings) for copy in copies]
            if before is not None:
                for copy in copies:
                    copy.look_at(before)
                # It takes the system 15 ms for each GB to free what a twin had.
                ending.append(beside.submit(before.kept.end))
            for copy in copies:
                copy.run()
            for one in ending:
                one.result()
    except BaseException:
        for copy in copies:
            copy.end()
        raise
    return Memory(copies)


@dataclass(frozen=True)
class _Run:
    """A run of pages: its addresses, and where its bytes are: in one of the files (0 is the twin's memory)."""

    begin: int
    end: int
    source: int
    at: int


_TWIN, _BYTES, _IMAGE = 0, 1, 2


class Copy:
    """One copy of a process's memory into its images: out of the twin's memory, and a file of what that has not.

    Attributes
    ----------
    process : its pid in the namespace.
    image : the name of the file with its pages.
    runs : which pages these are, in order.
    trusted : the areas of which the twin has all bytes.
    pieces : how the image is to be cut: sizes, parts that are known and not in it, and those that have changed.
    twin : None where there is none.
    """

    def __init__(self, noted: Noted, into: Path, outer: Callable[[int], int | None]) -> None:
        self._noted, self.process = noted, noted.process
        pid, wanted = noted.read()
        self.twin: Twin | None = None
        if pid and (there := outer(pid)) is not None:
            with contextlib.suppress(OSError):
                self.twin = Twin(there)
        if self.twin is None and not all(is_beside for *_, is_beside in wanted):
            raise Void("the process that had its memory is gone")
        try:
            self._prepare(wanted, into)
        except BaseException:
            self.end()
            raise

    def _prepare(self, wanted: Sequence[tuple[int, int, int]], into: Path) -> None:
        self._pagemap = into / f"pagemap-{self.process}.img"
        self._raw = self._pagemap.read_bytes()
        number, own = pages.placed(self._raw)
        self._file = into / f"pages-{number}.img"
        self.image = self._file.name
        mm = (into / f"mm-{self.process}.img").read_bytes()
        areas = list(images.private_areas(mm))
        runs = [_Run(begin, end, _IMAGE, at) for begin, end, at in own]
        runs += _left_out(wanted, areas, [(begin, end) for begin, end, _ in own])
        self._runs = sorted(runs, key=lambda run: run.begin)
        self.runs = pages.apart(pages.joined((run.begin, run.end) for run in self._runs), images.heaps(mm))
        self.trusted = pages.joined((run.begin, run.end) for run in self._runs if run.source == _TWIN)
        self._long = [(begin, end) for begin, end in self.runs if end - begin >= pages.LONG]
        self.pieces = unchanged.plan(self.runs, ())

    @property
    def size(self) -> int:
        """The bytes of the image."""
        return sum(end - begin for begin, end in self.runs)

    def check_mappings(self) -> None:
        """See that criu was given the right list of mappings. Raises `Void`."""
        self._noted.check_mappings(None if self.twin is None else self.twin.pid)

    def look_at(self, before: Before) -> None:
        """Find out what need not be copied."""
        then, parts = before.kept.of(self.process)
        if self.twin is None or then is None:
            return
        inside = [part for part in parts if all(unchanged.is_within(area, self.trusted) for area in part.where)]
        same = unchanged.shared(then.pagemap, self.twin.pagemap, (area for part in inside for area in part.where))
        found: list[unchanged.Part] = []
        changed: list[unchanged.Part] = []
        for part in inside:
            (found if all(same[area] for area in part.where) else changed).append(part)
        # Those of before are asked for as well: where they are stored is known then to who stores what has changed.
        held = before.held({part.chunk for part in inside})
        changed = [part for part in changed if part.chunk in held and self._stays(then, part)]
        self.pieces = unchanged.plan(self.runs, [part for part in found if part.chunk in held], changed)
        known = [piece for piece in self.pieces if isinstance(piece, unchanged.Part)]
        for part in known if before.check_all else random.sample(known, min(_CHECKED, len(known))):
            self._check(part, before.digest)

    def _stays(self, then: Twin, changed: unchanged.Part) -> bool:
        """Tell whether a part is to stay as it was cut, and may be stored as what of it has changed.

        Of long runs only one that is partly the same: others are cut by their content, which may be known elsewhere.
        """
        (area, *others), now = changed.where, self.twin
        assert now is not None
        if others or not unchanged.is_within(area, self._long):
            return True
        return unchanged.partly_shared(then.pagemap, now.pagemap, area)

    def _check(self, part: unchanged.Part, digest: Callable[[memoryview], bytes]) -> None:
        assert self.twin is not None
        view = memoryview(bytearray(part.chunk[1]))
        at = 0
        for begin, end in part.where:
            if os.preadv(self.twin.memory, [view[at : at + end - begin]], begin) != end - begin:
                raise Void(_KILLED, errno.ENOMEM)
            at += end - begin
        if digest(view) != part.chunk[0]:
            raise Unreliable(
                f"its memory at {part.where[0][0]:#x} has changed since it was saved last, and the system says that it "
                "has not"
            )

    def run(self) -> None:
        """Copy what is to be copied."""
        whole = self._file.with_suffix(".whole")
        with whole.open("xb") as out:
            out.truncate(self.size)
            with contextlib.ExitStack() as files, ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
                sources = [
                    self.twin.memory if self.twin is not None else -1,
                    *(
                        files.enter_context(path.open("rb", buffering=0)).fileno()
                        for path in (self._noted.bytes_beside, self._file)
                    ),
                ]
                for _ in threads.map(lambda block: _copy(block, sources, out.fileno()), _blocks(self._to_copy())):
                    pass
        self._noted.bytes_beside.unlink(missing_ok=True)
        whole.replace(self._file)
        self._pagemap.write_bytes(pages.pagemap(self._raw, [(run.begin, run.end) for run in self._runs]))

    def _to_copy(self) -> Iterator[_Extent]:
        """Yield the runs, without those parts of them that are known."""
        left = iter(self.pieces)
        begin = end = at = 0  # of a piece that is to be copied, and where in the image the run begins
        for run in self._runs:
            upto = at + run.end - run.begin
            while True:
                first, last = max(begin, at), min(end, upto)
                if first < last:
                    yield run.source, run.at + first - at, first, last - first
                if end >= upto:
                    break
                piece = next(left)
                if isinstance(piece, unchanged.Part):
                    begin = end = end + piece.chunk[1]
                else:
                    begin, end = end, end + (piece if isinstance(piece, int) else piece.before.chunk[1])
            at = upto

    def keep(self) -> None:
        """Have the twin stay until the next save. Raises `OSError` where it has ended."""
        if self.twin is not None:
            if self.twin.has_ended(0):
                raise ProcessLookupError
            self._noted.keep()

    def end(self) -> None:
        """End the twin, and wait until it has given up its memory."""
        if self.twin is not None:
            self.twin.kill()
        self._noted.forget()


class Memory:
    """The memory that a dump left out, as its twins have it still."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self.copies = copies

    @property
    def twins(self) -> list[Twin]:
        """The twins."""
        return [copy.twin for copy in self.copies if copy.twin is not None]

    def keep(self, parts: Mapping[int, Sequence[unchanged.Part]]) -> Kept:
        """Keep the twins until the next save, with the parts of memory that were stored, by process.

        Raises
        ------
        OSError : one has ended.
        """
        for copy in self.copies:
            copy.keep()
        return Kept(self, parts)

    def end(self) -> None:
        """End the twins; may be called again."""
        for copy in self.copies:
            copy.end()
        self.copies = ()


class Kept:
    """Twins that are kept until the next save, and what was stored of their memory."""

    def __init__(self, memory: Memory, parts: Mapping[int, Sequence[unchanged.Part]]) -> None:
        self._memory, self._parts = memory, parts

    def of(self, process: int) -> tuple[Twin | None, Sequence[unchanged.Part]]:
        """Return the twin of a process, and the parts of its memory that were stored."""
        twin = next((copy.twin for copy in self._memory.copies if copy.process == process), None)
        return twin, self._parts.get(process, ())

    @property
    def twins(self) -> list[Twin]:
        """The twins."""
        return self._memory.twins

    @property
    def chunks(self) -> set[unchanged.Chunk]:
        """What was stored of their memory."""
        return {part.chunk for parts in self._parts.values() for part in parts}

    def end(self) -> None:
        """End them; may be called again."""
        self._memory.end()


def _left_out(
    wanted: Sequence[tuple[int, int, int]], areas: Sequence[tuple[int, int]], own: Sequence[tuple[int, int]]
) -> Iterator[_Run]:
    """Yield what criu would have copied, but for what it has copied, of private areas alone: it asks for more."""
    at = 0
    for begin, end, is_beside in wanted:
        for first, last in _without(_within((begin, end), areas), own):
            yield _Run(first, last, _BYTES, at + first - begin) if is_beside else _Run(first, last, _TWIN, first)
        at += (end - begin) if is_beside else 0


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


_Extent = tuple[int, int, int, int]
"""What is to be copied: the source, its place there, its place in the image, and its bytes."""


def _blocks(extents: Iterable[_Extent]) -> Iterator[list[_Extent]]:
    """Yield what is copied at once: one behind the other in the image."""
    block: list[_Extent] = []
    room = _BLOCK
    for source, begin, to, left in extents:
        at = begin
        if block and block[-1][2] + block[-1][3] != to:
            yield block
            block, room = [], _BLOCK
        while left:
            size = min(left, room)
            block.append((source, at, to, size))
            at, to, left, room = at + size, to + size, left - size, room - size
            if not room:
                yield block
                block, room = [], _BLOCK
    if block:
        yield block


def _copy(block: Sequence[_Extent], sources: Sequence[int], out: int) -> None:
    if not hasattr(_local, "view"):
        # Fresh memory for each block costs as much as copying it. The system has it back when the thread ends, which it
        # has not where the C library keeps it for others.
        _local.view = memoryview(mmap.mmap(-1, _BLOCK))
    view: memoryview = _local.view[: sum(size for *_, size in block)]
    done = 0
    for source, at, _, size in block:
        try:
            found = os.preadv(sources[source], [view[done : done + size]], at)
        except OSError as e:
            raise Void(f"its memory at {at:#x} cannot be read: {e.strerror}") from e
        if found != size:
            raise Void(_KILLED, errno.ENOMEM)
        done += size
    os.pwrite(out, view, block[0][2])
