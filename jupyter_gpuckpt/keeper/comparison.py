"""What changed from one snapshot to another: variables, memory, GPU memory and files."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..freeze import areas
from ..freeze.areas import Memory
from ..store import Contents, Manifest, Parts, Store
from ..store.difference import changed_ranges, difference
from .files import kept_files, needs
from .summary import labels

__all__ = ["VARIABLES", "compare"]

VARIABLES = "variables.json"
"""The part of a snapshot that names the kernel's variables."""

_CRIU, _VRAM = "criu/", "vram/"
_WHOLE = 4 << 20
"""Bytes that an array has at least whose contents are compared."""


def compare(store: Store, old: str, new: str) -> dict[str, Any]:
    """Return what became of the snapshot `old` in `new`, as JSON types.

    ``variables``: each that is new, gone or changed, with what is known of it in both. ``memory``: by process and kind
    of area, ``changed`` bytes that `old` has nowhere, and ``old`` and ``new`` sizes. ``gpu_memory``: the same by file,
    of which each process has its own. ``used_files`` and ``kept_files``: those that the kernel began or ceased to use,
    and that the snapshots keep otherwise. ``files``: the parts of the snapshots as the store has them.

    Raises
    ------
    BadName, NoSuchSnapshot, Damaged, Incompatible : as `Store.open`.
    """
    before, after = _read(store, old), _read(store, new)
    changes = difference(before.contents, after.contents)
    memory, touched = _memory(before, after)
    rows, doubtful = _variables(before, after, _related(store, before.manifest, after.manifest), touched)
    if doubtful:
        rows += _changed_inside(store, before, after, doubtful)
    shown = labels([after.manifest, before.manifest])
    return {
        "old": shown[before.manifest.name],
        "new": shown[after.manifest.name],
        "variables": sorted(rows, key=lambda row: row["name"]),
        "memory": memory,
        "gpu_memory": [
            {
                "process": change.path.removeprefix(_VRAM),
                "changed": change.changed,
                "old": change.old,
                "new": change.new,
            }
            for change in changes
            if change.path.startswith(_VRAM) and (change.changed or change.old != change.new)
        ],
        "used_files": _used_files(before, after),
        "kept_files": _kept_files(before, after),
        "changed": sum(change.changed for change in changes),
        "files": [asdict(change) for change in changes],
    }


class _Side:
    """One of the two snapshots, with what it says of itself."""

    def __init__(self, manifest: Manifest, contents: Contents, files: Mapping[str, bytes]) -> None:
        self.manifest, self.contents = manifest, contents
        self.variables: dict[str, dict[str, Any]] = {}
        if VARIABLES in files:
            self.variables = {one["name"]: one for one in json.loads(files[VARIABLES])["variables"]}
        images = {path.removeprefix(_CRIU): raw for path, raw in files.items() if path.startswith(_CRIU)}
        self.memories = {one.pid: one for one in areas.memories(images)} if "files.img" in images else {}
        self.used = {file.path for file in needs.from_json(files[needs.NEEDS])} if needs.NEEDS in files else set()
        table = kept_files.TABLE
        self.kept = {one.path: one for one in kept_files.from_json(files[table]).files} if table in files else {}


def _read(store: Store, name: str) -> _Side:
    wanted = (VARIABLES, needs.NEEDS, kept_files.TABLE)
    manifest = store.get(name)
    images = [p for p in store.contents(manifest).files if p.startswith(_CRIU) and areas.wanted(p[len(_CRIU) :])]
    return _Side(*store.read_files(name, [*wanted, *images]))


def _related(store: Store, old: Manifest, new: Manifest) -> bool:
    """Tell whether both come from one process, so that what lies at the same address may be the same object."""
    parents = {manifest.id: manifest.parent for manifest in store.list()}

    def line(manifest: Manifest) -> Iterator[str]:
        one: str | None = manifest.id
        seen: set[str] = set()
        while one is not None and one not in seen:
            seen.add(one)
            yield one
            one = parents.get(one)

    return not set(line(old)).isdisjoint(line(new))


# -- memory


def _memory(before: _Side, after: _Side) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """Return what changed by process and kind of area, and from where to where in the kernel's memory."""
    known = {chunk.hash for chunk in before.contents.chunks()}
    touched: list[tuple[int, int]] = []
    rows = []
    kernel = after.manifest.process.get("pid")
    for pid in sorted({*before.memories, *after.memories}):
        old, new = before.memories.get(pid), after.memories.get(pid)
        ranges = sorted(_changed(new, after.contents, known)) if new else []
        if pid == kernel:
            touched = ranges
        changed = _by_kind(new, ranges) if new else {}
        sizes = [_by_kind(one, [(begin, end) for begin, end, _ in one.runs]) if one else {} for one in (old, new)]
        for what in sorted({*sizes[0], *sizes[1]}, key=lambda kind: -changed.get(kind, 0)):
            row = {"changed": changed.get(what, 0), "old": sizes[0].get(what, 0), "new": sizes[1].get(what, 0)}
            if row["changed"] or row["old"] != row["new"]:
                rows.append({"process": pid, "area": what, **row})
    return rows, touched


