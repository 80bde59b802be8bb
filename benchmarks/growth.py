"""How the store's work grows with what is in it: ``python -m benchmarks.growth``.

Two questions. How long saves, lists, checks and collections take with ever more snapshots; and what ten snapshots of
one training take on the disk. The training is a stand-in without a GPU: a model of numpy arrays and its optimizer's
state in a real kernel, of which each epoch changes the last layers, and a log that grows.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.snapshots.summary import listing
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.chunks import Chunk, digest
from jupyter_gpuckpt.store.codec import RAW
from jupyter_gpuckpt.store.contents import Contents
from jupyter_gpuckpt.store.index import Index, write_part
from jupyter_gpuckpt.store.layout import Layout
from jupyter_gpuckpt.store.manifest import Manifest
from jupyter_gpuckpt.store.pack import PackWriter

from .ours import OurKernel

_PAGE = 4096
_FRESH, _SIZE = 5, 4096
"""So many chunks of each snapshot are new, of so many bytes."""


@dataclass
class _Last:
    """The chunks of the last snapshot, with their bytes, and where they lie."""

    chunks: list[Chunk] = field(default_factory=list)
    content: list[bytes] = field(default_factory=list)
    index: Index = field(default_factory=dict)


def _fill(root: Path, begin: int, end: int, count: int, last: _Last) -> None:
    """Add snapshots of `count` chunks and numbers from `begin` up to `end`, each mostly the one before."""
    layout = Layout(root)
    layout.prepare()
    for number in range(begin, end):  # quicker than by saving
        session = f"{number:032x}"
        packs = PackWriter(layout.packs, session)
        for _ in range(_FRESH if last.chunks else count):
            data = os.urandom(_SIZE)
            chunk = Chunk(digest(data), len(data))
            packs.put(chunk.hash, chunk.size, RAW, data)
            last.chunks.append(chunk)
            last.content.append(data)
        packs.finish()
        del last.chunks[:-count], last.content[:-count]
        last.index.update(packs.placed)
        last.index = {c.hash: last.index[c.hash] for c in last.chunks}
        write_part(layout, session, last.index, session)
        raw = Contents({"pages": list(last.chunks)}).to_bytes()
        layout.contents_of(session).write_bytes(raw)
        moment = datetime.datetime.fromtimestamp(number, datetime.timezone.utc).isoformat(timespec="microseconds")
        about = {"notebook": "grow.ipynb", "kernel_id": "k", "execution_count": 1}
        manifest = Manifest(
            name=f"n{number}",
            id=session,
            message="",
            created=moment,
            parent=None,
            contents=digest(raw).hex(),
            size=count * _SIZE,
            stored=_FRESH * _SIZE,
            kernel=about,
            machine={},
            cuda={},
            process={"frozen_seconds": 0.1},
        )
        layout.manifest(manifest.name).write_bytes(manifest.to_json())


def _timed(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _save(store: Store, last: _Last) -> None:
    """Save what the last snapshot has, but for a few chunks that are new."""
    content = b"".join(last.content[_FRESH:]) + os.urandom(_FRESH * _SIZE)
    with store.writer(f"s{time.monotonic_ns()}") as writer:
        writer.directory.joinpath("pages").write_bytes(content)
        saved = writer.commit(
            message="",
            parent=None,
            kernel={},
            machine={},
            cuda={},
            process={},
            cut=lambda _: [_SIZE] * len(last.content),
        )
    assert saved.stored < 2 * _FRESH * _SIZE


def _snapshots(counts: list[int], chunks: int, rounds: int) -> None:
    head = ["snapshots", "list", "first list", "save", "first save", "show one", "check", "check --read-data"]
    head += ["gc --dry-run", "gc"]
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    # In memory: what is asked is how the work grows, and not how fast this disk is.
    with tempfile.TemporaryDirectory(prefix="gpuckpt-bench-", dir="/dev/shm") as name:
        root, last = Path(name, "store"), _Last()
        before = 0
        for count in counts:
            _fill(root, before, count, chunks, last)
            before = count
            store = Store(root)
            store.sign(f"n{count // 2}")

            def first(store: Store = store, root: Path = root) -> None:
                (root / "listing.json").unlink(missing_ok=True)
                listing(store)

            first_save = _timed(lambda store=store: _save(store, last), 1)  # type: ignore[misc]
            times = [
                _timed(first, rounds),
                _timed(lambda store=store: _save(store, last), rounds),  # type: ignore[misc]
                first_save,
                _timed(lambda store=store, at=count: store.read_files(f"n{at // 2}", ["pages"]), rounds),  # type: ignore[misc]
                _timed(store.check, rounds),
                _timed(lambda store=store: store.check(read_data=True), rounds),  # type: ignore[misc]
                _timed(store.would_collect, rounds),
                _timed(store.compact, rounds),
            ]
            times.insert(0, _timed(lambda store=store: listing(store), rounds))  # type: ignore[misc]
            assert not store.check(read_data=True).faults
            print(f"| {count:,} | {' | '.join(f'{seconds:.3f} s' for seconds in times)} |", flush=True)


_STATE = """
import numpy
rng = numpy.random.default_rng(0)
layers = [rng.standard_normal(({width}, {width}), dtype="float32") for _ in range(16)]
moments = [[numpy.zeros_like(layer), numpy.zeros_like(layer)] for layer in layers[-2:]]
log = []
def epoch():
    changed = 0
    for layer, (first, second) in zip(layers[-2:], moments):
        gradient = rng.standard_normal(layer.shape, dtype="float32")
        first *= 0.9; first += 0.1 * gradient
        second *= 0.99; second += 0.01 * gradient ** 2
        layer -= 1e-3 * first / (numpy.sqrt(second) + 1e-8)
        changed += 3 * layer.nbytes
    log.append(f"epoch {{len(log)}}: loss {{float(abs(layers[-1]).mean()):.6f}}" * 100)
    return changed
