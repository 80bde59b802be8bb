"""The store beside the tools that people reach for, in one run on the same files: ``python -m benchmarks.store``.

The files are criu's images of a real kernel, saved, changed a little and saved again. Every way saves the first, saves
the second, and restores the second; each time the files come from the page cache, what is written is synced to the disk
within the time measured, and what comes back is compared with what went in. In brackets stands the time on processors,
which says more where other programs run.
"""

from __future__ import annotations

import argparse
import datetime
import filecmp
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.freeze.pages import windows
from jupyter_gpuckpt.store import Store

from .ours import OurKernel

_STATE = """
import os, numpy
weights = os.urandom({size} // 2)
table = numpy.arange({size} // 16)
text = [f"line {{i}} of a log" for i in range({size} // 800)]
"""
_CHANGE = "weights = weights[:-{size} // 20] + os.urandom({size} // 20); more = list(range(20000))"


@dataclass(frozen=True)
class _Way:
    """How one tool saves a folder into a place, and gets the last one saved back."""

    name: str
    begin: Callable[[Path], None]
    save: Callable[[Path, Path, int], None]
    restore: Callable[[Path, Path], None]


def _run(*words: object, cwd: Path | None = None) -> str:
    """Run a tool that asks nothing and keeps what it caches out of its repository; return what it prints."""
    place = next(Path(str(word)).parent for word in words if str(word).startswith("/"))
    environment = {
        **os.environ,
        "RESTIC_PASSWORD": "benchmark",
        "BORG_BASE_DIR": str(place.parent / "caches"),
        "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
    }
    done = subprocess.run(list(map(str, words)), cwd=cwd, check=True, env=environment, capture_output=True, text=True)
    return done.stdout


def _sync(place: Path) -> None:
    for path in (*place.rglob("*"), place):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _cp(source: Path, place: Path, number: int) -> None:
    _run("cp", "-r", "--sparse=never", source, place / str(number))
    _sync(place / str(number))


def _tar(source: Path, place: Path, number: int) -> None:
    _run("tar", "-c", "-I", "zstd -T0 -3", "-f", place / str(number), "-C", source, ".")
    _sync(place)


def _untar(place: Path, target: Path) -> None:
    target.mkdir()
    _run("tar", "-x", "-I", "zstd", "-f", max(place.iterdir(), key=lambda path: int(path.name)), "-C", target)


def _last(place: Path) -> Path:
    return max((path for path in place.iterdir()), key=lambda path: int(path.name))


def _ours_save(source: Path, place: Path, number: int) -> None:
    with Store(place / "store").writer(str(number)) as writer:
        writer.include(source, "criu")
        writer.commit(message="", parent=None, kernel={}, machine={}, cuda={}, process={}, cut=windows)


def _ours_restore(place: Path, target: Path) -> None:
    store = Store(place / "store")
    store.open(store.list()[0].name, target)


def _restic_save(source: Path, place: Path, _: int) -> None:
    _run("restic", "-r", place / "repo", "--no-cache", "backup", "--host", "bench", ".", cwd=source)


def _borg_restore(place: Path, target: Path) -> None:
    target.mkdir()
    name = _run("borg", "list", "--short", place / "repo").split()[-1]
    _run("borg", "extract", f"{place / 'repo'}::{name}", cwd=target)


_WAYS = [
    _Way("this store", lambda place: None, _ours_save, _ours_restore),
    _Way("cp", lambda place: None, _cp, lambda place, target: _run("cp", "-r", _last(place), target)),
    _Way("tar, zstd -3", lambda place: None, _tar, _untar),
    _Way(
        "restic",
        lambda place: _run("restic", "init", "-r", place / "repo"),
        _restic_save,
        lambda place, target: _run(
            "restic", "-r", place / "repo", "--no-cache", "restore", "latest", "--target", target
        ),
    ),
    _Way(
        "borg, lz4",
        lambda place: _run("borg", "init", "-e", "none", place / "repo"),
        lambda source, place, number: _run(
            "borg", "create", "-C", "lz4", f"{place / 'repo'}::n{number}", ".", cwd=source
        ),
        _borg_restore,
    ),
]


