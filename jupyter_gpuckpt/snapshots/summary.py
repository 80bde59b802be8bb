"""What listings and results say of a snapshot; apart from the operations, so that listings start fast."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from .. import __version__
from ..errors import GpuckptError
from ..operations.results import AUTOMATIC, Details, Labelled, Snapshots, Summary
from ..spelling import Spell
from ..store import Labels, Manifest, Store, name_of

HIBERNATED = "hibernated"
"""The tag of the snapshot of a kernel that is on the disk alone, and how its name begins."""


def listing(store: Store, spell: Spell) -> Snapshots:
    """Return all snapshots, newest first, each with its tags and pin, and what is wrong with those that are damaged.

    What to type about those is spelled as where it is shown.

    Raises
    ------
    StoreError : the store cannot be read.
    """
    said, faults = store.listed(Summary, summary, __version__)
    labelled, nothing = store.all_labels(), Labels()
    newest_first = sorted(said, key=lambda one: (one.created, one.name), reverse=True)
    shown = _labels((one.name, one.notebook) for one in newest_first)
    found = []
    for one in newest_first:
        put = labelled.get(one.id, nothing)
        found.append(Labelled(**{**vars(one), "label": shown[one.name]}, pinned=put.pinned, tags=put.tags))
    return Snapshots(snapshots=found, faults=[fault.spelled(spell).as_dict() for fault in faults])


def summary(manifest: Manifest) -> Summary:
    """Return what listings and results say of a snapshot.

    What its maker has put into it is somebody else's word: a member of another type counts as left out, so that one
    odd snapshot cannot keep the others from being listed.
    """
    kernel, process = manifest.kernel, manifest.process
    return Summary(
        name=manifest.name,
        label=name_of(manifest.name),
        id=manifest.id,
        message=manifest.message,
        created=manifest.created,
        size=manifest.size,
        stored=manifest.stored,
        parent=manifest.parent,
        notebook=_of(kernel, "notebook", str) or "",
        kernel_id=_of(kernel, "kernel_id", str) or "",
        job=_of(kernel, "job", str) or "",
        execution_count=_of(kernel, "execution_count", int),
        gpu_memory=gpu_memory(manifest),
        frozen_seconds=_of(process, "frozen_seconds", int, float),
        gpu_seconds=_of(process, "gpu_seconds", int, float),
        automatic=is_automatic(manifest),
        cell=_of(kernel, "cell", str) or "",
        cells=_of(kernel, "cells", int),
    )


def _of(said: Mapping[str, Any], member: str, *kinds: type) -> Any:
    """Return a member that has one of these types; None where it has not."""
    value = said.get(member)
    return value if type(value) in kinds else None


def summaries(manifests: Iterable[Manifest]) -> list[Summary]:
    """Return the summary of each of some snapshots, newest first, labelled so that they can be told apart."""
    manifests = list(manifests)
    shown = labels(manifests)
    return [replace(summary(manifest), label=shown[manifest.name]) for manifest in manifests]


def labels(manifests: Iterable[Manifest], *, always: bool = False) -> dict[str, str]:
    """Return what people call each of some snapshots, by its key in the store.

    That is its name; where another one has that, too, or `always`, it is ``notebook:name``, with as much of the
    notebook's path as tells them apart. That of a kernel without a notebook is its name alone.
    """
    return _labels(((m.name, str(m.kernel.get("notebook", ""))) for m in manifests), always=always)


def _labels(snapshots: Iterable[tuple[str, str]], *, always: bool = False) -> dict[str, str]:
    found: dict[str, str] = {}
    named: dict[str, dict[str, str]] = defaultdict(dict)
    for key, notebook in snapshots:
        found[key] = key  # where one was fetched of a notebook that had such a name here: nothing else tells them apart
        of_name = named[name_of(key)]
        of_name[notebook] = min(key, of_name.get(notebook, key))
    for name, of_name in named.items():
        for notebook, key in of_name.items():
            plain = not notebook or (len(of_name) == 1 and not always)
            found[key] = name if plain else f"{_end_of(notebook, of_name)}:{name}"
    return found


def notebooks(manifests: Iterable[Manifest]) -> list[str]:
    """Return the notebooks that some snapshots are of, those of the newest first: each by as much as tells it apart."""
    paths = list(dict.fromkeys(str(manifest.kernel.get("notebook", "")) for manifest in manifests))
    return [_end_of(path, paths) for path in paths if path]


def _end_of(notebook: str, all_of_them: Iterable[str]) -> str:
    """Return as much of the end of a notebook's path as no other one has."""
    others = [f"/{other}" for other in all_of_them if other != notebook]
    parts = notebook.split("/")
    ends = ("/".join(parts[at:]) for at in reversed(range(len(parts))))
    return next((end for end in ends if not any(other.endswith(f"/{end}") for other in others)), notebook)


def details(manifest: Manifest) -> Details:
    """Return all there is to say of a snapshot, but for its list of files."""
    return Details(
        **vars(summary(manifest)),
        kernel=manifest.kernel,
        machine=manifest.machine,
        cuda=manifest.cuda,
        process=manifest.process,
    )


def origins(store: Store, name: str) -> list[Summary]:
    """Return the summary of a snapshot and of those that its kernel came from, the newest first.

    It ends where one has been removed.

    Raises
    ------
    BadName, NoSuchSnapshot, Damaged, Incompatible : as `Store.get`.
    StoreError : the store cannot be read.
    """
    known = {manifest.id: manifest for manifest in store.list()}
    found: list[Manifest] = []
    next_one: Manifest | None = store.get(name)
    while next_one is not None and next_one not in found:
        found.append(next_one)
        next_one = known.get(next_one.parent or "")
    return [summary(manifest) for manifest in found]


def gpu_memory(manifest: Manifest) -> int:
    """Return the GPU memory that the saved processes held, in bytes; 0 where that is not said as it has to be."""
    try:
        held = held_by(manifest.cuda)
    except (TypeError, AttributeError):
        return 0
    return held if type(held) is int else 0


def held_by(described: Mapping[str, Any]) -> int:
    """Return the GPU memory, in bytes, of processes that `cuda.describe` tells of."""
    return sum(held for process in described.get("processes", []) for held in process.get("used", {}).values())


def current_name(store: Store, name: str, snapshot_id: str) -> str:
    """Return what a snapshot is called now that had this name: somebody may have renamed it.

    Raises
    ------
    NoSuchSnapshot, Damaged, Incompatible : as `Store.get`.
    """
    with contextlib.suppress(GpuckptError):
        if store.get(name).id == snapshot_id:
            return name
    found = next((manifest.name for manifest in store.list() if manifest.id == snapshot_id), None)
    return found or store.get(name).name


def is_of(manifest: Manifest, kernel_id: str, notebook: str) -> bool:
    """Tell whether a snapshot was saved from this kernel, or from its notebook where that is known."""
    kernel = manifest.kernel
    return kernel.get("kernel_id") == kernel_id or bool(notebook and kernel.get("notebook") == notebook)


def is_automatic(manifest: Manifest) -> bool:
    """Tell whether a snapshot was saved by itself, and has the name that it was given then."""
    return bool(manifest.kernel.get("after")) and name_of(manifest.name).startswith(AUTOMATIC)


def is_of_notebook(manifest: Manifest, notebook: str) -> bool:
    """Tell whether a snapshot was saved from a notebook with this path, the end of it, or this name."""
    saved = "/" + str(manifest.kernel.get("notebook", ""))
    return saved.endswith((f"/{notebook}", f"/{notebook}.ipynb"))
