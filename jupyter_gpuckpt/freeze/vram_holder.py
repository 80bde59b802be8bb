"""The program that holds a process's parked GPU memory.

``python -m jupyter_gpuckpt.freeze.vram_holder [UUID…]``, with the GPUs that it will most likely use.

The first line that it is told says what it is for, in JSON:
``[[[UUID, SIZE], …], FILE, "new|awaited|kept|brought", FOLDER, PID]``. These are the GPUs with the bytes on each, which
the file has one after the other, and the file, which is for the process's bytes, for others to write before it is
needed, or there already; or it is memory through which they are ``brought`` to the GPUs (`staging_buffer`). Only what
is not zero takes memory, here and in the file, which has holes for the rest. The FOLDER has the files named below, by
the process's PID (`path_of`).

It opens the physical memory of another process's blocks on the GPUs, copies them into the file (which lies in memory,
pinned) while the process is checkpointed, and fills the new blocks that the process makes itself afterwards: from the
memory that it still holds, or from the file. Where a GPU has room for it twice, many parts are gathered in few large
pieces meanwhile, which the process then opens and copies from itself: the driver takes as long to open a small part as
a large one, and this program need not open each of the new ones. The process's blocks are never this one's: the driver
loses a process that has another's memory open at its checkpoint, and memory that came from another cannot be handed on
a second time (measured on driver 580.159: cuMemExportToShareableHandle gives 1, INVALID_VALUE).

`KNOWN`, where it is there, has hashes (`vram_hashes`): chunks that have one of these are not copied, nor are zeros.
`MADE` then has the hashes of all chunks. `IN_USE`, where it is there, says of memory that is awaited or brought which
ranges of it are not zero (`ranges`). `WANTED` has the hashes of all chunks of memory that is brought; `BORROWED` then
says which ranges of it another process had (`borrow`), and `WRONG` which are not what was wanted (`verify`).

Lines: ``ready`` out, or ``ready to verify``, and then one answer to each of

- ``see PID FD``: open every part that comes through that process's socket, which goes on with its memory: ``seen``, how
  many bytes are not zero, and how many of them would be copied; or ``not seen``. When the process says by the FIFO
  `CHANGED` that it has other memory by now, all is closed again
- ``stage``: make memory ready for what would be copied: ``staged``
- ``take PID FD``: open every part that comes through that process's socket, but for those that are open already, and
  begin to copy; there is no answer
- ``zeros``: close the parts in which all is zero, or which are gathered; there is no answer
- ``copied``: wait for the copies: ``copied``; or ``no room``, how many bytes of memory they lack
- ``complete``: copy what was not, too, and give the file its name: ``complete``
- ``load``: begin to bring the file to the GPUs: ``loaded``; or ``no room``
- ``borrow PID FD SIZE…``: copy what is wanted of the memory that another process shows through its socket, which has so
  many bytes on each of these GPUs and goes on with it: ``borrowed``; or ``not borrowed``
- ``bring AT SIZE TO``: copy bytes of the file at an offset to where they belong in the parked memory: that offset
- ``verify``: make the hashes of all that was brought and borrowed: ``verified``; or ``wrong``
- ``fill PID FD [PROTOCOL]``: fill every part that comes through that socket, or lend what is held to a process that can
  copy from it (`PROTOCOL` 4): ``filled``
- ``rest``: when the copies are done, give up all that this program has on the GPU, its context too: ``resting``
- ``rise``: be ready to fill again: ``ready``
- anything else: ``unknown``

At the end of its input it first ends what it has begun: when the keeper is killed, the file becomes whole, and the
process can have its memory back from there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import mmap
import os
import select
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..linux import memory
from .held_vram import SLACK, Addresses, Gpu, Item, Part, Piece, close_all, free_bytes, gpu_of, gpus_of, number_of, run
from .holder_messages import ITEM, NUMBER, Batch, batches, lend, socket_of
from .parking import BORROWED, IN_USE, KNOWN, MADE, WANTED, WRONG, single_hashes
from .parking_channel import CHANGED, path_of
from .populate import populate_mapped, resize
from .ranges import Range, data_of, joined, size_of, within, without
from .staging_buffer import READY, READY_TO_VERIFY
from .vram_hashes import CHUNK, ZEROS, Hasher

__all__ = ["main"]

_CAN_COPY = 4
"""From this protocol on the process can copy from pieces itself (parking.c)."""
_FOR_ALL = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for the contexts of all GPUs
_STEP = 2 << 30
"""Bytes of memory that are made ready at once, about."""
_UNKNOWN_HASH = bytes(32)
"""What stands in `WANTED` in place of the hash of what is no chunk of the store's."""
_HOST_SLACK = 256 << 20
"""Bytes of host memory to leave to others."""
_NO_ROOM = "no room"
_UNKNOWN = "unknown"
_LENDS = 3.0  # for how long one that something is borrowed of may take over one part, in seconds; it may hang


