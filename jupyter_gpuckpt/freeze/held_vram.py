"""GPU memory that a holder has (`vram_holder`): parts of another process's memory, and pieces of its own."""

from __future__ import annotations

import bisect
import itertools
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

from .parking import single_hashes
from .ranges import Range, joined, size_of, within, without
from .vram_hashes import CHUNK, ZEROS, Hasher

__all__ = [
    "SLACK",
    "Addresses",
    "Gpu",
    "Item",
    "Part",
    "Piece",
    "close_all",
    "free_bytes",
    "gpu_of",
    "gpus_of",
    "number_of",
    "run",
]

SLACK = 64 << 20
"""Bytes of GPU memory to leave free when a part of a block is there twice for a moment."""
_REST = 2 << 30
"""Bytes of GPU memory to leave for what the driver brings back itself."""
_PIECE = 1 << 30
"""Bytes that are brought to the GPU at once: no fewer than a part of a block has (parking.c)."""
_WORTH_GATHERING = 64
"""Parts on a GPU from which on they are gathered: to open them takes 0.15 ms each."""
_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE


def run(call: str, *arguments: Any) -> Any:
    """Call a function of the driver, and return what it gives. Raises `RuntimeError`."""
    result, *values = getattr(driver, call)(*arguments)
    if int(result):
        raise RuntimeError(f"{call} gave {result.name}")
    return values[0] if values else None


@dataclass(frozen=True)
class Item:
    """A part of another process's memory: where the file has it, and a descriptor of it; -1 where there is none yet."""

    offset: int
    size: int
    fd: int


class Addresses:
    """Addresses for all of the parked memory of a GPU; in them every part has its place, by its offset in the file."""

    def __init__(self, device: int, first: int, size: int) -> None:
        self._device, self._size, self._first = device, size, first
        self._start = int(run("cuMemAddressReserve", size, 0, 0, 0))

    def map(self, items: Iterable[Item]) -> list[Part]:
        """Open another process's parts, which follow one another, and map them; not to be used before `allow`."""
        parts = []
        for item in items:
            try:
                handle = run("cuMemImportFromShareableHandle", item.fd, _FD)
            finally:
                os.close(item.fd)
            address = self._start + item.offset - self._first
            run("cuMemMap", address, item.size, 0, handle, 0)
            parts.append(Part(item.offset, item.size, address, handle))
        return parts

    def allow(self, parts: Sequence[Part]) -> None:
        """Let the GPU use parts that follow one another."""
        if parts:
            _allow(self._device, parts[0].address, parts[-1].offset + parts[-1].size - parts[0].offset)

    def close(self) -> None:
        run("cuMemAddressFree", self._start, self._size)


class Part:
    """A part of another process's memory, mapped here; `offset` is where its bytes are in the file."""

    def __init__(self, offset: int, size: int, address: int, handle: Any) -> None:
        self.offset, self.size, self.address = offset, size, address
        self._handle = handle

    @property
    def range(self) -> Range:
        """Where its bytes are in the file."""
        return self.offset, self.offset + self.size

    def close(self) -> None:
        run("cuMemUnmap", self.address, self.size)
        run("cuMemRelease", self._handle)


class Piece:
    """A piece of the file, in GPU memory of this program's own; a multiple of `CHUNK` bytes."""

    def __init__(self, device: int, offset: int, size: int) -> None:
        self.offset, self.size = offset, size
        kind = driver.CUmemAllocationProp()
        kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location.type, kind.location.id = _ON_DEVICE, device
        kind.requestedHandleTypes = _FD
        self._handle = run("cuMemCreate", size, kind, 0)
        self.address = int(run("cuMemAddressReserve", size, 0, 0, 0))
        run("cuMemMap", self.address, size, 0, self._handle, 0)
        _allow(device, self.address, size)

    @property
    def range(self) -> Range:
        """Where its bytes are in the file."""
        return self.offset, self.offset + self.size

    def exported(self) -> int:
        """Return a descriptor by which another process can open it."""
        return int(run("cuMemExportToShareableHandle", self._handle, _FD, 0))

    def close(self) -> None:
        run("cuMemUnmap", self.address, self.size)
        run("cuMemAddressFree", self.address, self.size)
        run("cuMemRelease", self._handle)


