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

import bisect
import contextlib
import ctypes
import functools
import itertools
import json
import mmap
import os
import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from ..linux import memory
from .parking import BORROWED, IN_USE, KNOWN, MADE, WANTED, WRONG, single_hashes
from .parking_channel import CHANGED, path_of
from .populate import populate_mapped, resize
from .ranges import Range, data_of, joined, size_of, within, without
from .staging_buffer import READY, READY_TO_VERIFY
from .vram_hashes import CHUNK, ZEROS, Hasher

__all__ = ["main"]

_ITEM = struct.Struct("<QQ")
"""What a message has of each part: its offset in the file, and its size. The last is the part that comes after these,
without a descriptor yet; its size is 0 where there is none (parking.c)."""
_NUMBER = struct.Struct("<Q")
"""The answer: for how many bytes more there is room. The first one is a greeting: 1 where all that it was shown is open
here, or how many pieces are lent. The last one thanks."""
_CAN_COPY = 4
"""From this protocol on the process can copy from pieces itself (parking.c)."""
_WORTH_GATHERING = 64
"""Parts on a GPU from which on they are gathered: to open them takes 0.15 ms each."""
_BATCH = 64
"""Parts in one message at most."""
_FOR_ALL = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for the contexts of all GPUs
_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_PIDFD_GETFD = 438
_SLACK = 64 << 20
"""Bytes of GPU memory to leave free when a part of a block is there twice for a moment."""
_REST = 2 << 30
"""Bytes of GPU memory to leave for what the driver brings back itself."""
_PIECE = 1 << 30
"""Bytes that are brought to the GPU at once: no fewer than a part of a block has (parking.c)."""
_STEP = 2 << 30
"""Bytes of memory that are made ready at once, about."""
_UNKNOWN_HASH = bytes(32)
"""What stands in `WANTED` in place of the hash of what is no chunk of the store's."""
_HOST_SLACK = 256 << 20
"""Bytes of host memory to leave to others."""
_NO_ROOM = "no room"
_UNKNOWN = "unknown"
_LIMIT = 60.0  # for how long the process may take over one part, in seconds
_LENDS = 3.0  # and one that something is borrowed of: one that hangs is what people restore from


def _run(call: str, *arguments: Any) -> Any:
    result, *values = getattr(driver, call)(*arguments)
    if int(result):
        raise RuntimeError(f"{call} gave {result.name}")
    return values[0] if values else None


@dataclass(frozen=True)
class _Item:
    """A part of another process's memory: where the file has it, and a descriptor of it; -1 where there is none yet."""

    offset: int
    size: int
    fd: int


@dataclass(frozen=True)
class _Batch:
    """One message: parts of another process's memory, and the one after them; its size is 0 where there is none."""

    items: list[_Item]
    after: _Item


class _Addresses:
    """Addresses for all of the parked memory of a GPU; in them every part has its place, by its offset in the file."""

    def __init__(self, device: int, first: int, size: int) -> None:
        self._device, self._size, self._first = device, size, first
        self._start = int(_run("cuMemAddressReserve", size, 0, 0, 0))

    def map(self, items: Iterable[_Item]) -> list[_Part]:
        """Open another process's parts, which follow one another, and map them; not to be used before `allow`."""
        parts = []
        for item in items:
            try:
                handle = _run("cuMemImportFromShareableHandle", item.fd, _FD)
            finally:
                os.close(item.fd)
            address = self._start + item.offset - self._first
            _run("cuMemMap", address, item.size, 0, handle, 0)
            parts.append(_Part(item.offset, item.size, address, handle))
        return parts

    def allow(self, parts: Sequence[_Part]) -> None:
        """Let the GPU use parts that follow one another."""
        if parts:
            _allow(self._device, parts[0].address, parts[-1].offset + parts[-1].size - parts[0].offset)

    def close(self) -> None:
        _run("cuMemAddressFree", self._start, self._size)


class _Part:
    """A part of another process's memory, mapped here; `offset` is where its bytes are in the file."""

    def __init__(self, offset: int, size: int, address: int, handle: Any) -> None:
        self.offset, self.size, self.address = offset, size, address
        self._handle = handle

    @property
    def range(self) -> Range:
        """Where its bytes are in the file."""
        return self.offset, self.offset + self.size

    def close(self) -> None:
        _run("cuMemUnmap", self.address, self.size)
        _run("cuMemRelease", self._handle)