@dataclass(frozen=True)
class _Looked:
    """What was found in another's memory: where it is not zero, and what of that is new or found elsewhere."""

    in_use: list[Range]
    new: list[Range]
    known: list[Range]
    hashes: bytes


class _Holder:
    def __init__(self, places: Sequence[tuple[str, int]], file: Path, state: str, note: Callable[[str], Path]) -> None:
        self._resting = False
        self._size = size = sum(of_gpu for _, of_gpu in places)
        self._whole, self._part, self._note = file, file.with_name(file.name + ".part"), note
        self._is_brought = state == "brought"
        used = self._part if state == "new" else self._whole
        if state in ("new", "awaited"):
            resize(used, size)
        self._gpus = gpus_of(places)
        with used.open("r+b") as opened:
            self._file = mmap.mmap(opened.fileno(), 0)
            self._in_use = data_of(opened.fileno()) if state == "kept" else self._told_in_use()
            """Where the bytes are not zero; all, as long as that is not known."""
        first: Any = ctypes.c_char.from_buffer(self._file)
        self._staging = ctypes.addressof(first)
        self._pinned: list[Range] = []
        """What of the file is ready to be copied to and from, each range by a call of the driver's."""
        self._is_open = self._has_taken = False
        """Whether it has another's memory open, and whether nobody else has."""
        self._failed = ""
        """Why that could not be copied."""
        self._expected: list[Range] = [(0, size)]
        """What of it would be copied."""
        self._left: list[Range] = []
        """What of it was not copied, since it is found elsewhere."""
        self._lenders: list[Gpu] = []
        """What is open of a process that something was borrowed of: to close many parts takes long."""
        self.verifies = False
        """Whether it can verify what it is brought."""
        self.changes: int | None = None
        """Where the process says that it has other memory by now than what is open here."""
        if state == "new":
            self._on_all(_have_hasher)
        elif self._is_brought:
            self._pin([(0, len(self._file))])
            self._on_all(lambda gpu: gpu.make_pieces(self._in_use))
            self._on_all(_have_hasher)
            self.verifies = self._knows_all_wanted() and all(gpu.hasher is not None for gpu in self._gpus)
        else:
            self._pin(self._in_use)

    def _told_in_use(self) -> list[Range]:
        try:
            told = self._note(IN_USE).read_bytes()
        except FileNotFoundError:
            return [(0, self._size)]
        return [(begin, begin + size) for begin, size in ITEM.iter_unpack(told)]

    def _knows_all_wanted(self) -> bool:
        try:
            return _UNKNOWN_HASH not in single_hashes(self._note(WANTED).read_bytes())
        except FileNotFoundError:
            return False

    def _each(self) -> Iterator[Gpu]:
        """Yield each GPU, and use it meanwhile."""
        for gpu in self._gpus:
            gpu.use()
            yield gpu

    def _on_all(self, what: Callable[[Gpu], object]) -> None:
        """Do something for all GPUs at once."""

        def do(gpu: Gpu) -> None:
            gpu.use()
            what(gpu)

        with ThreadPoolExecutor(len(self._gpus)) as pool:
            for done in [pool.submit(do, gpu) for gpu in self._gpus]:
                done.result()

    def _of(self, offset: int, size: int) -> Gpu:
        """Return the GPU whose bytes these are."""
        return gpu_of(self._gpus, Item(offset, size, -1))

    def _by_gpu(self, batch: Batch) -> Iterator[tuple[Gpu, list[Item]]]:
        for gpu, items in itertools.groupby(batch.items, lambda item: self._of(item.offset, item.size)):
            gpu.use()
            yield gpu, list(items)

    def _pin(self, ranges: Sequence[Range]) -> None:
        """Make parts of the file ready that are not."""
        populate_mapped((self._staging + begin, end - begin) for begin, end in ranges)
        self._register(ranges)
        self._pinned = sorted([*self._pinned, *ranges])

    def _register(self, ranges: Iterable[Range]) -> None:
        self._gpus[0].use()
        for begin, end in ranges:
            run("cuMemHostRegister", self._staging + begin, end - begin, _FOR_ALL)

    # -- before

    def see(self, pid: int, fd: int) -> str:
        self._close_seen()
        self.changes = os.open(self._note(CHANGED), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            with socket_of(pid, fd, 0) as there:
                self._open(batches(there))
                there.send(NUMBER.pack(0))
            looked = self._look()
        except (RuntimeError, OSError) as e:
            print(f"it was not seen: {e}", file=sys.stderr)
            self._close_seen()
            return "not seen"
        self._expected = looked.new
        return f"seen {size_of(looked.in_use)} {size_of(looked.new)}"

    def _open(self, batches: Iterable[Batch]) -> None:
        self._is_open = True
        for batch in batches:
            for gpu, items in self._by_gpu(batch):
                gpu.open(items)
        # Not while others are mapped, nor copied: each then takes ten times as long (1,200 parts: 0.5 s, not 0.1).
        for gpu in self._each():
            gpu.allow()

    def look_for_changes(self) -> None:
        """Close what is open of a process that goes on, where it has other memory by now."""
        if self.changes is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self.changes, 1)
                self._close_seen()

    def _close_seen(self) -> None:
        if self._is_open and not self._has_taken:
            for gpu in self._each():
                gpu.give_up()
            self._is_open = False
        changes, self.changes = self.changes, None
        if changes is not None:
            os.close(changes)  # by this the process knows that all is closed

    def stage(self) -> str:
        step: list[Range] = []
        for begin, end in self._expected:
            for at in range(begin, end, _STEP):
                step.append((at, min(at + _STEP, end)))
                if size_of(step) >= _STEP:
                    self._pin(step)
                    step = []
                    self.look_for_changes()
        self._pin(step)
        return "staged"

    # -- there

    def take(self, pid: int, fd: int) -> None:
        self.look_for_changes()
        with socket_of(pid, fd, int(self._is_open)) as there:
            coming = batches(there)
            first = next(coming)
            if not self._is_open or first.items:
                self._close_seen()
                self._open(itertools.chain([first], coming))
            there.send(NUMBER.pack(0))
        # From here on nobody else has it. What cannot be copied can still be given back.
        self._has_taken = True
        self._close_seen()
        try:
            looked = self._look()
            _write(self._note(MADE), looked.hashes)
            self._in_use, self._left = looked.in_use, looked.known
            self._on_all(lambda gpu: gpu.gather(looked.in_use))
            self._copy_out(looked.new)
        except (RuntimeError, OSError) as e:
            self._failed = str(e)

    def give_up_zeros(self) -> None:
        """Close the parts in which all is zero. The GPU clears what it gets back, for which the driver waits then."""
        for gpu in self._each() if self._has_taken else ():
            gpu.close_gathered()
            gpu.close_zeros(self._in_use)

    def _look(self) -> _Looked:
        """See what has to be copied of what is open."""
        made: dict[int, bytes] = {}
        try:
            self._on_all(lambda gpu: made.update({gpu.first: gpu.hashes()}))
        except RuntimeError as e:
            print(f"all is copied: {e}", file=sys.stderr)
            everything = joined(one.range for gpu in self._gpus for one in gpu.held)
            return _Looked(everything, everything, [], b"")
        try:
            known = set(single_hashes(self._note(KNOWN).read_bytes()))
        except FileNotFoundError:
            known = set()
        hashes = b"".join(made[at] for at in sorted(made))
        found: dict[str, list[Range]] = {"zero": [], "known": [], "new": []}
        for number, key in enumerate(single_hashes(hashes)):
            kind = "zero" if key == ZEROS else "known" if key in known else "new"
            found[kind].append((number * CHUNK, (number + 1) * CHUNK))
        in_use = sorted(found["known"] + found["new"])
        return _Looked(joined(in_use), joined(found["new"]), joined(found["known"]), hashes)

    def _copy_out(self, ranges: Sequence[Range]) -> None:
        if any(True for _ in without(ranges, [one.range for gpu in self._gpus for one in gpu.held])):
            raise RuntimeError("a part of it was given back")
        missing = list(without(ranges, self._pinned))
        lacking = size_of(missing) + _HOST_SLACK - memory.available(os.getpid()) if missing else 0
        if lacking > 0:
            raise RuntimeError(f"{_NO_ROOM} {lacking}")
        self._pin(missing)
        pieces = list(within(ranges, self._pinned))

        def copy(gpu: Gpu) -> None:
            for at, size, address in gpu.held_within(pieces):
                run("cuMemcpyDtoHAsync", self._staging + at, address, size, 0)

        self._on_all(copy)

    def copied(self) -> str:
        """Wait for the copies; where nothing was left out, the file has its name now."""
        if self._resting:
            return "copied"
        if self._failed:
            print(self._failed, file=sys.stderr)
            return self._failed if self._failed.startswith(_NO_ROOM) else "not copied"
        for _ in self._each():
            run("cuCtxSynchronize")
        if self._has_taken and not self._left and self._part.exists():
            self._part.rename(self._whole)
        return "copied"

    def complete(self) -> str:
        """Copy what was left out, too: the file is whole."""
        left, self._left = self._left, []
        try:
            self._copy_out(left)
        except (RuntimeError, OSError) as e:
            self._failed = str(e)
        return "complete" if self.copied() == "copied" else "not complete"

    def end(self) -> None:
        """Leave the bytes in the file, where nobody has them back yet."""
        if self._has_taken and any(gpu.held for gpu in self._gpus):
            self.complete()
        else:
            self.copied()

    # -- and back

    def load(self) -> str:
        for gpu in self._each():
            if not gpu.has_room_for(list(within([(gpu.first, gpu.end)], self._in_use))):
                return _NO_ROOM
        pieces = list(within(self._in_use, self._pinned))
        for gpu in self._each():
            gpu.make_pieces(self._in_use)
            for at, size, address in gpu.held_within(pieces):
                run("cuMemcpyHtoDAsync", address, self._staging + at, size, 0)
        return "loaded"

    def borrow(self, pid: int, fd: int, sizes: Sequence[int]) -> str:
        lenders = self._lenders = gpus_of([(gpu.uuid, size) for gpu, size in zip(self._gpus, sizes, strict=True)])
        try:
            with socket_of(pid, fd, 0, _LENDS) as there:
                for batch in batches(there):
                    for first, items in itertools.groupby(batch.items, lambda item: gpu_of(lenders, item).first):
                        lender = next(one for one in lenders if one.first == first)
                        lender.use()
                        lender.open(items)
                there.send(NUMBER.pack(0))
            wanted, has = single_hashes(self._note(WANTED).read_bytes()), list[Range]()
            lender_of = {gpu.first: lender for gpu, lender in zip(self._gpus, lenders, strict=True)}

            def copy(gpu: Gpu) -> None:
                lender_of[gpu.first].allow()
                has.extend(gpu.copy_wanted(lender_of[gpu.first], wanted))

            self._on_all(copy)
        except (RuntimeError, OSError) as e:
            print(f"nothing was borrowed: {e}", file=sys.stderr)
            self._close_lenders()
            return "not borrowed"
        _write(self._note(BORROWED), b"".join(ITEM.pack(begin, end - begin) for begin, end in sorted(has)))
        return "borrowed"

    def _close_lenders(self) -> None:
        while self._lenders:
            lender = self._lenders.pop()
            lender.use()
            lender.give_up()
            lender.rest()

    def verify(self) -> str:
        """See whether what was brought and borrowed is what was wanted."""
        wanted, wrong = single_hashes(self._note(WANTED).read_bytes()), list[Range]()
        self._on_all(lambda gpu: wrong.extend(gpu.wrong(wanted)))
        if not wrong:
            return "verified"
        _write(self._note(WRONG), b"".join(ITEM.pack(begin, end - begin) for begin, end in sorted(wrong)))
        return "wrong"

    def bring(self, at: int, size: int, to: int) -> str:
        if not 0 <= to <= to + size <= self._size or at + size > len(self._file):
            raise RuntimeError("there is more than there is room for")
        for gpu in self._each():
            for offset, part, address in gpu.held_within([(to, to + size)]):
                run("cuMemcpyHtoD", address, self._staging + at + offset - to, part)
        return str(at)

    def rest(self) -> str:
        if (said := self.copied()) != "copied":
            return said
        for gpu in self._each():
            gpu.give_up()
        self._gpus[0].use()
        for begin, _ in self._pinned:
            run("cuMemHostUnregister", self._staging + begin)
        for gpu in self._each():
            gpu.rest()
        self._resting = True
        return "resting"

    def rise(self) -> str:
        for gpu in self._gpus:
            gpu.rise()
        self._register(self._pinned)
        self._resting = False
        return "ready"

    def fill(self, pid: int, fd: int, protocol: int = 0) -> str:
        for gpu in self._each():
            gpu.close_gathered()
        lent = self._lent() if protocol >= _CAN_COPY else []
        with socket_of(pid, fd, len(lent)) as there:
            lend(there, lent)
            addresses = {gpu.first: gpu.reserve() for gpu in self._each()}
            # Nothing comes where the process has copied all.
            filled = self._fill(there, addresses)
            there.send(NUMBER.pack(0))
        # The process goes on meanwhile.
        close_all(filled)
        for reserved in addresses.values():
            reserved.close()
        for gpu in self._each():
            gpu.give_up()
        self._close_lenders()
        return "filled"

    def _lent(self) -> list[Piece]:
        """Return all that is held as pieces that can be lent; nothing where one of the GPUs has some that cannot."""
        lent = [gpu.lent(self._in_use) for gpu in self._each() if gpu.size]
        return list(itertools.chain(*lent)) if all(lent) else []

    def _fill(self, there: socket.socket, addresses: dict[int, Addresses]) -> list[Part | Piece]:
        """Fill what comes; return what there is to close of it, and of what was held."""
        room, filled, spent = 0, list[Part | Piece](), list[Part | Piece]()
        last: Gpu | None = None
        """The GPU that `room` is of."""
        for batch in batches(there):
            for gpu, items in self._by_gpu(batch):
                parts = addresses[gpu.first].map(items)
                addresses[gpu.first].allow(parts)
                filled += parts
                self._copy_to(gpu, parts)
                spent += gpu.spent(parts[-1].range[1])
                room = (room if gpu is last else 0) - sum(part.size for part in parts)
                last = gpu
            for _ in self._each():
                run("cuCtxSynchronize")
            if batch.after.size == 0:
                break
            gpu = self._of(batch.after.offset, batch.after.size)
            room = room if gpu is last else 0
            if batch.after.size > room:  # it waits
                close_all(spent)
                spent.clear()
                more = self._room_for(gpu, batch.after.size) - room
                there.send(NUMBER.pack(more))
                room, last = room + more, gpu
        return spent + filled

    def _copy_to(self, gpu: Gpu, new: Sequence[Part]) -> None:
        """Begin to copy what belongs into parts that follow one another; zeros too, whatever the driver gives out."""
        first = new[0].offset
        here, start = [(first, new[-1].range[1])], new[0].address
        in_use = list(within(here, self._in_use))
        for begin, end in without(here, in_use):
            run("cuMemsetD8", start + begin - first, 0, end - begin)
        if gpu.held:
            for at, size, address in gpu.held_within(in_use):
                run("cuMemcpyDtoDAsync", start + at - first, address, size, 0)
        else:
            for begin, end in within(in_use, self._pinned):
                run("cuMemcpyHtoDAsync", start + begin - first, self._staging + begin, end - begin, 0)

    def _room_for(self, gpu: Gpu, size: int) -> int:
        """Return for how many bytes a GPU has room beside what is held; for so many, if need be without that."""
        gpu.use()
        free = free_bytes() - SLACK
        if free < size and self._lenders:
            self._close_lenders()
            gpu.use()
            free = free_bytes() - SLACK
        if free < size and gpu.held and not self._is_brought and self.complete() == "complete":
            # What is held is in the file too; from there it takes no memory of the GPU.
            gpu.use()
            gpu.give_up()
            free = free_bytes() - SLACK
        return max(size, free)