class Gpu:
    """One GPU, and what this program has there: the bytes of the file from `first` to `end`.

    Attributes
    ----------
    hasher : makes hashes of what is there; None where all is copied.
    held : what of the bytes is on the GPU, in order: all that are not zero from some offset on, or nothing.
    """

    def __init__(self, uuid: str, first: int, size: int) -> None:
        self.uuid, self.first, self.size = uuid, first, size
        self.end = first + size
        self._device = number_of(uuid)
        self._context = run("cuDevicePrimaryCtxRetain", self._device)
        self.hasher: Hasher | None = None
        self.held: deque[Part | Piece] = deque()
        self._addresses: Addresses | None = None
        """Where what is another's is mapped."""
        self._gathered: list[Part | Piece] = []
        """Parts whose bytes are in pieces by now."""

    def use(self) -> None:
        """Have this thread's calls be for this GPU."""
        run("cuCtxSetCurrent", self._context)

    def reserve(self) -> Addresses:
        return Addresses(self._device, self.first, self.size)

    def open(self, items: Iterable[Item]) -> None:
        """Open parts of another's memory, and hold them; not to be used before `allow`."""
        if self._addresses is None:
            self._addresses = self.reserve()
        self.held += self._addresses.map(items)

    def allow(self) -> None:
        """Let the GPU use all that was opened."""
        if self._addresses is not None:
            self._addresses.allow([part for part in self.held if isinstance(part, Part)])

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
        if len(parts) < _WORTH_GATHERING or not self.has_room_for(used):
            return
        pieces = deque[Part | Piece]()
        try:
            pieces.extend(self._pieces(used))
        except RuntimeError as e:  # another program has taken the memory
            print(f"nothing was gathered: {e}", file=sys.stderr)
            close_all(pieces)
            return
        for piece in pieces:
            for at, size, address in self.held_within(within([piece.range], used)):
                run("cuMemcpyDtoDAsync", piece.address + at - piece.offset, address, size, 0)
        run("cuCtxSynchronize")
        self._gathered, self.held = parts, pieces

    def close_gathered(self) -> None:
        """Close the parts that are gathered."""
        gathered, self._gathered = self._gathered, []
        close_all(gathered)

    def close_zeros(self, in_use: Sequence[Range]) -> None:
        """Close the parts in which all is zero."""
        parts = list(self.held)
        self.held.clear()
        for part in parts:
            if any(within([part.range], in_use)):
                self.held.append(part)
            else:
                part.close()

    def has_room_for(self, used: Sequence[Range]) -> bool:
        """Tell whether there is room for so much in pieces, beside what the driver brings back itself.

        While blocks are filled, a part of one is there twice, and of a piece the rest of which belongs to the next.
        """
        return free_bytes() > size_of(used) + 2 * _PIECE + _REST

    def make_pieces(self, in_use: Sequence[Range]) -> None:
        """Make memory for what is in use of the bytes, and hold it."""
        self.held.extend(self._pieces(in_use))

    def _pieces(self, in_use: Sequence[Range]) -> Iterator[Piece]:
        for offset in range(self.first, self.end, _PIECE):
            inside = list(within([(offset, min(offset + _PIECE, self.end))], in_use))
            if inside:
                begin = inside[0][0] // CHUNK * CHUNK
                yield Piece(self._device, begin, -((begin - inside[-1][1]) // CHUNK) * CHUNK)

    def lent(self, in_use: Sequence[Range]) -> list[Piece]:
        """Return what is held, all in pieces, with zeros where it is not in use; nothing where it cannot be lent.

        The process will have memory for all of it before it gives the pieces back.
        """
        pieces = [one for one in self.held if isinstance(one, Piece)]
        used = list(within([(self.first, self.end)], in_use))
        if (
            len(pieces) < len(self.held)
            or any(True for _ in without(used, [one.range for one in pieces]))
            or free_bytes() - SLACK < self.size
        ):
            return []
        for piece in pieces:
            for begin, end in without([piece.range], used):
                run("cuMemsetD8", piece.address + begin - piece.offset, 0, end - begin)
        run("cuCtxSynchronize")
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

    def copy_wanted(self, lender: Gpu, wanted: Sequence[bytes]) -> list[Range]:
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
                run("cuMemcpyDtoDAsync", address, there + at - begin, size, 0)
        run("cuCtxSynchronize")
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

    def spent(self, offset: int) -> Iterator[Part | Piece]:
        """Let go of what has only bytes before an offset."""
        while self.held and self.held[0].range[1] <= offset:
            yield self.held.popleft()

    def give_up(self) -> None:
        self.close_gathered()
        close_all(self.held)
        self.held.clear()
        if self._addresses is not None:
            self._addresses.close()
            self._addresses = None

    def rest(self) -> None:
        """Give its context up."""
        # The driver's own state stays, which takes no GPU memory; starting again would take half a second.
        run("cuCtxSetCurrent", None)
        run("cuDevicePrimaryCtxRelease", self._device)

    def rise(self) -> None:
        self._context = run("cuDevicePrimaryCtxRetain", self._device)


def gpus_of(places: Sequence[tuple[str, int]]) -> list[Gpu]:
    """Make these GPUs this program's, which the file has so many bytes of."""
    run("cuInit", 0)
    ends = itertools.accumulate(size for _, size in places)
    with ThreadPoolExecutor(len(places)) as pool:
        made = [pool.submit(Gpu, uuid, end - size, size) for (uuid, size), end in zip(places, ends, strict=True)]
    return [one.result() for one in made]


def gpu_of(gpus: Iterable[Gpu], item: Item) -> Gpu:
    """Return the GPU whose bytes these are. Raises `RuntimeError`."""
    for gpu in gpus:
        if gpu.first <= item.offset and item.offset + item.size <= gpu.end:
            return gpu
    raise RuntimeError("the process has more memory by now than there is room for")


def number_of(uuid: str) -> int:
    """Return the number that a GPU has here."""
    for number in range(run("cuDeviceGetCount")):
        device = run("cuDeviceGet", number)  # the same number (CUdevice of the driver API)
        if bytes(run("cuDeviceGetUuid", device).bytes).hex() == uuid.removeprefix("GPU-").replace("-", ""):
            return number
    raise RuntimeError(f"there is no GPU {uuid}")


def free_bytes() -> int:
    """Return how many bytes are free on the GPU of this thread's context."""
    result, free, _ = driver.cuMemGetInfo()
    if int(result):
        raise RuntimeError(f"cuMemGetInfo gave {result.name}")
    return int(free)


def close_all(parts: Iterable[Part | Piece]) -> None:
    """Give GPU memory up."""
    for part in parts:
        part.close()


def _allow(device: int, address: int, size: int) -> None:
    """Let a GPU use memory that is mapped."""
    access = driver.CUmemAccessDesc()
    access.location.type, access.location.id = _ON_DEVICE, device
    access.flags = _READ_WRITE
    run("cuMemSetAccess", address, size, [access], 1)
