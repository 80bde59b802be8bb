"""What changed from one snapshot to another: variables, memory, GPU memory and files."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..checked import from_json
from ..freeze import areas
from ..freeze.areas import Memory
from ..operations.results import Comparison, FileChange, MemoryChange, PartChange, Variable, VariableChange
from ..store import Contents, Manifest, Parts, Store
from ..store.difference import changed_ranges, difference
from . import kept_files, needs
from .summary import labels

__all__ = ["VARIABLES", "compare"]

VARIABLES = "variables.json"
"""The part of a snapshot that names the kernel's variables."""

_CRIU, _VRAM = "criu/", "vram/"
_LIBRARY = re.compile(r"\.so(\.[\d.]+)?$")
"""How libraries are called; not all of them have a build id."""


def compare(store: Store, old: str, new: str) -> Comparison:
    """Return what became of the snapshot `old` in `new`.

    Raises
    ------
    BadName, NoSuchSnapshot, Damaged, Incompatible : as `Store.open`.
    """
    before, after = _read(store, old), _read(store, new)
    changes = difference(before.contents, after.contents)
    memory, touched = _memory(before, after)
    same_origin = _have_one_origin(store, before, after)
    shown = labels([after.manifest, before.manifest])
    variables = _variables(store, before, after, same_origin, touched)
    return Comparison(
        old=shown[before.manifest.name],
        new=shown[after.manifest.name],
        variables=variables.changed,
        unchanged=variables.unchanged,
        not_compared=variables.not_compared,
        same_origin=same_origin,
        memory=memory,
        gpu_memory=[
            MemoryChange(
                process=change.path.removeprefix(_VRAM), changed=change.changed, old=change.old, new=change.new
            )
            for change in changes
            if change.path.startswith(_VRAM) and (change.changed or change.old != change.new)
        ],
        used_files=_used_files(before, after),
        kept_files=_kept_files(before, after),
        changed=sum(change.changed for change in changes),
        files=[PartChange(**asdict(change)) for change in changes],
    )


@dataclass(frozen=True)
class _Traced:
    """A variable, with what says something of it only beside the same of another snapshot (`kernel.variables`)."""

    name: str
    identity: int
    """Where the object lies."""
    about: Variable
    trace: int | None
    data: Sequence[tuple[int, int]]
    """From where to where its data lies, in ascending order."""
    whole: bool


def _traced(said: Mapping[str, Any]) -> _Traced:
    about = from_json(Variable, said)
    data = sorted((begin, begin + size) for begin, size in said.get("data", ()))
    return _Traced(said["name"], said["identity"], about, said.get("trace"), data, bool(said.get("whole")))


class _Side:
    """One of the two snapshots, with what it says of itself."""

    def __init__(self, manifest: Manifest, contents: Contents, files: Mapping[str, bytes]) -> None:
        self.manifest, self.contents = manifest, contents
        self.tells_variables = VARIABLES in files
        told = json.loads(files.get(VARIABLES, b'{"variables": [], "left_out": 0}'))
        self.variables = {one.name: one for one in map(_traced, told["variables"])}
        self.lacks_some: bool = told["left_out"] > 0
        images = {path.removeprefix(_CRIU): raw for path, raw in files.items() if path.startswith(_CRIU)}
        self.memories = {one.pid: one for one in areas.memories(images)} if "files.img" in images else {}
        used = needs.from_json(files[needs.NEEDS]) if needs.NEEDS in files else []
        self.memory = self.memories.get(manifest.process.get("pid", 0))
        """The kernel's own."""
        self.used = {file.path for file in used}
        self.programs = {file.path for file in used if file.build_id or _LIBRARY.search(file.path)}
        """Programs and libraries."""
        table = kept_files.TABLE
        self.kept = {one.path: one for one in kept_files.from_json(files[table]).files} if table in files else {}


def _read(store: Store, name: str) -> _Side:
    wanted = (VARIABLES, needs.NEEDS, kept_files.TABLE)
    manifest = store.get(name)
    images = [p for p in store.contents(manifest).files if p.startswith(_CRIU) and areas.wanted(p[len(_CRIU) :])]
    return _Side(*store.read_files(name, [*wanted, *images]))


def _have_one_origin(store: Store, before: _Side, after: _Side) -> bool:
    """Tell whether both come from one process, so that what lies at the same address may be the same object."""
    parents = {manifest.id: manifest.parent for manifest in store.list()}

    def line(manifest: Manifest) -> Iterator[str]:
        one: str | None = manifest.id
        seen: set[str] = set()
        while one is not None and one not in seen:
            seen.add(one)
            yield one
            one = parents.get(one)

    if before.memory is None or after.memory is None or before.memory.pid != after.memory.pid:
        return False
    return not set(line(before.manifest)).isdisjoint(line(after.manifest))


# -- memory


def _memory(before: _Side, after: _Side) -> tuple[list[MemoryChange], list[tuple[int, int]]]:
    """Return what changed by process and kind of area, and from where to where in the kernel's memory."""
    known = {chunk.hash for chunk in before.contents.chunks()}
    touched: list[tuple[int, int]] = []
    rows = []
    for pid in sorted({*before.memories, *after.memories}):
        old, new = before.memories.get(pid), after.memories.get(pid)
        ranges = sorted(_changed(new, after.contents, known)) if new else []
        if new is after.memory:
            touched = ranges
        changed = _by_kind(new, ranges) if new else {}
        sizes = [_by_kind(one, [(begin, end) for begin, end, _ in one.runs]) if one else {} for one in (old, new)]
        kinds = {*sizes[0], *sizes[1]} - before.programs - after.programs
        for what in sorted(kinds, key=lambda kind: -changed.get(kind, 0)):
            was, is_ = sizes[0].get(what, 0), sizes[1].get(what, 0)
            if changed.get(what, 0) or was != is_:
                rows.append(MemoryChange(process=pid, area=what, changed=changed.get(what, 0), old=was, new=is_))
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


