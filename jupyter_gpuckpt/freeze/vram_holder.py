"""The program that holds a process's parked GPU memory.

``python -m jupyter_gpuckpt.freeze.vram_holder UUID FILE SIZE new|bare|awaited|kept|brought [HASHES]``: the GPU, and
the file, which is for the process's bytes, for others to write before it is needed, or there already; or it is memory
through which they are ``brought`` to the GPU (`staging_buffer`). A ``bare`` one is for the process's bytes, too, but
has no memory that is ready.

With a file of hashes (`vram_hashes`), chunks that have one of these are not copied, nor are zeros: the file keeps holes
there. HASHES.made then has the hashes of all chunks.

It opens the physical memory of another process's blocks on the GPU, copies them into the file (which lies in memory,
pinned) while the process is checkpointed, and fills the new blocks that the process makes itself afterwards: from the
memory that it still holds, or from the file. The process's blocks are never this one's: the driver loses a process that
has another's memory open at its checkpoint, and memory that came from another cannot be handed on a second time
(measured on driver 580.159: cuMemExportToShareableHandle gives 1, INVALID_VALUE).

Lines: ``ready`` out, and then one answer to each of

- ``take PID FD``: open every part that comes through that process's socket, and begin to copy; there is no answer
- ``copied``: wait for the copies: ``copied``
- ``complete``: copy what was not, too, and give the file its name: ``complete``
- ``load``: begin to bring the file to the GPU: ``loaded``; or ``no room``
- ``bring AT SIZE TO``: copy bytes of the file at an offset to where they belong in the parked memory: that offset
- ``fill PID FD``: fill every part that comes through that socket: ``filled``
- ``rest``: when the copies are done, give up all that this program has on the GPU, its context too: ``resting``
- ``rise``: be ready to fill again: ``ready``
- anything else: ``unknown``

At the end of its input it first ends what it has begun: when the keeper is killed, the file becomes whole, and the
process can have its memory back from there.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from .parking import HASH
from .populate import populate, populate_mapped, resize
from .vram_hashes import CHUNK, ZEROS, Hasher

__all__ = ["main"]

_ITEM = struct.Struct("<QQ")
"""What a message has of each part: its offset in the file, and its size. The last is the part that comes after these,
without a descriptor yet; its size is 0 where there is none (parking.c)."""
_NUMBER = struct.Struct("<Q")
"""The answer: for how many bytes more there is room. The first one is a greeting, the last one thanks."""
_BATCH = 64
"""Parts in one message at most."""
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
_UNKNOWN = "unknown"
_LIMIT = 60.0  # for how long the process may take over one part, in seconds


def _run(call: str, *arguments: Any) -> Any:
    result, *values = getattr(driver, call)(*arguments)
    if int(result):
        raise RuntimeError(f"{call} gave {result.name}")
    return values[0] if values else None


@dataclass(frozen=True)
class _Batch:
    """One message: parts of another process's memory (offset and size), their descriptors, and the next one's size."""

    items: list[tuple[int, int]]
    descriptors: list[int]
    next_size: int


class _Addresses:
    """Addresses for all of the parked memory; in them every part has its place, at its offset in the file."""

    def __init__(self, size: int, device: int) -> None:
        self._size = size
        self._first = int(_run("cuMemAddressReserve", size, 0, 0, 0))
        self._access = driver.CUmemAccessDesc()
        self._access.location.type, self._access.location.id = _ON_DEVICE, device
        self._access.flags = _READ_WRITE

    def map(self, batch: _Batch) -> list[_Part]:
        """Open another process's parts, which follow one another, and map them; not to be used before `allow`."""
        parts = []
        for (offset, size), fd in zip(batch.items, batch.descriptors, strict=True):
            if offset + size > self._size:
                raise RuntimeError("the process has more memory by now than there is room for")
            try:
                handle = _run("cuMemImportFromShareableHandle", fd, _FD)
            finally:
                os.close(fd)
            _run("cuMemMap", self._first + offset, size, 0, handle, 0)
            parts.append(_Part(offset, size, self._first + offset, handle))
        return parts

    def allow(self, parts: Sequence[_Part]) -> None:
        """Let the GPU use parts that follow one another."""
        if parts:
            length = parts[-1].offset + parts[-1].size - parts[0].offset
            _run("cuMemSetAccess", parts[0].address, length, [self._access], 1)

    def close(self) -> None:
        _run("cuMemAddressFree", self._first, self._size)