def _have_hasher(gpu: Gpu) -> None:
    try:
        gpu.hasher = Hasher()
    except (RuntimeError, OSError) as e:
        print(f"all is copied: {e}", file=sys.stderr)


def _write(file: Path, data: bytes) -> None:
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as opened:
        opened.write(data)


def main(*likely: str) -> None:
    """Be that program."""
    # Until the process has its memory back, this program is as much worth as the process.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-1000")
    with _likely(likely):
        if not (told := _first_line()):
            return
        places, file, state, folder, pid = json.loads(told)
        holder = _Holder(places, Path(file), state, functools.partial(path_of, Path(folder), pid))
    _say((READY_TO_VERIFY if holder.verifies else READY).decode())
    try:
        for line in _lines(holder):
            if (said := _answer(holder, line)) is not None:
                _say(said)
    finally:
        holder.end()


@contextlib.contextmanager
def _likely(uuids: Sequence[str]) -> Iterator[None]:
    """Have contexts on these GPUs within the block, so that what wants them there has them at once."""
    kept = []

    def retain(uuid: str) -> None:
        device = number_of(uuid)
        run("cuDevicePrimaryCtxRetain", device)
        kept.append(device)

    with contextlib.suppress(RuntimeError):  # what fails here fails again where it is needed
        run("cuInit", 0)
        with ThreadPoolExecutor(len(uuids) or 1) as pool:
            list(pool.map(retain, uuids))
    try:
        yield
    finally:
        for device in kept:
            run("cuDevicePrimaryCtxRelease", device)