@dataclass(frozen=True)
class _Variables:
    """As `Comparison` has them."""

    changed: list[VariableChange]
    unchanged: int | None
    not_compared: list[str]


def _variables(
    store: Store, before: _Side, after: _Side, same_origin: bool, touched: Sequence[tuple[int, int]]
) -> _Variables:
    """Return the variables that changed, and what can be said of the others."""
    if not (before.tells_variables and after.tells_variables):
        return _Variables([], None, [])
    found = {name: _how(before, after, name, same_origin) for name in {*before.variables, *after.variables}}
    same = {name for name, how in found.items() if how == ""}
    compared = {name for name in same if same_origin and _is_settled(name, before, after)}
    doubtful = {name: inside for name in same if same_origin and (inside := _inside(after.variables[name], touched))}
    changed = _changed_inside(store, before, after, doubtful)
    found |= dict.fromkeys(changed, "contents changed")
    unknown = {name for name, how in found.items() if not how} - compared
    rows = [
        VariableChange(name=name, how=how, old=_about(before, name), new=_about(after, name))
        for name, how in found.items()
        if how
    ]
    return _Variables(sorted(rows, key=_place), len(compared - {*changed}), sorted(unknown))


def _about(side: _Side, name: str) -> Variable | None:
    found = side.variables.get(name)
    return None if found is None else found.about


def _place(row: VariableChange) -> tuple[int, int, str]:
    """Return what puts rows in order: changed ones, then new ones, then deleted ones, each the largest first."""
    sizes = [max(about.size or 0, about.holds or 0) for about in (row.old, row.new) if about is not None]
    return {"new": 1, "deleted": 2}.get(row.how, 0), -max(sizes), row.name


def _how(before: _Side, after: _Side, name: str, same_origin: bool) -> str | None:
    """Return in words what became of a variable; empty where it seems to be the same, None where that is not known."""
    old, new = before.variables.get(name), after.variables.get(name)
    if old is None:
        return None if before.lacks_some else "new"
    if new is None:
        return None if after.lacks_some else "deleted"
    was, is_ = old.about, new.about
    if was.type != is_.type:
        return "type changed"
    other = [name for name in ("length", "shape", "dtype", "device") if getattr(was, name) != getattr(is_, name)]
    other = other or ["size"] * ((was.size, was.holds) != (is_.size, is_.holds))
    if other:
        return f"{' and '.join(other)} changed"
    if same_origin and old.identity != new.identity:
        return "reassigned"
    has_other = same_origin and None not in (old.trace, new.trace) and old.trace != new.trace
    return "contents changed" if has_other else ""


def _is_settled(name: str, before: _Side, after: _Side) -> bool:
    """Tell whether a variable is as it was where none of its objects and none of their bytes are others."""
    ranges = after.variables[name].data
    # What is shared with others, or lies in a file, is not in the process's pages; but what a program has written is.
    own = areas.OWN | before.programs | after.programs
    return all(side.variables[name].whole for side in (before, after)) and all(
        set(_by_kind(side.memory, [one])) <= own
        for one in ranges
        for side in (before, after)
        if side.memory is not None
    )


def _inside(variable: _Traced, touched: Sequence[tuple[int, int]]) -> _Ranges:
    """Return the parts of what changed in memory that are a variable's data."""
    found = []
    for begin, end in variable.data:
        for a, b in touched[bisect_right(touched, begin, key=lambda one: one[1]) :]:
            if a >= end:
                break
            found.append((max(a, begin), min(b, end)))
    return found


def _changed_inside(store: Store, before: _Side, after: _Side, doubtful: Mapping[str, _Ranges]) -> list[str]:
    """Return the names of those of these variables that hold other bytes.

    A chunk that only one of the snapshots has does not tell: what changed in it may be what lies beside an array, or
    only where it begins.
    """
    old, new = before.memory, after.memory
    if old is None or new is None or not doubtful:
        return []
    with (
        store.parts(before.manifest, [_CRIU + old.image]) as parts_before,
        store.parts(after.manifest, [_CRIU + new.image]) as parts_after,
    ):
        return [
            name
            for name, ranges in sorted(doubtful.items(), key=lambda one: one[1])  # in the order of the images
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


# -- files


def _used_files(before: _Side, after: _Side) -> list[FileChange]:
    if not before.used or not after.used:
        return []  # one of them does not say
    return [
        FileChange(path=path, how="in use" if path in after.used else "no longer in use")
        for path in sorted((before.used ^ after.used) - before.programs - after.programs)
    ]


def _kept_files(before: _Side, after: _Side) -> list[FileChange]:
    if not before.kept or not after.kept:
        return []
    rows = []
    for path in sorted({*before.kept, *after.kept}):
        old, new = before.kept.get(path), after.kept.get(path)
        if old is None or new is None:
            rows.append(FileChange(path=path, how="new" if old is None else "deleted"))
        elif _bytes(old, before.contents) != _bytes(new, after.contents):
            rows.append(FileChange(path=path, how="changed"))
    return rows


def _bytes(file: kept_files.KeptFile, contents: Contents) -> object:
    if file.hash or not file.part:
        return file.hash, file.size, file.link
    return [chunk.hash for chunk in contents.files.get(file.part, ())], file.size, file.link