class _Part:
    """A part of another process's memory, mapped here; `offset` is where its bytes are in the file."""

    def __init__(self, offset: int, size: int, address: int, handle: Any) -> None:
        self.offset, self.size, self.address = offset, size, address
        self._handle = handle

    def close(self) -> None:
        _run("cuMemUnmap", self.address, self.size)
        _run("cuMemRelease", self._handle)


@dataclass(frozen=True)
class _Stretch:
    """Bytes of another process's memory that follow one another, mapped here; in the file they are at `offset`."""

    offset: int
    size: int
    address: int


class _Piece:
    """A piece of the file, in GPU memory of this program's own."""

    def __init__(self, offset: int, size: int) -> None:
        self.offset, self.size = offset, size
        self.address = int(_run("cuMemAlloc", size))

    def close(self) -> None:
        _run("cuMemFree", self.address)


class _Holder:
    def __init__(self, uuid: str, file: Path, size: int, state: str, hashes: Path | None) -> None:
        self._resting = False
        self._size = size
        self._whole, self._part = file, file.with_name(file.name + ".part")
        self._is_brought, self._is_bare = state == "brought", state == "bare"
        used = self._part if state in ("new", "bare") else self._whole
        if self._is_bare:
            resize(used, size)
        with ThreadPoolExecutor(1) as beside:
            # Both take a third of a second and more.
            populating = beside.submit(populate, used, size) if state in ("new", "awaited") else None
            self._device = _use(uuid)
            if populating is not None:
                populating.result()
        with used.open("r+b") as opened:
            self._file = mmap.mmap(opened.fileno(), 0)
        first: Any = ctypes.c_char.from_buffer(self._file)
        self._staging = ctypes.addressof(first)
        if not self._is_bare:
            _run("cuMemHostRegister", self._staging, len(self._file), 0)
        self._hashes, self._hasher = hashes, _hasher() if hashes is not None else None
        self._held: deque[_Part | _Piece] = deque()
        """What of the bytes is on the GPU: from some offset on without a gap, or nothing."""
        self._has_taken, self._failed = False, ""
        """Whether it has another's memory, and why that could not be copied."""
        self._left: list[_Stretch] = []
        """What of that was not copied, since it is found elsewhere."""
        self._addresses: _Addresses | None = None
        """Where what was taken is mapped."""
        if self._is_brought:
            for offset in range(0, size, _PIECE):
                piece = _Piece(offset, min(_PIECE, size - offset))
                self._held.append(piece)
                _run("cuMemsetD8", piece.address, 0, piece.size)  # zeros are not brought

    def take(self, pid: int, fd: int) -> None:
        self._addresses = _Addresses(self._size, self._device)
        parts: list[_Part] = []
        with _socket_of(pid, fd) as there:
            for batch in _batches(there):
                parts += self._addresses.map(batch)
            # Not while others are mapped, nor copied: each then takes ten times as long (1,200 parts: 0.5 s, not 0.1).
            self._addresses.allow(parts)
            self._held += parts
            there.send(_NUMBER.pack(0))
        # From here on nobody else has it. What cannot be copied can still be given back.
        self._has_taken = True
        new, self._left = [_Stretch(part.offset, part.size, part.address) for part in parts], []
        try:
            if self._hashes is not None and self._hasher is not None and parts:
                new, self._left = self._new_and_known(parts, self._hashes, self._hasher)
        except (RuntimeError, OSError) as e:
            print(f"all is copied: {e}", file=sys.stderr)
        try:
            self._copy_out(new)
        except (RuntimeError, OSError) as e:
            self._failed = str(e)

    @staticmethod
    def _new_and_known(parts: Sequence[_Part], hashes: Path, hasher: Hasher) -> tuple[list[_Stretch], list[_Stretch]]:
        """Return what has to be copied of what was taken, and what is found elsewhere; write the hashes down."""
        known = set(_cut(hashes.read_bytes()))
        made = hasher.hashes(parts[0].address, sum(part.size for part in parts) // CHUNK)
        _write(hashes.with_name(hashes.name + ".made"), made)
        chunks = iter(_cut(made))
        found: dict[str, list[_Stretch]] = {"zero": [], "known": [], "new": []}
        for part in parts:
            done = 0
            of_part = itertools.islice(chunks, part.size // CHUNK)
            kinds = ("zero" if key == ZEROS else "known" if key in known else "new" for key in of_part)
            for kind, run in itertools.groupby(kinds):
                size = sum(CHUNK for _ in run)
                found[kind].append(_Stretch(part.offset + done, size, part.address + done))
                done += size
        return found["new"], found["known"]

    def _copy_out(self, stretches: Sequence[_Stretch]) -> None:
        if self._is_bare:
            populate_mapped((self._staging + one.offset, one.size) for one in stretches)
        for one in stretches:
            to = self._staging + one.offset
            if self._is_bare:
                _run("cuMemHostRegister", to, one.size, 0)
            _run("cuMemcpyDtoHAsync", to, one.address, one.size, 0)

    def copied(self) -> str:
        """Wait for the copies; where nothing was left out, the file has its name now."""
        if self._resting:
            return "copied"
        if self._failed:
            print(self._failed, file=sys.stderr)
            return "not copied"
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
        if self._held:
            self.complete()
        else:
            self.copied()

    def load(self) -> str:
        size = len(self._file)
        # While blocks are filled, a part of one is there twice, and of a piece the rest of which belongs to the next.
        if _free_bytes() <= size + 2 * _PIECE + _REST:
            return "no room"
        for offset in range(0, size, _PIECE):
            piece = _Piece(offset, min(_PIECE, size - offset))
            self._held.append(piece)
            _run("cuMemcpyHtoDAsync", piece.address, self._staging + offset, piece.size, 0)
        return "loaded"

    def bring(self, at: int, size: int, to: int) -> str:
        source, end = self._staging + at, to + size
        if not 0 <= to <= end <= self._size or at + size > len(self._file):
            raise RuntimeError("there is more than there is room for")
        while to < end:
            held = self._held[to // _PIECE]
            part = min(end, held.offset + held.size) - to
            _run("cuMemcpyHtoD", held.address + to - held.offset, source, part)
            source, to = source + part, to + part
        return str(at)

    def rest(self) -> str:
        if (said := self.copied()) != "copied":
            return said
        self._give_up()
        _run("cuMemHostUnregister", self._staging)
        # The driver's own state stays, which takes no GPU memory; starting again would take half a second.
        _run("cuCtxSetCurrent", None)
        _run("cuDevicePrimaryCtxRelease", self._device)
        self._resting = True
        return "resting"

    def rise(self) -> str:
        _run("cuCtxSetCurrent", _run("cuDevicePrimaryCtxRetain", self._device))
        _run("cuMemHostRegister", self._staging, len(self._file), 0)
        self._resting = False
        return "ready"

    def fill(self, pid: int, fd: int) -> str:
        room, filled, spent = 0, list[_Part](), list[_Part | _Piece]()
        addresses = _Addresses(self._size, self._device)
        with _socket_of(pid, fd) as there:
            for batch in _batches(there):
                parts = addresses.map(batch)
                addresses.allow(parts)
                filled += parts
                for part in parts:
                    spent += self._copy_to(part)
                _run("cuCtxSynchronize")
                room -= sum(part.size for part in parts)
                if batch.next_size > room:  # it waits
                    _close(spent)
                    spent.clear()
                    more = self._room_for(batch.next_size) - room
                    there.send(_NUMBER.pack(more))
                    room += more
            there.send(_NUMBER.pack(0))
        # The process goes on meanwhile.
        _close([*spent, *filled])
        addresses.close()
        self._give_up()
        return "filled"

    def _copy_to(self, new: _Part) -> Iterator[_Part | _Piece]:
        """Begin to copy what belongs there; yield what is not needed any more when that is done."""
        done = 0
        while done < new.size:
            at, left = new.offset + done, new.size - done
            if self._held:
                held = self._held[0]
                size = min(left, held.offset + held.size - at)
                _run("cuMemcpyDtoDAsync", new.address + done, held.address + at - held.offset, size, 0)
                if at + size == held.offset + held.size:
                    yield self._held.popleft()
            else:
                size = left
                _run("cuMemcpyHtoDAsync", new.address + done, self._staging + at, size, 0)
            done += size

    def _room_for(self, size: int) -> int:
        """Return for how many bytes there is room beside what is held; for so many, if need be without that."""
        free = _free_bytes() - _SLACK
        if free < size and self._held and not self._is_brought and self.complete() == "complete":
            # What is held is in the file too; from there it takes no memory of the GPU.
            self._give_up()
            free = _free_bytes() - _SLACK
        return max(size, free)

    def _give_up(self) -> None:
        _close(self._held)
        self._held.clear()
        if self._addresses is not None:
            self._addresses.close()
            self._addresses = None


def _free_bytes() -> int:
    result, free, _ = driver.cuMemGetInfo()
    if int(result):
        raise RuntimeError(f"cuMemGetInfo gave {result.name}")
    return int(free)


def _use(uuid: str) -> int:
    """Make the GPU of that UUID this program's; return its number here."""
    _run("cuInit", 0)
    for number in range(_run("cuDeviceGetCount")):
        device = _run("cuDeviceGet", number)  # the same number (CUdevice of the driver API)
        if bytes(_run("cuDeviceGetUuid", device).bytes).hex() == uuid.removeprefix("GPU-").replace("-", ""):
            _run("cuCtxSetCurrent", _run("cuDevicePrimaryCtxRetain", device))
            return number
    raise RuntimeError(f"there is no GPU {uuid}")


@contextlib.contextmanager
def _socket_of(pid: int, fd: int) -> Iterator[socket.socket]:
    """Open the same socket as another process has open."""
    pidfd = os.pidfd_open(pid)
    try:
        own = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, fd, 0)
        if own < 0:
            raise OSError(ctypes.get_errno(), f"socket {fd} of process {pid}")
    finally:
        os.close(pidfd)
    with socket.socket(fileno=own) as there:
        there.settimeout(_LIMIT)
        there.send(_NUMBER.pack(0))  # the process gives its own copy up
        yield there


def _batches(there: socket.socket) -> Iterator[_Batch]:
    """Yield what comes, but for the end."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(there, (_BATCH + 1) * _ITEM.size, _BATCH)
        items = list(_ITEM.iter_unpack(data))
        if len(items) != len(descriptors) + 1:
            raise RuntimeError("the process broke off")
        yield _Batch(items[:-1], descriptors, items[-1][1])
        if items[-1][1] == 0:
            return


def _close(parts: Iterable[_Part | _Piece]) -> None:
    for part in parts:
        part.close()


def _hasher() -> Hasher | None:
    try:
        return Hasher()
    except (RuntimeError, OSError) as e:
        print(f"all is copied: {e}", file=sys.stderr)
        return None


def _cut(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH] for at in range(0, len(hashes), HASH)]


def _write(file: Path, data: bytes) -> None:
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as opened:
        opened.write(data)


def main(uuid: str, file: str, size: str, state: str, hashes: str = "") -> None:
    """Be that program."""
    # Until the process has its memory back, this program is as much worth as the process.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-1000")
    holder = _Holder(uuid, Path(file), int(size), state, Path(hashes) if hashes else None)
    _say("ready")
    try:
        for line in sys.stdin:
            if (said := _answer(holder, line)) is not None:
                _say(said)
    finally:
        holder.end()


def _answer(holder: _Holder, line: str) -> str | None:
    """Do what a line asks for, and return the answer; None where there is none."""
    command, *words = line.split() or [""]
    if not all(word.isdecimal() for word in words):
        return _UNKNOWN
    match command, [int(word) for word in words]:
        case "take", [pid, fd]:
            holder.take(pid, fd)
            return None
        case "copied", []:
            return holder.copied()
        case "complete", []:
            return holder.complete()
        case "load", []:
            return holder.load()
        case "bring", [at, size, to]:
            return holder.bring(at, size, to)
        case "fill", [pid, fd]:
            return holder.fill(pid, fd)
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