class _Piece:
    """A piece of the file, in GPU memory of this program's own; a multiple of `CHUNK` bytes."""

    def __init__(self, device: int, offset: int, size: int) -> None:
        self.offset, self.size = offset, size
        kind = driver.CUmemAllocationProp()
        kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location.type, kind.location.id = _ON_DEVICE, device
        kind.requestedHandleTypes = _FD
        self._handle = _run("cuMemCreate", size, kind, 0)
        self.address = int(_run("cuMemAddressReserve", size, 0, 0, 0))
        _run("cuMemMap", self.address, size, 0, self._handle, 0)
        _allow(device, self.address, size)

    @property
    def range(self) -> Range:
        """Where its bytes are in the file."""
        return self.offset, self.offset + self.size

    def exported(self) -> int:
        """Return a descriptor by which another process can open it."""
        return int(_run("cuMemExportToShareableHandle", self._handle, _FD, 0))

    def close(self) -> None:
        _run("cuMemUnmap", self.address, self.size)
        _run("cuMemAddressFree", self.address, self.size)
        _run("cuMemRelease", self._handle)


class _Gpu:
    """One GPU, and what this program has there: the bytes of the file from `first` to `end`.

    Attributes
    ----------
    hasher : makes hashes of what is there; None where all is copied.
    held : what of the bytes is on the GPU, in order: all that are not zero from some offset on, or nothing.
    """

    def __init__(self, uuid: str, first: int, size: int) -> None:
        self.uuid, self.first, self.size = uuid, first, size
        self.end = first + size
        self._device = _number_of(uuid)
        self._context = _run("cuDevicePrimaryCtxRetain", self._device)
        self.hasher: Hasher | None = None
        self.held: deque[_Part | _Piece] = deque()
        self._addresses: _Addresses | None = None
        """Where what is another's is mapped."""
        self._gathered: list[_Part | _Piece] = []
        """Parts whose bytes are in pieces by now."""

    def use(self) -> None:
        """Have this thread's calls be for this GPU."""
        _run("cuCtxSetCurrent", self._context)

    def reserve(self) -> _Addresses:
        return _Addresses(self._device, self.first, self.size)

    def open(self, items: Iterable[_Item]) -> None:
        """Open parts of another's memory, and hold them; not to be used before `allow`."""
        if self._addresses is None:
            self._addresses = self.reserve()
        self.held += self._addresses.map(items)

    def allow(self) -> None:
        """Let the GPU use all that was opened."""
        if self._addresses is not None:
            self._addresses.allow([part for part in self.held if isinstance(part, _Part)])

    def hashes(self) -> bytes:
        """Return the hashes of all chunks, of a process's parts that were opened. Raises `RuntimeError`."""
        if self.hasher is None:
            raise RuntimeError("there are no hashes")
        size = sum(part.size for part in self.held)
        made = self.hasher.hashes(self.held[0].address, size // CHUNK) if size else b""
        # It may have freed some since it was asked: the file has holes there.
        return made + ZEROS * ((self.size - size) // CHUNK)

    def gather(self, in_use: Sequence[Range]) -> None:
        """Copy what is in use of many parts into few pieces, and hold those, where there is room for both."""
        parts, used = list(self.held), list(within([(self.first, self.end)], in_use))
        if len(parts) < _WORTH_GATHERING or _free_bytes() <= size_of(used) + 2 * _PIECE + _REST:
            return
        pieces = deque[_Part | _Piece]()
        try:
            pieces.extend(self._pieces(used))
        except RuntimeError as e:  # another program has taken the memory
            print(f"nothing was gathered: {e}", file=sys.stderr)
            _close(pieces)
            return
        for piece in pieces:
            for at, size, address in self.held_within(within([piece.range], used)):
                _run("cuMemcpyDtoDAsync", piece.address + at - piece.offset, address, size, 0)
        _run("cuCtxSynchronize")
        self._gathered, self.held = parts, pieces

    def close_gathered(self) -> None:
        """Close the parts that are gathered."""
        gathered, self._gathered = self._gathered, []
        _close(gathered)

    def close_zeros(self, in_use: Sequence[Range]) -> None:
        """Close the parts in which all is zero."""
        parts = list(self.held)
        self.held.clear()
        for part in parts:
            if any(within([part.range], in_use)):
                self.held.append(part)
            else:
                part.close()

    def make_pieces(self, in_use: Sequence[Range]) -> None:
        """Make memory for what is in use of the bytes, and hold it."""
        self.held.extend(self._pieces(in_use))

    def _pieces(self, in_use: Sequence[Range]) -> Iterator[_Piece]:
        for offset in range(self.first, self.end, _PIECE):
            inside = list(within([(offset, min(offset + _PIECE, self.end))], in_use))
            if inside:
                begin = inside[0][0] // CHUNK * CHUNK
                yield _Piece(self._device, begin, -((begin - inside[-1][1]) // CHUNK) * CHUNK)

    def lent(self, in_use: Sequence[Range]) -> list[_Piece]:
        """Return what is held, all in pieces, with zeros where it is not in use; nothing where it cannot be lent.

        The process will have memory for all of it before it gives the pieces back.
        """
        pieces = [one for one in self.held if isinstance(one, _Piece)]
        used = list(within([(self.first, self.end)], in_use))
        if (
            len(pieces) < len(self.held)
            or any(True for _ in without(used, [one.range for one in pieces]))
            or _free_bytes() - _SLACK < self.size
        ):
            return []
        for piece in pieces:
            for begin, end in without([piece.range], used):
                _run("cuMemsetD8", piece.address + begin - piece.offset, 0, end - begin)
        _run("cuCtxSynchronize")
        return pieces

    def held_within(self, ranges: Iterable[Range]) -> Iterator[tuple[int, int, int]]:
        """Yield where bytes of these ranges are, of those that are here: the offset, their number, and the address."""
        held = list(self.held)
        for begin, end in ranges:
            first = bisect.bisect_right(held, begin, key=lambda one: one.offset + one.size)
            for one in itertools.islice(held, first, None):
                if one.offset >= end:
                    break
                at, upto = max(begin, one.offset), min(end, one.offset + one.size)
                yield at, upto - at, one.address + at - one.offset

    def copy_wanted(self, lender: _Gpu, wanted: Sequence[bytes]) -> list[Range]:
        """Copy the chunks of the file that are `wanted` from what is open of another process on the same GPU.

        Return where they belong. The process may write to its memory meanwhile.
        """
        if not lender.held or self.hasher is None:
            return []
        lender.hasher = self.hasher
        source = lender.held[0].address
        found = {
            key: source + number * CHUNK for number, key in enumerate(single_hashes(lender.hashes())) if key != ZEROS
        }
        runs: list[tuple[int, int, int]] = []  # where it begins and ends in the file, and the address of its bytes
        for at in range(self.first, self.end, CHUNK):
            if (there := found.get(wanted[at // CHUNK])) is None:
                continue
            if runs and runs[-1][1] == at and there - runs[-1][2] == at - runs[-1][0]:
                runs[-1] = (runs[-1][0], at + CHUNK, runs[-1][2])
            else:
                runs.append((at, at + CHUNK, there))
        for begin, end, there in runs:
            for at, size, address in self.held_within([(begin, end)]):
                _run("cuMemcpyDtoDAsync", address, there + at - begin, size, 0)
        _run("cuCtxSynchronize")
        return joined((begin, end) for begin, end, _ in runs)

    def wrong(self, wanted: Sequence[bytes]) -> list[Range]:
        """Return which chunks of what is held are not what is `wanted`. Raises `RuntimeError`."""
        if self.hasher is None:
            raise RuntimeError("there are no hashes")
        found = []
        for one in self.held:
            made = single_hashes(self.hasher.hashes(one.address, one.size // CHUNK))
            for number, key in enumerate(made, one.offset // CHUNK):
                if key != wanted[number] != ZEROS:  # where it is zero nothing was brought
                    found.append((number * CHUNK, (number + 1) * CHUNK))
        return joined(found)

    def spent(self, offset: int) -> Iterator[_Part | _Piece]:
        """Let go of what has only bytes before an offset."""
        while self.held and self.held[0].range[1] <= offset:
            yield self.held.popleft()

    def give_up(self) -> None:
        self.close_gathered()
        _close(self.held)
        self.held.clear()
        if self._addresses is not None:
            self._addresses.close()
            self._addresses = None

    def rest(self) -> None:
        """Give its context up."""
        # The driver's own state stays, which takes no GPU memory; starting again would take half a second.
        _run("cuCtxSetCurrent", None)
        _run("cuDevicePrimaryCtxRelease", self._device)

    def rise(self) -> None:
        self._context = _run("cuDevicePrimaryCtxRetain", self._device)


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
        self._gpus = _gpus(places)
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
        self._lenders: list[_Gpu] = []
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
        return [(begin, begin + size) for begin, size in _ITEM.iter_unpack(told)]

    def _knows_all_wanted(self) -> bool:
        try:
            return _UNKNOWN_HASH not in single_hashes(self._note(WANTED).read_bytes())
        except FileNotFoundError:
            return False

    def _each(self) -> Iterator[_Gpu]:
        """Yield each GPU, and use it meanwhile."""
        for gpu in self._gpus:
            gpu.use()
            yield gpu

    def _on_all(self, what: Callable[[_Gpu], object]) -> None:
        """Do something for all GPUs at once."""

        def do(gpu: _Gpu) -> None:
            gpu.use()
            what(gpu)

        with ThreadPoolExecutor(len(self._gpus)) as pool:
            for done in [pool.submit(do, gpu) for gpu in self._gpus]:
                done.result()

    def _of(self, offset: int, size: int) -> _Gpu:
        """Return the GPU whose bytes these are."""
        return _of(self._gpus, _Item(offset, size, -1))

    def _by_gpu(self, batch: _Batch) -> Iterator[tuple[_Gpu, list[_Item]]]:
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
            _run("cuMemHostRegister", self._staging + begin, end - begin, _FOR_ALL)

    # -- before

    def see(self, pid: int, fd: int) -> str:
        self._close_seen()
        self.changes = os.open(self._note(CHANGED), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            with _socket_of(pid, fd, 0) as there:
                self._open(_batches(there))
                there.send(_NUMBER.pack(0))
            looked = self._look()
        except (RuntimeError, OSError) as e:
            print(f"it was not seen: {e}", file=sys.stderr)
            self._close_seen()
            return "not seen"
        self._expected = looked.new
        return f"seen {size_of(looked.in_use)} {size_of(looked.new)}"

    def _open(self, batches: Iterable[_Batch]) -> None:
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
        with _socket_of(pid, fd, int(self._is_open)) as there:
            batches = _batches(there)
            first = next(batches)
            if not self._is_open or first.items:
                self._close_seen()
                self._open(itertools.chain([first], batches))
            there.send(_NUMBER.pack(0))
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

        def copy(gpu: _Gpu) -> None:
            for at, size, address in gpu.held_within(pieces):
                _run("cuMemcpyDtoHAsync", self._staging + at, address, size, 0)

        self._on_all(copy)

    def copied(self) -> str:
        """Wait for the copies; where nothing was left out, the file has its name now."""
        if self._resting:
            return "copied"
        if self._failed:
            print(self._failed, file=sys.stderr)
            return self._failed if self._failed.startswith(_NO_ROOM) else "not copied"
        for _ in self._each():
            _run("cuCtxSynchronize")
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
        # While blocks are filled, a part of one is there twice, and of a piece the rest of which belongs to the next.
        for gpu in self._each():
            in_use = size_of(within([(gpu.first, gpu.end)], self._in_use))
            if _free_bytes() <= in_use + 2 * _PIECE + _REST:
                return _NO_ROOM
        pieces = list(within(self._in_use, self._pinned))
        for gpu in self._each():
            gpu.make_pieces(self._in_use)
            for at, size, address in gpu.held_within(pieces):
                _run("cuMemcpyHtoDAsync", address, self._staging + at, size, 0)
        return "loaded"

    def borrow(self, pid: int, fd: int, sizes: Sequence[int]) -> str:
        lenders = self._lenders = _gpus([(gpu.uuid, size) for gpu, size in zip(self._gpus, sizes, strict=True)])
        try:
            with _socket_of(pid, fd, 0, _LENDS) as there:
                for batch in _batches(there):
                    for first, items in itertools.groupby(batch.items, lambda item: _of(lenders, item).first):
                        lender = next(one for one in lenders if one.first == first)
                        lender.use()
                        lender.open(items)
                there.send(_NUMBER.pack(0))
            wanted, has = single_hashes(self._note(WANTED).read_bytes()), list[Range]()
            lender_of = {gpu.first: lender for gpu, lender in zip(self._gpus, lenders, strict=True)}

            def copy(gpu: _Gpu) -> None:
                lender_of[gpu.first].allow()
                has.extend(gpu.copy_wanted(lender_of[gpu.first], wanted))

            self._on_all(copy)
        except (RuntimeError, OSError) as e:
            print(f"nothing was borrowed: {e}", file=sys.stderr)
            self._close_lenders()
            return "not borrowed"
        _write(self._note(BORROWED), b"".join(_ITEM.pack(begin, end - begin) for begin, end in sorted(has)))
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
        _write(self._note(WRONG), b"".join(_ITEM.pack(begin, end - begin) for begin, end in sorted(wrong)))
        return "wrong"

    def bring(self, at: int, size: int, to: int) -> str:
        if not 0 <= to <= to + size <= self._size or at + size > len(self._file):
            raise RuntimeError("there is more than there is room for")
        for gpu in self._each():
            for offset, part, address in gpu.held_within([(to, to + size)]):
                _run("cuMemcpyHtoD", address, self._staging + at + offset - to, part)
        return str(at)

    def rest(self) -> str:
        if (said := self.copied()) != "copied":
            return said
        for gpu in self._each():
            gpu.give_up()
        self._gpus[0].use()
        for begin, _ in self._pinned:
            _run("cuMemHostUnregister", self._staging + begin)
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
        with _socket_of(pid, fd, len(lent)) as there:
            _lend(there, lent)
            addresses = {gpu.first: gpu.reserve() for gpu in self._each()}
            # Nothing comes where the process has copied all.
            filled = self._fill(there, addresses)
            there.send(_NUMBER.pack(0))
        # The process goes on meanwhile.
        _close(filled)
        for reserved in addresses.values():
            reserved.close()
        for gpu in self._each():
            gpu.give_up()
        self._close_lenders()
        return "filled"

    def _lent(self) -> list[_Piece]:
        """Return all that is held as pieces that can be lent; nothing where one of the GPUs has some that cannot."""
        lent = [gpu.lent(self._in_use) for gpu in self._each() if gpu.size]
        return list(itertools.chain(*lent)) if all(lent) else []

    def _fill(self, there: socket.socket, addresses: dict[int, _Addresses]) -> list[_Part | _Piece]:
        """Fill what comes; return what there is to close of it, and of what was held."""
        room, filled, spent = 0, list[_Part | _Piece](), list[_Part | _Piece]()
        last: _Gpu | None = None
        """The GPU that `room` is of."""
        for batch in _batches(there):
            for gpu, items in self._by_gpu(batch):
                parts = addresses[gpu.first].map(items)
                addresses[gpu.first].allow(parts)
                filled += parts
                self._copy_to(gpu, parts)
                spent += gpu.spent(parts[-1].range[1])
                room = (room if gpu is last else 0) - sum(part.size for part in parts)
                last = gpu
            for _ in self._each():
                _run("cuCtxSynchronize")
            if batch.after.size == 0:
                break
            gpu = self._of(batch.after.offset, batch.after.size)
            room = room if gpu is last else 0
            if batch.after.size > room:  # it waits
                _close(spent)
                spent.clear()
                more = self._room_for(gpu, batch.after.size) - room
                there.send(_NUMBER.pack(more))
                room, last = room + more, gpu
        return spent + filled

    def _copy_to(self, gpu: _Gpu, new: Sequence[_Part]) -> None:
        """Begin to copy what belongs into parts that follow one another; zeros too, whatever the driver gives out."""
        first = new[0].offset
        here, start = [(first, new[-1].range[1])], new[0].address
        in_use = list(within(here, self._in_use))
        for begin, end in without(here, in_use):
            _run("cuMemsetD8", start + begin - first, 0, end - begin)
        if gpu.held:
            for at, size, address in gpu.held_within(in_use):
                _run("cuMemcpyDtoDAsync", start + at - first, address, size, 0)
        else:
            for begin, end in within(in_use, self._pinned):
                _run("cuMemcpyHtoDAsync", start + begin - first, self._staging + begin, end - begin, 0)

    def _room_for(self, gpu: _Gpu, size: int) -> int:
        """Return for how many bytes a GPU has room beside what is held; for so many, if need be without that."""
        gpu.use()
        free = _free_bytes() - _SLACK
        if free < size and self._lenders:
            self._close_lenders()
            gpu.use()
            free = _free_bytes() - _SLACK
        if free < size and gpu.held and not self._is_brought and self.complete() == "complete":
            # What is held is in the file too; from there it takes no memory of the GPU.
            gpu.use()
            gpu.give_up()
            free = _free_bytes() - _SLACK
        return max(size, free)


def _allow(device: int, address: int, size: int) -> None:
    """Let a GPU use memory that is mapped."""
    access = driver.CUmemAccessDesc()
    access.location.type, access.location.id = _ON_DEVICE, device
    access.flags = _READ_WRITE
    _run("cuMemSetAccess", address, size, [access], 1)


def _free_bytes() -> int:
    result, free, _ = driver.cuMemGetInfo()
    if int(result):
        raise RuntimeError(f"cuMemGetInfo gave {result.name}")
    return int(free)


def _gpus(places: Sequence[tuple[str, int]]) -> list[_Gpu]:
    """Make these GPUs this program's, which the file has so many bytes of."""
    _run("cuInit", 0)
    ends = itertools.accumulate(size for _, size in places)
    with ThreadPoolExecutor(len(places)) as pool:
        made = [pool.submit(_Gpu, uuid, end - size, size) for (uuid, size), end in zip(places, ends, strict=True)]
    return [one.result() for one in made]


def _of(gpus: Iterable[_Gpu], item: _Item) -> _Gpu:
    """Return the GPU whose bytes these are. Raises `RuntimeError`."""
    for gpu in gpus:
        if gpu.first <= item.offset and item.offset + item.size <= gpu.end:
            return gpu
    raise RuntimeError("the process has more memory by now than there is room for")


def _number_of(uuid: str) -> int:
    """Return the number that a GPU has here."""
    for number in range(_run("cuDeviceGetCount")):
        device = _run("cuDeviceGet", number)  # the same number (CUdevice of the driver API)
        if bytes(_run("cuDeviceGetUuid", device).bytes).hex() == uuid.removeprefix("GPU-").replace("-", ""):
            return number
    raise RuntimeError(f"there is no GPU {uuid}")


@contextlib.contextmanager
def _socket_of(pid: int, fd: int, greeting: int, limit: float = _LIMIT) -> Iterator[socket.socket]:
    """Open the same socket as another process has open, and greet it."""
    pidfd = os.pidfd_open(pid)
    try:
        own = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, fd, 0)
        if own < 0:
            raise OSError(ctypes.get_errno(), f"socket {fd} of process {pid}")
    finally:
        os.close(pidfd)
    with socket.socket(fileno=own) as there:
        there.settimeout(limit)
        there.send(_NUMBER.pack(greeting))  # the process gives its own copy up
        yield there


def _batches(there: socket.socket) -> Iterator[_Batch]:
    """Yield what comes, but for the end."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(there, (_BATCH + 1) * _ITEM.size, _BATCH)
        items = list(_ITEM.iter_unpack(data))
        if len(items) != len(descriptors) + 1:
            raise RuntimeError("the process broke off")
        *parts, after = itertools.starmap(
            _Item, ((*item, fd) for item, fd in zip(items, [*descriptors, -1], strict=True))
        )
        yield _Batch(parts, after)
        if after.size == 0:
            return


def _lend(there: socket.socket, pieces: Sequence[_Piece]) -> None:
    """Send another process descriptors of pieces, as that one sends its parts."""
    for at in range(0, len(pieces), _BATCH):
        some = pieces[at : at + _BATCH]
        after = pieces[at + _BATCH] if at + _BATCH < len(pieces) else None
        items = [(piece.offset, piece.size) for piece in some] + [(after.offset, after.size) if after else (0, 0)]
        descriptors: list[int] = []
        try:
            descriptors.extend(piece.exported() for piece in some)
            socket.send_fds(there, [b"".join(_ITEM.pack(*item) for item in items)], descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _close(parts: Iterable[_Part | _Piece]) -> None:
    for part in parts:
        part.close()


def _have_hasher(gpu: _Gpu) -> None:
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
        device = _number_of(uuid)
        _run("cuDevicePrimaryCtxRetain", device)
        kept.append(device)

    with contextlib.suppress(RuntimeError):  # what fails here fails again where it is needed
        _run("cuInit", 0)
        with ThreadPoolExecutor(len(uuids) or 1) as pool:
            list(pool.map(retain, uuids))
    try:
        yield
    finally:
        for device in kept:
            _run("cuDevicePrimaryCtxRelease", device)


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
