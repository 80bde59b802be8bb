"""What a kernel writes to between all saves is copied for it before a cell waits for that."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from leaks import children
from notebooks import Notebook, wait_until

from jupyter_gpuckpt.client.record import KernelFolder

_FORKS = """
import ctypes, mmap, os, resource, signal
from jupyter_gpuckpt.kernel.page_copies import PageCopies

PAGE = mmap.PAGESIZE
memory = mmap.mmap(-1, 9000 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for page in range(9000):
    memory[page * PAGE] = 1
twins = []


def write(pages):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for page in pages:
        memory[page * PAGE] = 2
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def save(copies):
    copies.note()
    twins.append(os.fork())
    if not twins[-1]:
        signal.pause()
    if len(twins) > 1:
        end(twins.pop(0))
    copies.make()


def end(twin):
    os.kill(twin, signal.SIGKILL)
    os.waitpid(twin, 0)


copies = PageCopies()
try:
    {}
finally:
    for twin in twins:
        end(twin)
"""
_OFTEN, _ONCE = range(0, 600, 2), range(1000, 1300)


def _forking(what: str) -> list[int]:
    """Run a program that is forked as a save does, and return what it prints."""
    program = _FORKS.format(what.strip().replace("\n", "\n    "))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_what_is_written_to_often_is_copied() -> None:
    first, *_, last, once = _forking(
        f"""
save(copies)
for number in range(20):
    save(copies)
    print(write({_OFTEN}))
    if number == 18:
        write({_ONCE})
print(write({_ONCE}))
"""
    )
    assert first >= 300
    assert last < 100  # an eighth of them is left out each time
    assert once == 300


def test_what_is_not_written_to_any_more_is_forgotten() -> None:
    faults = _forking(
        f"""
for number in range(20):
    save(copies)
    faults = write({_OFTEN})
print(faults)
for _ in range(20):
    save(copies)
print(write({_OFTEN}))
"""
    )
    assert faults[0] < 100
    assert faults[1] >= 300


def test_much_is_not_copied() -> None:
    """More than 32 MiB are not."""
    faults = _forking(
        """
for _ in range(12):
    save(copies)
    print(write(range(9000)))
"""
    )
    assert min(faults) >= 9000


@pytest.mark.criu  # root, for a system of that kind
def test_nothing_is_copied_where_the_system_does_not_say() -> None:
    """It is not an error: a cell waits, as it would have."""
    program = _FORKS.format(
        f"for _ in range(12):\n        save(copies)\n        faults = write({_OFTEN})\n    print(faults)"
    )
    in_namespace = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    done = subprocess.run([*in_namespace, sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 300


def test_what_is_mapped_elsewhere_by_now_is_not_harmed() -> None:
    """Between a look and the copies the kernel may have given the memory up, or have other memory there."""
    assert _forking(
        f"""
for _ in range(12):
    save(copies)
    write({_OFTEN})
copies.note()
memory.close()
copies.make()
print(1)
"""
    ) == [1]


def test_a_cell_does_not_wait_for_copies_of_what_all_cells_write_to(notebook: Notebook) -> None:
    """Counted by the page faults of a cell that does next to nothing, right after a save."""
    notebook.run("notes = {}")
    (sleeper,) = KernelFolder(notebook.folder).sleepers()
    (kernel,) = children(sleeper)

    def faults() -> int:
        return int(Path(f"/proc/{kernel}/stat").read_text().rpartition(")")[2].split()[7])

    def rest() -> int:
        seen = [-1]

        def are_over() -> bool:
            seen.append(faults())
            return seen[-1] == seen[-2]

        wait_until(are_over)
        return seen[-1]

    counted = []
    for n in range(9):
        notebook.run("%gpuckpt save here --replace")
        before = rest()
        notebook.run(f"notes[{n}] = {n}")
        counted.append(faults() - before)
    assert statistics.median(counted[4:]) < 300, counted
