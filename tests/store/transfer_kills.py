"""Kill a push and a pull at each of their requests in turn, do them again, and say what is left and what travels.

A program: ``transfer_kills.py push|pull FOLDER`` prints one line of JSON for each case. It stands alone so that its
children are forked from a process that has no other threads.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from store_helpers import litter, read_back, save
from transfer_helpers import LARGE, Counting, counted, person, secrets_of

from jupyter_gpuckpt.errors import NoSuchSnapshot
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.transfer import pull as pulling
from jupyter_gpuckpt.store.transfer import push as pushing
from jupyter_gpuckpt.store.transfer.remote_store import RemoteStore
from jupyter_gpuckpt.store.transfer.remotes.remote import remote_at

pushing._PACK = 50_000
pulling._RUN = 50_000  # type: ignore[attr-defined]
FILES = {**LARGE, **{f"pages-{number}.img": os.urandom(60_000) for number in range(2, 9)}}
RemoteStore.threads = 1  # type: ignore[assignment,method-assign]  # so that the same request is the Nth each time


def in_child(do: Callable[[], Any]) -> Any:
    """Return what a function returns in a process of its own; None where that was killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writing, json.dumps(do()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as f:
        said = f.read()
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    return json.loads(said) if said else None


def killing(at: int) -> Callable[[str, str], None]:
    """Return what ends the process before its request number `at`."""
    left = [at]

    def before(what: str, path: str) -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    return before


def transfer(work: str, folder: Path, ann: Store, bob: Store, before: Callable[[str, str], None]) -> dict[str, Any]:
    there = Counting(remote_at(str(folder / "remote")), before)
    if work == "push":
        sent = pushing.push(ann, "it", RemoteStore(there, secrets_of(ann), create=True)).sent
        return {"requests": there.requests, "bytes": sent, "written": there.written_bytes}
    fetched = pulling.pull(bob, RemoteStore(there, secrets_of(bob)), "it").fetched
    return {"requests": there.requests, "bytes": fetched, "read": there.read_bytes}


def is_there(folder: Path, store: Store) -> bool:
    try:
        counted(folder / "remote", store)[0].manifest("it")
    except NoSuchSnapshot:
        return False
    return True


def look(work: str, folder: Path, ann: Store, bob: Store) -> dict[str, Any]:
    if work == "push":
        pulling.pull(bob, counted(folder / "remote", bob)[0], "it")
        names = {path.name for path in (folder / "remote" / "index").iterdir()}
        return {"whole": read_back(bob, "it") == FILES, "index": len(names)}
    return {"whole": read_back(bob, "it") == FILES, "litter": litter(bob), "faults": len(bob.check(True).faults)}


def main(work: str, folder: Path) -> None:
    ann, bob = person(folder, "ann"), person(folder, "bob")
    save(ann, "it", files=FILES)
    bob.trust.add(ann.trust.own())
    if work == "pull":
        in_child(lambda: transfer("push", folder, ann, bob, lambda *_: None))
    whole = None
    at = -1
    while True:
        if work == "push":
            shutil.rmtree(folder / "remote", ignore_errors=True)
        shutil.rmtree(bob.root, ignore_errors=True)
        (bob.trust.folder / "newest.json").unlink(missing_ok=True)
        did = in_child(partial(transfer, work, folder, ann, bob, killing(at)))
        report: dict[str, Any] = {"at": at, "done": did}
        if at >= 0 and did is None:
            report["visible"] = is_there(folder, ann) if work == "push" else [m.name for m in bob.list()]
            report["again"] = in_child(lambda: transfer(work, folder, ann, bob, lambda *_: None))
        report["after"] = in_child(lambda: look(work, folder, ann, bob))
        print(json.dumps(report))
        whole = whole or did
        at += 1
        if at >= len(whole["requests"]):
            return


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
