"""Pull, break off pulls, save, remove and collect in one store at the same time, and say what is left.

A program: ``pulls_together.py FOLDER SECONDS`` prints one line of JSON. It stands alone so that its children are forked
from a process that has no other threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from store_helpers import FILES, litter, read_back, save
from transfer_helpers import at, counted, person

from jupyter_gpuckpt.errors import Busy, NameTaken, NoSuchSnapshot, RemoteError
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.transfer import pull as pulling
from jupyter_gpuckpt.store.transfer import push as pushing

pushing._PACK, pulling._RUN = 30_000, 20_000
SNAPSHOTS = {f"s{n}": {f"p{i}": random.Random(i).randbytes(20_000) for i in range(n, n + 6)} for n in range(3)}


def pull_often(folder: Path, bob: Store, until: float, seed: int) -> None:
    chance = random.Random(seed)
    while time.monotonic() < until:
        name = chance.choice(sorted(SNAPSHOTS))
        here, count = counted(folder / "remote", bob)
        if chance.random() < 0.3:
            count.before = failing_after(chance.randrange(12))
        with contextlib.suppress(Busy, NoSuchSnapshot, NameTaken, RemoteError):
            pulling.pull(bob, here, name)
            assert read_back(bob, name) == SNAPSHOTS[name]
            bob.remove(name)


def failing_after(requests: int) -> Callable[[str, str], None]:
    left = [requests]

    def before(what: str, path: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RemoteError("the network is gone")

    return before


def save_often(bob: Store, until: float) -> None:
    chance = random.Random(9)
    while time.monotonic() < until:
        files = chance.choice(list(SNAPSHOTS.values()))
        save(bob, "mine", "", files, replace=True)
        assert read_back(bob, "mine") == files


def collect_often(bob: Store, until: float) -> None:
    while time.monotonic() < until:
        bob.compact()


def in_child(do: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            do()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def main(folder: Path, seconds: float) -> None:
    ann, bob = person(folder, "ann"), person(folder, "bob")
    bob.trust.add(ann.trust.own())
    for name, files in SNAPSHOTS.items():
        save(ann, name, files=files)

    def begin() -> None:
        for name in SNAPSHOTS:
            pushing.push(ann, name, at(folder / "remote", ann))
        save(bob, "own", files=FILES)

    os.waitpid(in_child(begin), 0)
    until = time.monotonic() + seconds
    work = [partial(pull_often, folder, bob, until, seed) for seed in (1, 2)]
    pids = [in_child(do) for do in (*work, partial(save_often, bob, until), partial(collect_often, bob, until))]
    failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
    faults = [fault.why for fault in bob.check(read_data=True).faults]
    bob.collect()
    whole = read_back(bob, "own") == FILES
    for name in SNAPSHOTS:
        with contextlib.suppress(NameTaken):
            pulling.pull(bob, at(folder / "remote", bob), name)
        whole = whole and read_back(bob, name) == SNAPSHOTS[name]
    print(json.dumps({"failed": failed, "faults": faults, "litter": litter(bob), "whole": whole}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
