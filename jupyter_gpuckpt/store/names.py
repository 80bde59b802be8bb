"""What may be the name of a snapshot, of a pack, and the path of a file inside a snapshot.

In the store each snapshot has a name of its own, its key. That is the name that was given; only where another notebook
has a snapshot of that name, ``~`` and eight hexadecimal digits come behind it, which no name that is given can have.
"""

from __future__ import annotations

import hashlib
import re

from ..errors import BadName

__all__ = [
    "MAX_NAME",
    "check_key",
    "check_name",
    "is_id",
    "is_pack",
    "is_plain_path",
    "key_of",
    "name_of",
    "pack_name",
    "session_of",
]

MAX_NAME = 100
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_PACK = re.compile(r"[0-9a-f]{32}-[0-9]{6,10}", re.ASCII)
_MARK = "~"
_DIGITS = re.compile(r"[0-9a-f]{8}", re.ASCII)
_MAX_PATH = 4096
_MAX_COMPONENT = 255


def check_name(name: str, what: str = "the name of a snapshot") -> str:
    """Return `name` if a snapshot can be called that; `what` it is otherwise, for the error.

    Raises
    ------
    BadName : it is empty, too long, or holds other characters than letters, digits, ``._-``.
    """
    if not name:
        why = "it is empty"
    elif len(name) > MAX_NAME:
        why = f"it has {len(name)} characters, at most {MAX_NAME} are allowed"
    elif name[0] in ".-":
        why = f"it starts with {name[0]!r}"
    elif not _NAME.fullmatch(name):
        odd = next(c for c in name if not _NAME.fullmatch("_" + c))
        # By its number, too: it may look like one that is allowed.
        why = f"it contains {odd!r}" + ("" if odd.isascii() else f" (U+{ord(odd):04X})")
    else:
        return name
    shown = repr(name if len(name) <= MAX_NAME else name[:20] + "...")
    raise BadName(
        f"{shown} cannot be {what}.",
        why,
        "Use letters, digits, `.`, `_`, `-` (at most 100); start with a letter, digit or `_`, "
        "for example before_finetune.",
        name=name[:MAX_NAME].encode("ascii", "backslashreplace").decode("ascii"),
    )


def check_key(key: str) -> str:
    """Return `key` if a snapshot can have it in the store.

    Raises
    ------
    BadName : it is neither a name nor what `key_of` makes of one.
    """
    name, mark, digits = key.partition(_MARK)
    check_name(name if not mark or _DIGITS.fullmatch(digits) else key)
    return key


def key_of(name: str, whose: str) -> str:
    """Return the key of the snapshot `name` of one whom the text `whose` identifies, where others have that name."""
    return f"{name}{_MARK}{hashlib.sha256(whose.encode()).hexdigest()[:8]}"


def name_of(key: str) -> str:
    """Return the name that was given to the snapshot that has this key."""
    return key.partition(_MARK)[0]


def is_id(text: object) -> bool:
    """Tell whether `text` is a snapshot's id: a UUID as 32 small hexadecimal digits."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def is_plain_path(text: str) -> bool:
    """Tell whether `text` is a relative path that stays inside its folder, in its one spelling."""
    if not text or len(text) > _MAX_PATH or not text.isprintable() or "\\" in text:
        return False
    return all(part not in ("", ".", "..") and len(part.encode()) <= _MAX_COMPONENT for part in text.split("/"))


def pack_name(session: str, number: int) -> str:
    """Return the name of the pack with this number (from 1) of a session."""
    return f"{session}-{number:06d}"


def is_pack(name: str) -> bool:
    """Tell whether a file's name is that of a pack."""
    return _PACK.fullmatch(name) is not None


def session_of(pack: str) -> str:
    """Return the id of the session that wrote the pack of this name."""
    return pack[:32]