"""


def _pages(store: Store, name: str, folder: Path) -> set[bytes]:
    """Return the pages of memory in a snapshot, by their hashes."""
    with store.open(name, folder) as snapshot:
        found = set()
        for image in (snapshot.directory / "criu").glob("pages-*.img"):
            content = memoryview(image.read_bytes())
            found |= {digest(content[at : at + _PAGE]) for at in range(0, len(content), _PAGE)}
        return found


def _training(megabytes: int, epochs: int) -> None:
    with tempfile.TemporaryDirectory(prefix="gpuckpt-bench-", dir=os.environ.get("GPUCKPT_BENCH_DIR")) as name:
        os.environ["GPUCKPT_STORE"] = str(Path(name, "store"))
        os.environ["IPYTHONDIR"] = str(Path(name, "ipython"))
        store = Store(settings.store_dir())
        kernel = OurKernel()
        sizes, rewritten, changed = [], 0, 0
        before: set[bytes] = set()
        try:
            kernel.run(_STATE.format(width=int((megabytes * 10**6 / 16 / 4) ** 0.5)))
            for number in range(epochs):
                done = int(kernel.run("print(epoch())"))
                kernel.run(f"%gpuckpt save --wait epoch-{number}")
                sizes.append(store.used())
                pages = _pages(store, f"epoch-{number}", Path(name, "taken"))
                if number:
                    rewritten += done
                    changed += len(pages - before) * _PAGE
                before = pages
        finally:
            kernel.close()
    print(
        f"{epochs} snapshots of one training, {megabytes} MB of weights: the first takes {sizes[0] / 1e6:,.0f} MB, "
        f"all of them {sizes[-1] / 1e6:,.0f} MB.\nMeanwhile the training rewrote {rewritten / 1e6:,.0f} MB of arrays, "
        f"and {changed / 1e6:,.0f} MB of pages were not in the snapshot before.\nBeside these pages, all take "
        f"{(sizes[-1] - changed) / sizes[0]:.2f} times what the first takes (the aim: 1.5)."
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshots", type=int, nargs="*", default=[1000, 2000, 4000, 8000])
    parser.add_argument("--chunks", type=int, default=50, help="how many a snapshot has")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mb", type=int, default=300, help="weights of the training")
    parser.add_argument("--epochs", type=int, default=10, help="snapshots of the training; 0 leaves it out")
    args = parser.parse_args()
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    print(f"{now}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, medians of {args.rounds}\n")
    _snapshots(args.snapshots, args.chunks, args.rounds)
    if args.epochs:
        print()
        _training(args.mb, args.epochs)


if __name__ == "__main__":
    main()
