"""Forked children drop NVIDIA device files and mappings: with real device files, no GPU needed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpuckpt.kernel import devices

ROOT = Path(__file__).parents[2]
ZERO = os.makedev(1, 5)


def run(script: str) -> str:
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def device() -> Iterator[Path]:
    """A device file that is named like NVIDIA's, and can be mapped like one: `/dev/zero`'s twin."""
    path = Path(f"/dev/nvidia-gpuckpt-test-{os.getpid()}")
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, ZERO)
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        path.unlink(missing_ok=True)
        pytest.skip(f"no device files can be made here: {error}")
    yield path
    path.unlink()


def test_child_keeps_the_places_and_nothing_behind_them(device: Path) -> None:
    out = run(f"""
import mmap, os
from pathlib import Path
from jupyter_gpuckpt.kernel import devices
devices.drop_in_children()
devices.drop_in_children()
def held():
    links = [os.readlink(p) for p in Path('/proc/self/fd').iterdir() if p.is_symlink()]
    return sum('nvidia' in t for t in [*links, *Path('/proc/self/maps').read_text().splitlines()])
file = os.open({str(device)!r}, os.O_RDWR)
other = os.open('/etc/hostname', os.O_RDONLY)
mapping = mmap.mmap(file, 8192, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
mapping[0] = 7
before = held()
child = os.fork()
if not child:
    ok = held() == 0
    ok &= os.readlink(f'/proc/self/fd/{{file}}') == '/dev/null'
    ok &= os.readlink(f'/proc/self/fd/{{other}}') == '/etc/hostname'
    ok &= not os.get_inheritable(file)
    os._exit(0 if ok else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, before >= 2, held() == before, mapping[0])
""")
    assert out.split() == ["0", "True", "True", "7"]


def test_child_of_a_process_without_devices_keeps_everything() -> None:
    out = run("""
import os
from jupyter_gpuckpt.kernel import devices
devices.drop_in_children()
file = os.open('/etc/hostname', os.O_RDONLY)
child = os.fork()
if not child:
    os._exit(0 if os.readlink(f'/proc/self/fd/{file}') == '/etc/hostname' else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert out.split() == ["0"]


def test_a_fork_without_devices_costs_next_to_nothing() -> None:
    out = run("""
import time
from jupyter_gpuckpt.kernel import devices
drop = devices._dropper()
drop()
best = min((lambda t: (drop(), time.perf_counter() - t)[1])(time.perf_counter()) for _ in range(50))
print(best)
""")
    assert float(out) < 0.0005


def test_without_libcuda_there_are_no_peers() -> None:
    assert devices.disable_peer_access() == []
    devices.enable_peer_access([])


def test_libcuda_is_never_loaded_by_it() -> None:
    out = run("""
from jupyter_gpuckpt.kernel import devices
devices.drop_in_children(), devices.disable_peer_access()
print('libcuda' in open('/proc/self/maps').read())
""")
    assert out.split() == ["False"]
