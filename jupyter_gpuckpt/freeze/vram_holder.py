"""The program that holds a process's parked GPU memory.

``python -m jupyter_gpuckpt.freeze.vram_holder UUID=SIZE,… FILE new|bare|awaited|kept|brought [HASHES]``: the GPUs with
the bytes on each, which the file has one after the other, and the file, which is for the process's bytes, for others to
write before it is needed, or there already; or it is memory through which they are ``brought`` to the GPUs
(`staging_buffer`). A ``bare`` one is for the process's bytes, too, but has no memory that is ready.

With a file of hashes (`vram_hashes`), chunks that have one of these are not copied, nor are zeros: the file keeps holes
there. HASHES.made then has the hashes of all chunks.

It opens the physical memory of another process's blocks on the GPUs, copies them into the file (which lies in memory,
pinned) while the process is checkpointed, and fills the new blocks that the process makes itself afterwards: from the
memory that it still holds, or from the file. The process's blocks are never this one's: the driver loses a process that
has another's memory open at its checkpoint, and memory that came from another cannot be handed on a second time
(measured on driver 580.159: cuMemExportToShareableHandle gives 1, INVALID_VALUE).

Lines: ``ready`` out, and then one answer to each of

- ``take PID FD``: open every part that comes through that process's socket, and begin to copy; there is no answer
- ``copied``: wait for the copies: ``copied``
- ``complete``: copy what was not, too, and give the file its name: ``complete``
- ``load``: begin to bring the file to the GPUs: ``loaded``; or ``no room``
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
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
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
_UNKNOWN = "unknown"
_LIMIT = 60.0  # for how long the process may take over one part, in seconds


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
        self._size, self._first = size, first
        self._start = int(_run("cuMemAddressReserve", size, 0, 0, 0))
        self._access = driver.CUmemAccessDesc()
        self._access.location.type, self._access.location.id = _ON_DEVICE, device
        self._access.flags = _READ_WRITE

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
            length = parts[-1].offset + parts[-1].size - parts[0].offset
            _run("cuMemSetAccess", parts[0].address, length, [self._access], 1)

    def close(self) -> None:
        _run("cuMemAddressFree", self._start, self._size)


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


class _Gpu:
    """One GPU, and what this program has there: the bytes of the file from `first` to `end`.

    Attributes
    ----------
    hasher : makes hashes of what is there; None where all is copied.
    held : what of the bytes is on the GPU: from some offset on without a gap, or nothing.
    left : what of another's memory was not copied, since it is found elsewhere.
    """

    def __init__(self, uuid: str, first: int, size: int) -> None:
        self.first, self.size = first, size
        self.end = first + size
        self._device = _number_of(uuid)
        self._context = _run("cuDevicePrimaryCtxRetain", self._device)
        self.hasher: Hasher | None = None
        self.held: deque[_Part | _Piece] = deque()
        self.left: list[_Stretch] = []
        self._addresses: _Addresses | None = None
        """Where what was taken is mapped."""

    def use(self) -> None:
        """Have this thread's calls be for this GPU."""
        _run("cuCtxSetCurrent", self._context)

    def reserve(self) -> _Addresses:
        return _Addresses(self._device, self.first, self.size)

    def take(self, items: Iterable[_Item]) -> list[_Part]:
        """Open parts of another's memory, and hold them; not to be used before `allow`."""
        if self._addresses is None:
            self._addresses = self.reserve()
        parts = self._addresses.map(items)
        self.held += parts
        return parts

    def allow(self) -> None:
        """Let the GPU use all that was taken."""
        if self._addresses is not None:
            self._addresses.allow([part for part in self.held if isinstance(part, _Part)])

    def make_pieces(self) -> Iterator[_Piece]:
        """Make memory for all of the bytes, piece by piece, and hold it."""
        for offset in range(self.first, self.end, _PIECE):
            piece = _Piece(offset, min(_PIECE, self.end - offset))
            self.held.append(piece)
            yield piece

    def piece_at(self, offset: int) -> _Part | _Piece:
        return self.held[(offset - self.first) // _PIECE]

    def copy_to(self, new: _Part, staging: int) -> Iterator[_Part | _Piece]:
        """Begin to copy what belongs there; yield what is not needed any more when that is done."""
        done = 0
        while done < new.size:
            at, left = new.offset + done, new.size - done
            if self.held:
                held = self.held[0]
                size = min(left, held.offset + held.size - at)
                _run("cuMemcpyDtoDAsync", new.address + done, held.address + at - held.offset, size, 0)
                if at + size == held.offset + held.size:
                    yield self.held.popleft()
            else:
                size = left
                _run("cuMemcpyHtoDAsync", new.address + done, staging + at, size, 0)
            done += size

    def give_up(self) -> None:
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


class _Holder:
    def __init__(self, places: Sequence[tuple[str, int]], file: Path, state: str, hashes: Path | None) -> None:
        self._resting = False
        self._size = size = sum(of_gpu for _, of_gpu in places)
        self._whole, self._part = file, file.with_name(file.name + ".part")
        self._is_brought, self._is_bare = state == "brought", state == "bare"
        used = self._part if state in ("new", "bare") else self._whole
        if self._is_bare:
            resize(used, size)
        with ThreadPoolExecutor(1) as beside:
            # Both take a third of a second and more.
            populating = beside.submit(populate, used, size) if state in ("new", "awaited") else None
            self._gpus = _gpus(places)
            if populating is not None:
                populating.result()
        with used.open("r+b") as opened:
            self._file = mmap.mmap(opened.fileno(), 0)
        first: Any = ctypes.c_char.from_buffer(self._file)
        self._staging = ctypes.addressof(first)
        if not self._is_bare:
            self._register(self._staging, len(self._file))
        self._hashes = hashes
        self._has_taken, self._failed = False, ""
        """Whether it has another's memory, and why that could not be copied."""
        self._on_all(self._get_ready)

    def _get_ready(self, gpu: _Gpu) -> None:
        if self._hashes is not None:
            gpu.hasher = _hasher()
        if self._is_brought:
            for piece in gpu.make_pieces():
                _run("cuMemsetD8", piece.address, 0, piece.size)  # zeros are not brought

    def _each(self) -> Iterator[_Gpu]:
        """Yield each GPU, and use it meanwhile."""
        for gpu in self._gpus:
            gpu.use()
            yield gpu

    def _on_all(self, what: Callable[[_Gpu], None]) -> None:
        """Do something for all GPUs at once."""

        def do(gpu: _Gpu) -> None:
            gpu.use()
            what(gpu)

        with ThreadPoolExecutor(len(self._gpus)) as pool:
            for done in [pool.submit(do, gpu) for gpu in self._gpus]:
                done.result()

    def _of(self, offset: int, size: int) -> _Gpu:
        """Return the GPU whose bytes these are."""
        for gpu in self._gpus:
            if gpu.first <= offset and offset + size <= gpu.end:
                return gpu
        raise RuntimeError("the process has more memory by now than there is room for")

    def _by_gpu(self, batch: _Batch) -> Iterator[tuple[_Gpu, list[_Item]]]:
        for gpu, items in itertools.groupby(batch.items, lambda item: self._of(item.offset, item.size)):
            gpu.use()
            yield gpu, list(items)

    def _register(self, address: int, size: int) -> None:
        self._gpus[0].use()
        _run("cuMemHostRegister", address, size, _FOR_ALL)

    def take(self, pid: int, fd: int) -> None:
        with _socket_of(pid, fd) as there:
            for batch in _batches(there):
                for gpu, items in self._by_gpu(batch):
                    gpu.take(items)
            # Not while others are mapped, nor copied: each then takes ten times as long (1,200 parts: 0.5 s, not 0.1).
            for gpu in self._each():
                gpu.allow()
            there.send(_NUMBER.pack(0))
        # From here on nobody else has it. What cannot be copied can still be given back.
        self._has_taken = True
        try:
            self._copy_new()
        except (RuntimeError, OSError) as e:
            self._failed = str(e)

    def _copy_new(self) -> None:
        """Begin to copy what was taken, but for what is found elsewhere; write the hashes of all down."""
        known, made = set[bytes](), dict[int, bytes]()

        def hash_all(gpu: _Gpu) -> None:
            assert gpu.hasher is not None
            size = sum(part.size for part in gpu.held)
            hashes = gpu.hasher.hashes(gpu.held[0].address, size // CHUNK) if size else b""
            # It may have freed some since it was asked: the file has holes there.
            made[gpu.first] = hashes + ZEROS * ((gpu.size - size) // CHUNK)

        def copy(gpu: _Gpu) -> None:
            parts = [_Stretch(part.offset, part.size, part.address) for part in gpu.held]
            if made:
                parts, gpu.left = _new_and_known(parts, made[gpu.first], known)
            self._copy_out(parts)

        try:
            if self._hashes is not None and all(gpu.hasher is not None for gpu in self._gpus):
                known.update(_cut(self._hashes.read_bytes()))
                self._on_all(hash_all)
                _write(self._hashes.with_name(self._hashes.name + ".made"), b"".join(made[at] for at in sorted(made)))
        except (RuntimeError, OSError) as e:
            print(f"all is copied: {e}", file=sys.stderr)
            made.clear()
        self._on_all(copy)

    def _copy_out(self, stretches: Sequence[_Stretch]) -> None:
        if self._is_bare:
            populate_mapped((self._staging + one.offset, one.size) for one in stretches)
        for one in stretches:
            to = self._staging + one.offset
            if self._is_bare:
                _run("cuMemHostRegister", to, one.size, _FOR_ALL)
            _run("cuMemcpyDtoHAsync", to, one.address, one.size, 0)

    def copied(self) -> str:
        """Wait for the copies; where nothing was left out, the file has its name now."""
        if self._resting:
            return "copied"
        if self._failed:
            print(self._failed, file=sys.stderr)
            return "not copied"
        for _ in self._each():
            _run("cuCtxSynchronize")
        if self._has_taken and not any(gpu.left for gpu in self._gpus) and self._part.exists():
            self._part.rename(self._whole)
        return "copied"

    def complete(self) -> str:
        """Copy what was left out, too: the file is whole."""
        for gpu in self._each():
            left, gpu.left = gpu.left, []
            try:
                self._copy_out(left)
            except (RuntimeError, OSError) as e:
                self._failed = str(e)
        return "complete" if self.copied() == "copied" else "not complete"

    def end(self) -> None:
        """Leave the bytes in the file, where nobody has them back yet."""
        if any(gpu.held for gpu in self._gpus):
            self.complete()
        else:
            self.copied()

    def load(self) -> str:
        # While blocks are filled, a part of one is there twice, and of a piece the rest of which belongs to the next.
        if any(_free_bytes() <= gpu.size + 2 * _PIECE + _REST for gpu in self._each()):
            return "no room"
        for gpu in self._each():
            for piece in gpu.make_pieces():
                _run("cuMemcpyHtoDAsync", piece.address, self._staging + piece.offset, piece.size, 0)
        return "loaded"

    def bring(self, at: int, size: int, to: int) -> str:
        source, end = self._staging + at, to + size
        if not 0 <= to <= end <= self._size or at + size > len(self._file):
            raise RuntimeError("there is more than there is room for")
        while to < end:
            gpu = self._of(to, 1)
            gpu.use()
            held = gpu.piece_at(to)
            part = min(end, held.offset + held.size) - to
            _run("cuMemcpyHtoD", held.address + to - held.offset, source, part)
            source, to = source + part, to + part
        return str(at)

    def rest(self) -> str:
        if (said := self.copied()) != "copied":
            return said
        for gpu in self._each():
            gpu.give_up()
        self._gpus[0].use()
        _run("cuMemHostUnregister", self._staging)
        for gpu in self._each():
            gpu.rest()
        self._resting = True
        return "resting"

    def rise(self) -> str:
        for gpu in self._gpus:
            gpu.rise()
        self._register(self._staging, len(self._file))
        self._resting = False
        return "ready"

    def fill(self, pid: int, fd: int) -> str:
        room, filled, spent = 0, list[_Part](), list[_Part | _Piece]()
        addresses = {gpu.first: gpu.reserve() for gpu in self._gpus}
        last: _Gpu | None = None
        """The GPU that `room` is of."""
        with _socket_of(pid, fd) as there:
            for batch in _batches(there):
                for gpu, items in self._by_gpu(batch):
                    parts = addresses[gpu.first].map(items)
                    addresses[gpu.first].allow(parts)
                    filled += parts
                    for part in parts:
                        spent += gpu.copy_to(part, self._staging)
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
            there.send(_NUMBER.pack(0))
        # The process goes on meanwhile.
        _close([*spent, *filled])
        for reserved in addresses.values():
            reserved.close()
        for gpu in self._each():
            gpu.give_up()
        return "filled"

    def _room_for(self, gpu: _Gpu, size: int) -> int:
        """Return for how many bytes a GPU has room beside what is held; for so many, if need be without that."""
        gpu.use()
        free = _free_bytes() - _SLACK
        if free < size and gpu.held and not self._is_brought and self.complete() == "complete":
            # What is held is in the file too; from there it takes no memory of the GPU.
            gpu.use()
            gpu.give_up()
            free = _free_bytes() - _SLACK
        return max(size, free)


def _new_and_known(
    parts: Sequence[_Stretch], hashes: bytes, known: Container[bytes]
) -> tuple[list[_Stretch], list[_Stretch]]:
    """Return what has to be copied of these parts, and what is found elsewhere, by the hashes of their chunks."""
    chunks = iter(_cut(hashes))
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


def _number_of(uuid: str) -> int:
    """Return the number that a GPU has here."""
    for number in range(_run("cuDeviceGetCount")):
        device = _run("cuDeviceGet", number)  # the same number (CUdevice of the driver API)
        if bytes(_run("cuDeviceGetUuid", device).bytes).hex() == uuid.removeprefix("GPU-").replace("-", ""):
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
        *parts, after = itertools.starmap(
            _Item, ((*item, fd) for item, fd in zip(items, [*descriptors, -1], strict=True))
        )
        yield _Batch(parts, after)
        if after.size == 0:
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


def main(places: str, file: str, state: str, hashes: str = "") -> None:
    """Be that program."""
    # Until the process has its memory back, this program is as much worth as the process.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-1000")
    sizes = [(gpu, int(size)) for gpu, _, size in (place.partition("=") for place in places.split(","))]
    holder = _Holder(sizes, Path(file), state, Path(hashes) if hashes else None)
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