def _first_line() -> bytes:
    """Return it, and read nothing that comes after it; nothing where there is none."""
    line = bytearray()
    while (one := os.read(sys.stdin.fileno(), 1)) not in (b"", b"\n"):
        line += one
    return bytes(line)


def _lines(holder: _Holder) -> Iterator[str]:
    """Yield what is asked; meanwhile listen to the process that goes on with what is open here."""
    heard, asked = b"", sys.stdin.fileno()
    while True:
        watched = [asked] if holder.changes is None else [asked, holder.changes]
        readable, _, _ = select.select(watched, [], [])
        holder.look_for_changes()
        if asked in readable:
            if not (more := os.read(asked, 65536)):
                return
            *lines, heard = (heard + more).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in lines)


def _answer(holder: _Holder, line: str) -> str | None:
    """Do what a line asks for, and return the answer; None where there is none."""
    command, *words = line.split() or [""]
    if not all(word.isdecimal() for word in words):
        return _UNKNOWN
    match command, [int(word) for word in words]:
        case "see", [pid, fd]:
            return holder.see(pid, fd)
        case "stage", []:
            return holder.stage()
        case "take", [pid, fd]:
            holder.take(pid, fd)
            return None
        case "zeros", []:
            holder.give_up_zeros()
            return None
        case "copied", []:
            return holder.copied()
        case "complete", []:
            return holder.complete()
        case "load", []:
            return holder.load()
        case "borrow", [pid, fd, *sizes]:
            return holder.borrow(pid, fd, sizes)
        case "bring", [at, size, to]:
            return holder.bring(at, size, to)
        case "verify", []:
            return holder.verify()
        case "fill", [pid, fd, *protocol]:
            return holder.fill(pid, fd, *protocol[:1])
        case "rest", []:
            return holder.rest()
        case "rise", []:
            return holder.rise()
    return _UNKNOWN  # of a later version: what is held here is not lost for it


def _say(line: str) -> None:
    # A keeper that was killed hears nothing; what was begun is ended all the same.
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


if __name__ == "__main__":
    os.umask(0o077)
    main(*sys.argv[1:])