def _changed(memory: Memory, contents: Contents, known: set[bytes]) -> Iterator[tuple[int, int]]:
    for offset, size in changed_ranges(contents.files.get(_CRIU + memory.image, ()), known):
        yield from memory.addresses(offset, size)


def _by_kind(memory: Memory, ranges: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Return how many bytes of these ranges lie in areas of each kind."""
    found: dict[str, int] = defaultdict(int)
    starts = [area.start for area in memory.areas]
    for begin, end in ranges:
        at = max(bisect_right(starts, begin) - 1, 0)
        for area in memory.areas[at:]:
            if area.start >= end:
                break
            found[area.what] += max(min(end, area.end) - max(begin, area.start), 0)
    return {what: count for what, count in found.items() if count}


# -- variables


_Ranges = list[tuple[int, int]]


def _variables(
    before: _Side, after: _Side, related: bool, touched: Sequence[tuple[int, int]]
) -> tuple[list[dict[str, Any]], dict[str, _Ranges]]:
    """Return the variables that changed, and where in memory to look for changes of others, by name."""
    rows = []
    doubtful: dict[str, _Ranges] = {}
    for name in sorted({*before.variables, *after.variables}):
        old, new = before.variables.get(name), after.variables.get(name)
        how = _how(old, new, related)
        if how:
            rows.append(_row(before, after, name, how))
        elif related and new is not None and (inside := _inside(new, touched)):
            doubtful[name] = inside
    return rows, doubtful


def _row(before: _Side, after: _Side, name: str, how: str) -> dict[str, Any]:
    old, new = _told(before.variables.get(name)), _told(after.variables.get(name))
    return {"name": name, "how": how, "old": old, "new": new}


def _how(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None, related: bool) -> str:
    """Return in a word what became of a variable; empty where it seems to be the same."""
    if old is None or new is None:
        return "new" if old is None else "gone"
    if old["type"] != new["type"]:
        return "another type"
    if any(old.get(key) != new.get(key) for key in ("shape", "length", "dtype", "device")):
        return "another shape"
    if old.get("size") != new.get("size"):
        return "another size"
    if related and old["identity"] != new["identity"]:
        return "another object"
    return ""


def _inside(variable: Mapping[str, Any], touched: Sequence[tuple[int, int]]) -> _Ranges:
    """Return the parts of what changed in memory that are a large array's."""
    begin, size = variable.get("address"), variable.get("size", 0)
    if begin is None or size < _WHOLE:
        return []
    return [(max(a, begin), min(b, begin + size)) for a, b in touched if a < begin + size and b > begin]


def _changed_inside(store: Store, before: _Side, after: _Side, doubtful: Mapping[str, _Ranges]) -> list[dict[str, Any]]:
    """Return those of these variables that hold other bytes.

    A chunk that only one of the snapshots has does not tell: what changed in it may be what lies beside an array, or
    only where it begins.
    """
    old, new = (side.memories.get(side.manifest.process.get("pid", 0)) for side in (before, after))
    if old is None or new is None:
        return []
    with (
        store.parts(before.manifest, [_CRIU + old.image]) as parts_before,
        store.parts(after.manifest, [_CRIU + new.image]) as parts_after,
    ):
        return [
            _row(before, after, name, "other contents")
            for name, ranges in doubtful.items()
            if any(_bytes_at(parts_before, old, *one) != _bytes_at(parts_after, new, *one) for one in ranges)
        ]


def _bytes_at(parts: Parts, memory: Memory, begin: int, end: int) -> bytes:
    """Return what a process had in its memory; what the image leaves out reads as zeros."""
    found = bytearray(end - begin)
    for first, last, offset in memory.runs[bisect_right(memory.runs, begin, key=lambda run: run[1]) :]:
        if first >= end:
            break
        a, b = max(begin, first), min(end, last)
        found[a - begin : b - begin] = parts.read(_CRIU + memory.image, offset + a - first, b - a)
    return bytes(found)


def _told(variable: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if variable is None:
        return None
    return {key: value for key, value in variable.items() if key not in ("name", "identity", "address")}


# -- files


def _used_files(before: _Side, after: _Side) -> list[dict[str, str]]:
    if not before.used or not after.used:
        return []  # one of them does not say
    return [
        {"path": path, "how": "used now" if path in after.used else "used no more"}
        for path in sorted(before.used ^ after.used)
    ]


def _kept_files(before: _Side, after: _Side) -> list[dict[str, str]]:
    if not before.kept or not after.kept:
        return []
    rows = []
    for path in sorted({*before.kept, *after.kept}):
        old, new = before.kept.get(path), after.kept.get(path)
        if old is None or new is None:
            rows.append({"path": path, "how": "new" if old is None else "gone"})
        elif _bytes(old, before.contents) != _bytes(new, after.contents):
            rows.append({"path": path, "how": "changed"})
    return rows


def _bytes(file: kept_files.KeptFile, contents: Contents) -> object:
    if file.hash or not file.part:
        return file.hash, file.size, file.link
    return [chunk.hash for chunk in contents.files.get(file.part, ())], file.size, file.link
