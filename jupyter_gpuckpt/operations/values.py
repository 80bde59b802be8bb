"""Values as people type them: each function makes one of a word, or raises what argparse tells them."""

from __future__ import annotations

from pathlib import Path

from .. import setting

__all__ = ["duration", "folder", "gpus", "number", "size"]


def duration(text: str) -> float | None:
    """Return the seconds that a text such as ``30m`` means; None for ``off``."""
    try:
        return setting.parse_duration(text)
    except ValueError as e:
        raise _wrong(str(e)) from None


def folder(text: str) -> str:
    """Return a folder by its whole path: who opens it may be another process, in another folder."""
    return str(Path(text).expanduser().absolute())


def gpus(text: str) -> list[int]:
    """Return the numbers of GPUs that a text such as ``1`` or ``1,0`` names."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise _wrong(f"{text!r} is not a GPU number or a list of them such as 1,0") from None


def size(text: str) -> int:
    """Return the bytes that a text such as ``20G`` means."""
    try:
        return setting.parse_size(text)
    except ValueError as e:
        raise _wrong(str(e)) from None


def number(text: str) -> int:
    """Return the number, of 1 and more, that a text means."""
    if not text.isdecimal() or int(text) < 1:
        raise _wrong(f"{text!r} is not a number of at least 1")
    return int(text)


def _wrong(why: str) -> Exception:
    """Return what argparse passes on to people; imported only now, since keepers need none of it."""
    import argparse

    return argparse.ArgumentTypeError(why)
