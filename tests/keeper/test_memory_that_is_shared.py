"""Memory that processes share without a file is copied while the kernel is paused: by all processors at once."""

from __future__ import annotations

import platform

import pytest
from keeper_faults import Criu
from notebooks import Notebook, StartKernel
from test_twins import before_it_is_copied

pytestmark = pytest.mark.criu

_MIB = 1 << 20

_SHARED = f"""
import hashlib, mmap, multiprocessing, os
def filled(memory, *places):
    for place, size in places:
        memory[place : place + size] = os.urandom(size)
    return memory
anonymous = filled(mmap.mmap(-1, 96 * {_MIB}), (0, 20 * {_MIB}), (50 * {_MIB} + 4096, 8 * {_MIB}), (96 * {_MIB} - 9, 9))
size = 40 * {_MIB} + 123
fd = os.memfd_create("of an odd size")
os.ftruncate(fd, size)
file = filled(mmap.mmap(fd, size), (5, size - 5))
small = filled(mmap.mmap(-1, {_MIB}), (0, {_MIB}))
def seen():
    return [hashlib.blake2b(one).hexdigest() for one in (anonymous, file, small)]
ours, theirs = multiprocessing.get_context("fork").Pipe()
def look():
    while (place := theirs.recv()) is not None:
        theirs.send((anonymous[place], seen()))
child = multiprocessing.get_context("fork").Process(target=look)
child.start()
def theirs_is(place):
    ours.send(place)
    return ours.recv()
"""


def noted(notebook: Notebook) -> list[int]:
    """Return how many bytes of shared memory were copied beside criu, by memory."""
    return sorted(
        sum(int.from_bytes(raw[i + 8 : i + 16], "little") - int.from_bytes(raw[i : i + 8], "little")
            for i in range(0, len(raw), 16))
        for raw in (path.read_bytes() for path in notebook.folder.glob("run-*/shared-*.regions"))
    )  # fmt: skip


def test_it_comes_back_with_its_holes_and_is_shared_on(criu: Criu, start: StartKernel) -> None:
    with before_it_is_copied(criu, start, _SHARED) as notebook:
        *little, anonymous, file = noted(notebook)
        assert (anonymous, file) == (28 * _MIB + 4096, 40 * _MIB + 4096)
        # Beside what criu does, where its calls of ptrace tell when.
        assert (_MIB in little) == (platform.machine() == "x86_64")
    criu.honest()
    assert notebook.status["status"] == "ok"  # type: ignore[attr-defined]
    assert not noted(notebook)
    was = notebook.value("seen()")
    notebook.run("anonymous[:5] = b'other'; file[7:9] = b'xx'; small[:1] = b'x'")
    for _ in range(2):
        notebook.run("%gpuckpt restore here")
        assert notebook.value("seen()") == was
        assert notebook.value("theirs_is(0)[1]") == was
        assert notebook.value("os.fstat(fd).st_size, len(file)") == f"{40 * _MIB + 123} {40 * _MIB + 123}"
        notebook.run(f"anonymous[{96 * _MIB} - 5] = 77")
        assert notebook.value(f"theirs_is({96 * _MIB} - 5)[0]") == "77"
    notebook.run("ours.send(None); child.join()")


def test_a_dump_that_fails_leaves_nothing_of_it(criu: Criu, start: StartKernel) -> None:
    notebook = start()
    notebook.run(_SHARED)
    criu.at("dump", "post-dump", "exit 1")
    notebook.fails("%gpuckpt save here")
    assert not noted(notebook)
    criu.honest()
    notebook.run("%gpuckpt save here")
    was = notebook.value("seen()")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("theirs_is(0)[1]") == was
    notebook.run("ours.send(None); child.join()")


def test_it_comes_back_from_hibernation(start: StartKernel) -> None:
    notebook = start()
    notebook.run(_SHARED)
    was = notebook.value("seen()")
    with notebook.keeper as keeper:
        keeper.request("hibernate")
    assert notebook.value("seen()") == was
    assert notebook.value("theirs_is(0)[1]") == was
    notebook.run("ours.send(None); child.join()")
