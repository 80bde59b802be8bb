"""The credentials in criu's ``core`` images: read so strictly that nobody else can read others in the same bytes.

An image is two 32-bit magic numbers, and one protobuf message behind its length (CRIU's ``images/core.proto`` and
``creds.proto``). A reader of protobuf takes the last of a field that is there twice, puts two messages together, and
passes over what it does not know, and one is not like the other. So all that leaves a choice is refused, rather than
understood: criu writes none of it. Nothing here is a library, or written in C, but Python itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["MOST_BYTES", "Credentials", "credentials"]

MOST_BYTES = 4 << 20
"""Of an image. One has about 3 kB, and 200 bytes for each signal that was waiting."""

_MAGIC = struct.pack("<II", 0x54564319, 0x55053847)  # criu/include/magic.h
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_MOST_FIELDS = 2000  # of one message: groups and capabilities are fields of their own each
_MOST_NUMBER = (1 << 29) - 1
_THREAD, _CREDS = 5, 10
_UIDS, _GIDS, _SECBITS, _GROUPS, _NO_NEW_PRIVS = (1, 3, 5, 7), (2, 4, 6, 8), 13, 14, 18
_BOUNDING_SET, _CAPABILITIES = 12, (9, 10, 11, 19)


@dataclass(frozen=True)
class Credentials:
    """What one thread is allowed to do: the sets of its ids, groups and capabilities, whichever they are for."""

    uids: frozenset[int]
    gids: frozenset[int]
    groups: frozenset[int]
    has_capabilities: bool
    has_securebits: bool
    no_new_privs: bool


def credentials(image: bytes) -> Credentials | None:
    """Return those of the thread that an image is of; None if it has ended, and has none.

    Raises
    ------
    ValueError : it is no image as criu writes them, or they could be read in another way.
    """
    if len(image) > MOST_BYTES:
        raise ValueError(f"an image has more than {MOST_BYTES >> 20} MiB")
    if image[:8] != _MAGIC:
        raise ValueError("an image is not in the current format")
    if len(image) < 12 or struct.unpack_from("<I", image, 8)[0] != len(image) - 12:
        raise ValueError("an image does not have the length that it states")
    thread = _part(memoryview(image)[12:], _THREAD)
    if thread is None:
        return None
    creds = _part(thread, _CREDS)
    if creds is None:
        raise ValueError("a thread has no credentials")
    return _understood(creds)


def _part(message: memoryview, wanted: int) -> memoryview | None:
    """Return the message in a field; None if it is not there."""
    found = [(kind, value) for number, kind, value in _fields(message) if number == wanted]
    if not found:
        return None
    (kind, value), *more = found
    if more or kind != _BYTES or isinstance(value, int):
        raise ValueError(f"a field ({wanted}) is there twice, or of another kind")
    return value


def _understood(creds: memoryview) -> Credentials:
    numbers: dict[int, list[int]] = {}
    for number, kind, value in _fields(creds):
        if kind != _VARINT or not isinstance(value, int) or value >= 1 << 32:
            raise ValueError("credentials have a security label, or a field of another kind")
        numbers.setdefault(number, []).append(value)
    once = (*_UIDS, *_GIDS, _SECBITS, _NO_NEW_PRIVS)
    if any(len(numbers.get(number, [])) != 1 for number in once):
        raise ValueError("credentials lack a field, or have it twice")
    if unknown := numbers.keys() - {*once, _GROUPS, _BOUNDING_SET, *_CAPABILITIES}:
        raise ValueError(f"credentials are of a kind that is not known here (fields {sorted(unknown)[:10]})")
    return Credentials(
        frozenset(numbers[number][0] for number in _UIDS),
        frozenset(numbers[number][0] for number in _GIDS),
        frozenset(numbers.get(_GROUPS, [])),
        any(any(numbers.get(number, [])) for number in _CAPABILITIES),
        numbers[_SECBITS] != [0],
        numbers[_NO_NEW_PRIVS] == [1],
    )


def _fields(message: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """Yield the number, the kind and the value of each field of a message."""
    at = 0
    for _ in range(_MOST_FIELDS):
        if at == len(message):
            return
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if not 1 <= number <= _MOST_NUMBER:
            raise ValueError("there is no field of such a number")
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, kind, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED_64, _FIXED_32):
            size = 8 if kind == _FIXED_64 else 4
        else:
            raise ValueError("there is no field of such a kind")
        if size > len(message) - at:
            raise ValueError("a field does not end where its message does")
        yield number, kind, message[at : at + size]
        at += size
    raise ValueError(f"a message has more than {_MOST_FIELDS} fields")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return a number of seven bits a byte, in as few bytes as it needs and 64 bits at most, and where it ends."""
    value = 0
    for place, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            if value >> 64 or (place and not byte):
                break
            return value, at + place + 1
    raise ValueError("a number is cut, too large, or longer than it needs to be")
