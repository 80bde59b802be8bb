"""Meet an operation on a store at each of its system calls in turn, and say what is left.

A program: ``fault_cases.py FAULT OPERATION FOLDER`` prints one line of JSON for each case.
It stands alone so that its children are forked from a process that has no other threads.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disk_model import Disk
from store_helpers import FILES, abandon, fill, litter, open_by_mode, read_back, readable_by_others, save
from system_calls import CHANGES, READS, Fault, run

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.errors import GpuckptError
from jupyter_gpuckpt.store import Store, hints
from jupyter_gpuckpt.store.transfer.container import export_snapshot, import_snapshot
from jupyter_gpuckpt.store.transfer.sealing import Secrets
from jupyter_gpuckpt.store.trust import Trust

CHANGED = {**FILES, "core-1.img": b"another core"}


def prepare_nothing(store: Store) -> None:
    pass


def prepare_two(store: Store) -> None:
    save(store, "other", "old")
    save(store, "it", "old")


def prepare_other(store: Store) -> None:
    save(store, "other", "old")


def prepare_litter(store: Store) -> None:
    save(store, "it", "old")
    for _ in range(2):
        writer = store.writer("never")
        fill(writer)
        abandon(writer)


def prepare_export(store: Store) -> None:
    save(store, "other", "old")
    maker = Store(store.root.parent / "maker")
    save(maker, "it", "new", CHANGED)
    with (store.root.parent / "it.export").open("wb") as out:
        export_snapshot(maker, "it", out, Secrets(settings.keys_dir()))


def operate_import(store: Store) -> None:
    with (store.root.parent / "it.export").open("rb") as source:
        import_snapshot(store, source, "it.export", Secrets(settings.keys_dir()))


def operate_save(store: Store) -> None:
    save(store, "it", "new", CHANGED)


def operate_hinted(store: Store) -> None:
    hints._MANY_PARTS = 1
    operate_save(store)


def operate_replace(store: Store) -> None:
    save(store, "it", "new", CHANGED, replace=True)


def operate_remove(store: Store) -> None:
    store.remove("it")


def operate_collect(store: Store) -> None:
    store.collect()


def operate_open(store: Store) -> None:
    store.open("it", store.root.parent / "files").close()


OPERATIONS: dict[str, tuple[Callable[[Store], None], Callable[[Store], None]]] = {
    "first save": (prepare_nothing, operate_save),
    "save": (prepare_other, operate_save),
    "hinted save": (prepare_other, operate_hinted),
    "replace": (prepare_two, operate_replace),
    "import": (prepare_export, operate_import),
    "remove": (prepare_two, operate_remove),
    "collect": (prepare_litter, operate_collect),
    "open": (prepare_two, operate_open),
}


def state(store: Store) -> dict[str, Any]:
    """Say what the store holds now: each name with its message, or with what is wrong."""
    manifests, broken = store.scan()
    found: dict[str, Any] = {e.data["name"]: f"broken: {e}" for e in broken}
    for manifest in manifests:
        try:
            assert read_back(store, manifest.name) == (CHANGED if manifest.message == "new" else FILES)
            found[manifest.name] = manifest.message
        except GpuckptError as e:
            found[manifest.name] = f"broken: {e}"
    return found


def main(kind: str, operation: str, folder: Path) -> None:
    prepare, operate = OPERATIONS[operation]
    Trust(settings.keys_dir()).own()  # made once, not in the first case alone
    template = folder / "template"
    prepare(Store(template))
    reading = kind.startswith("read")
    counted = READS if reading else CHANGES
    faults: dict[str, Callable[[int], Fault]] = {
        "kill": lambda n: Fault(n, kill=True),
        "cut": lambda n: Fault(n, cut=True),
        "fail once": lambda n: Fault(n, error=errno.EIO),
        "fail for good": lambda n: Fault(n, error=errno.EIO, for_good=True),
        "read fails once": lambda n: Fault(n, error=errno.EIO),
        "read fails for good": lambda n: Fault(n, error=errno.EIO, for_good=True),
    }

    def attempt(
        fault: Fault | None, watch: Callable[[str, str], None] | None = None, ready: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        root = folder / "store"
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(folder / "files", ignore_errors=True)
        if template.exists():
            shutil.copytree(template, root)
        ready()
        outcome = run(lambda: operate(Store(root)), counted, fault, watch)
        report = {
            "at": fault.at if fault else None,
            "calls": outcome.calls,
            "synced": outcome.synced,
            "failure": outcome.failure,
            "text": outcome.text,
            "after": state(Store(root)),
        }
        if (root / "format.json").exists():
            Store(root).collect()
        else:
            Store(root).writer("next").close()  # what was not yet a store is finished by a save
        report["litter"] = litter(Store(root))
        report["at last"] = state(Store(root))
        return report

    if kind == "watch":
        os.umask(0)
        seen: set[str] = set()
        looks = 0

        def look(_: str, __: str) -> None:
            nonlocal looks
            looks += 1
            with contextlib.suppress(FileNotFoundError):
                seen.update(readable_by_others(folder / "store"), open_by_mode(folder / "store"))

        report = attempt(None, look)
        print(json.dumps({**report, "seen": sorted(seen), "looks": looks}))
        return
    if kind.startswith("power"):
        disk = Disk(folder / "store")
        seen_states: list[dict[str, Any]] = []

        def observe(call: str, synced: str) -> None:
            if call == "fsync":
                disk.sync(Path(synced))
            after_cut = folder / "after" / "store"
            shutil.rmtree(after_cut, ignore_errors=True)
            disk.cut(after_cut, names_survive=kind.endswith("names"))
            found = state(Store(after_cut)) if (after_cut / "format.json").exists() else {}
            if not seen_states or seen_states[-1]["state"] != found:
                seen_states.append({"call": call, "state": found})

        report = attempt(None, observe, disk.sync_all)
        print(json.dumps({**report, "seen": seen_states}))
        return
    clean = attempt(None)
    print(json.dumps(clean))
    for at, call in enumerate(clean["calls"]):
        if kind != "cut" or call in ("write", "pwritev2"):
            print(json.dumps(attempt(faults[kind](at))))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
