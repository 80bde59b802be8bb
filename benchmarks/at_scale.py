"""What a store has to bear on a cluster: ``python -m benchmarks.at_scale``, by the store's own code.

A drain: the processes of a node save kernels into one store at once, whole and then with little changed, while another
one collects. A collection, in stores of one user and of a whole group. With ``--nfs``, after ``make test-shared-store``
has fetched what that takes: how many requests each work makes of a file server.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path

from jupyter_gpuckpt.store import Store

from .growth import _fill, _Last

_ABOUT = {"message": "", "parent": None, "kernel": {}, "machine": {}, "cuda": {}, "process": {}}
_MB = 1_000_000
_SPAWN = multiprocessing.get_context("spawn")


def _kernel(size: int) -> bytearray:
    """Return what a kernel's memory may be: half of it as in all others, half its own."""
    return bytearray(b"a library's" * (size // 22)) + bytearray(os.urandom(size // 2))


def _change(raw: bytearray, share: float) -> None:
    """Change a part of what is its own."""
    begin, size = len(raw) // 2, int(share * len(raw))
    raw[begin : begin + size] = os.urandom(size)


def _saver(
    root: Path, number: int, kernels: int, size: int, begin: Barrier, out: multiprocessing.Queue[list[float]]
) -> None:
    store = Store(root)
    contents = [_kernel(size) for _ in range(kernels)]
    begin.wait()
    times = []
    for round_number, changed in enumerate((0.0, 0.1)):
        for k, raw in enumerate(contents):
            _change(raw, changed)
            began = time.perf_counter()
            with store.writer(f"r{round_number}-p{number}-k{k}") as writer:
                writer.directory.joinpath("pages-1.img").write_bytes(raw)
                writer.commit(**_ABOUT)
            times.append(time.perf_counter() - began)
    out.put(times)


def _drain(processes: int, kernels: int, size: int) -> None:
    with tempfile.TemporaryDirectory(prefix="gpuckpt-bench-") as name:
        root = Path(name, "store")
        store = Store(root)
        begin, out = _SPAWN.Barrier(processes + 1), _SPAWN.Queue()
        savers = [
            _SPAWN.Process(target=_saver, args=(root, number, kernels, size, begin, out)) for number in range(processes)
        ]
        for saver in savers:
            saver.start()
        begin.wait()
        began = time.perf_counter()
        collections = []
        times: list[list[float]] = []
        while len(times) < processes:
            while not out.empty():
                times.append(out.get())
            if root.exists():
                at = time.perf_counter()
                store.collect()
                collections.append(time.perf_counter() - at)
            time.sleep(0.2)
        took = time.perf_counter() - began
        for saver in savers:
            saver.join()
        whole = sorted(t for one in times for t in one[:kernels])
        little = sorted(t for one in times for t in one[kernels:])
        count = processes * kernels
        assert len(store.list()) == 2 * count
        assert not store.check().faults
        print(
            f"| {processes} | {count} | {size / _MB:.0f} MB | {took:.1f} s | {_middle(whole)} | {_middle(little)} "
            f"| {store.used() / _MB:,.0f} MB of {2 * count * size / _MB:,.0f} | {max(collections):.2f} s |"
        )


def _middle(times: Sequence[float]) -> str:
    return f"{times[len(times) // 2]:.2f} s, {times[-1]:.2f} s"


def _collections(counts: Sequence[int]) -> None:
    with tempfile.TemporaryDirectory(prefix="gpuckpt-bench-", dir="/dev/shm") as name:
        root, last, before = Path(name, "store"), _Last(), 0
        for count in counts:
            _fill(root, before, count, 50, last)
            before = count
            store = Store(root)
            began = time.perf_counter()
            store.collect()
            took = time.perf_counter() - began
            files = sum(len(files) for _, _, files in os.walk(root))
            print(f"| {count:,} | {files:,} | {took:.2f} s |")


_OF_NFS = """
def requests():
    lines = Path("/proc/net/rpc/nfs").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rpc")).split()[1])
def counted(work):
    before = requests()
    work()
    return requests() - before
size = 20_000_000
content = __import__("random").Random(1).randbytes(size)
def save_it(name, changed):
    raw = content[:-changed] + os.urandom(changed) if changed else content
    save(store, name, files={"a": raw, **{f"f{n}": b"x" * 100 for n in range(20)}})
"""


def _requests() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from shared_store.machines import Cluster

    cluster = Cluster()
    try:
        a, b = cluster.client("a"), cluster.client("b")
        for machine in (a, b):
            machine.does("import os", _OF_NFS)
        a.does("save_it('first', 0)")
        rows = {
            "save, 20 MB of which nothing is new": a.does("counted(lambda: save_it('same', 0))"),
            "save, 20 MB of which 2 MB are new": a.does("counted(lambda: save_it('little', 2_000_000))"),
            "restore of 20 MB on the other machine": b.does("counted(lambda: read_back(store, 'first'))"),
        }
        a.does("[save(store, f'n{n}') for n in range(40)]", "None")
        rows["list of 43 snapshots, for the first time"] = b.does("counted(store.list)")
        rows["list of 43 snapshots, again"] = b.does("counted(store.list)")
        rows["collection, 43 snapshots"] = b.does("counted(store.collect)")
        rows["lease taken and given back"] = b.does(
            "it = store.get('first')", "counted(lambda: store.lease(it.id, 'x').close())"
        )
        for what, count in rows.items():
            print(f"| {what} | {count} |")
    finally:
        cluster.close()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nfs", action="store_true", help="also count the requests of a client of NFS")
    args = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    print(
        "| processes | kernels | each | both rounds | a save, middle and longest | with 10 % changed "
        "| in the store | longest collection |\n" + "| --- " * 8 + "|"
    )
    for processes in (1, 2, 4, 8):
        _drain(processes, 20 // processes if processes < 8 else 3, 100 * _MB)
    print("| snapshots | files | collection |\n| --- | --- | --- |")
    _collections((100, 1_000, 5_000))
    if args.nfs:
        print("| work | requests |\n| --- | --- |")
        _requests()


if __name__ == "__main__":
    main()