def _images(folder: Path, megabytes: int) -> tuple[Path, Path]:
    """Save a real kernel twice, with a little change between, and return the two folders of criu's images."""
    os.environ["GPUCKPT_STORE"] = str(folder / "kernel-store")
    os.environ["GPUCKPT_KEYS"] = str(folder / "keys")
    os.environ["IPYTHONDIR"] = str(folder / "ipython")
    kernel = OurKernel()
    try:
        kernel.run(_STATE.format(size=megabytes * 10**6))
        kernel.run("%gpuckpt save --wait first")
        kernel.run(_CHANGE.format(size=megabytes * 10**6))
        kernel.run("%gpuckpt save --wait second")
    finally:
        kernel.close()
    store = Store(settings.store_dir())
    for name in ("first", "second"):
        store.open(name, folder / name)
    return folder / "first" / "criu", folder / "second" / "criu"


def _read_and_hash(folder: Path) -> None:
    for path in folder.iterdir():
        hasher = blake3(max_threads=blake3.AUTO)
        hasher.update_mmap(path)
        hasher.digest()


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    """Return how long it took, and the time on processors of this process and those that it waited for, in seconds."""
    os.sync()
    began, before = time.perf_counter(), sum(os.times()[:4])
    work()
    return time.perf_counter() - began, sum(os.times()[:4]) - before


def _said(times: list[tuple[float, float]]) -> str:
    wall, processors = (statistics.median(column) for column in zip(*times, strict=True))
    return f"{wall:.2f} s ({processors:.2f} s)"


def _size(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _compare(way: str, source: Path, restored: Path) -> None:
    found = restored / "criu" if (restored / "criu").exists() else restored
    names = [path.name for path in source.iterdir()]
    same, _, _ = filecmp.cmpfiles(source, found, names, shallow=False)
    assert len(same) == len(names), f"{way}: what came back is not what went in"


@dataclass
class _Measured:
    """What one way took: for each step the times, and the bytes on the disk after either save."""

    times: list[list[tuple[float, float]]] = field(default_factory=lambda: [[], [], []])
    sizes: list[int] = field(default_factory=lambda: [0, 0])


def _round(way: _Way, place: Path, first: Path, second: Path, measured: _Measured) -> None:
    """Save the first, save the second, and restore the second, in a place of its own."""
    place.mkdir()
    way.begin(place)
    for step, source in enumerate((first, second)):
        measured.times[step].append(_timed(lambda: way.save(source, place, step)))  # noqa: B023
        measured.sizes[step] = _size(place)
    target = place.with_name("restored")
    measured.times[2].append(_timed(lambda: way.restore(place, target)))
    _compare(way.name, second, target)
    shutil.rmtree(target)
    shutil.rmtree(place)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=600, help="memory that the kernel holds")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ways = [
        way
        for way in _WAYS
        if way.name.split(",")[0] in ("this store", "cp", "tar") or shutil.which(way.name.split(",")[0])
    ]
    with tempfile.TemporaryDirectory(prefix="gpuckpt-bench-", dir=os.environ.get("GPUCKPT_BENCH_DIR")) as name:
        folder = Path(name)
        first, second = _images(folder, args.mb)
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        total = sum(path.stat().st_size for path in second.iterdir())
        reading = []
        results = {way.name: _Measured() for way in ways}
        for number in range(args.rounds):
            # In turns: what else the machine does meanwhile comes and goes.
            reading.append(_timed(lambda: _read_and_hash(second)))
            for way in ways:
                _round(way, folder / f"{number}", first, second, results[way.name])
        print(f"{now}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, medians of {args.rounds}")
        print(f"{total / 1e6:,.0f} MB of images; only reading and hashing them takes {_said(reading)}\n")
        head = ["", "first save", "second save", "restore", "stored after the first", "after the second"]
        print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
        for name, measured in results.items():
            figures = [_said(t) for t in measured.times] + [f"{size / 1e6:,.0f} MB" for size in measured.sizes]
            print(f"| {' | '.join([name, *figures])} |")


if __name__ == "__main__":
    main()
