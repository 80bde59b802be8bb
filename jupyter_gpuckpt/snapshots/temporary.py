"""Which files are temporary, by where they are: below a folder in which everybody may make some, as /tmp is."""

from __future__ import annotations

import stat
from pathlib import Path

__all__ = ["can_be_made", "temporary_above"]


def _is_for_all(folder: Path) -> bool:
    """Tell whether a folder is one for temporary files, in which everybody may make some (inode(7), sticky bit)."""
    try:
        return bool(folder.stat().st_mode & stat.S_ISVTX)
    except OSError:
        return False


def temporary_above(root: Path, path: str) -> list[str]:
    """Return the folders between one for temporary files and a path; none for what lies elsewhere."""
    found: list[str] = []
    for above in map(str, Path(path).parents):
        if _is_for_all(root / above[1:]):
            return found
        found.append(above)
    return []


def can_be_made(at: Path) -> bool:
    """Tell whether a kept file that is gone can stand there again: in its folder, or below one for temporary files."""
    return at.parent.is_dir() or any(map(_is_for_all, at.parents))
