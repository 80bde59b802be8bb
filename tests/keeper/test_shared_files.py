"""What a kernel's processes have in /dev/shm, with and without a name: copied while the kernel is paused."""

from __future__ import annotations

from pathlib import Path

import pytest
from keeper_faults import Criu, store
from notebooks import Notebook, StartKernel

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.store import Store

pytestmark = pytest.mark.criu

_MIB = 1 << 20

_FILES = f"""
import hashlib, mmap, multiprocessing, os
from multiprocessing import shared_memory
def filled(memory, *places):
    for place, size in places:
        memory[place : place + size] = os.urandom(size)
    return memory
block = shared_memory.SharedMemory("block", create=True, size=40 * {_MIB} + 123)
filled(block.buf, (0, 18 * {_MIB}), (30 * {_MIB} + 4096, 6 * {_MIB}), (40 * {_MIB}, 100))
with open("/dev/shm/read-only", "wb") as file:
    file.write(os.urandom(9 * {_MIB}))
os.link("/dev/shm/read-only", "/dev/shm/second-name")
os.chmod("/dev/shm/read-only", 0o400)
os.utime("/dev/shm/read-only", (1e9, 1e9))
fd = os.open("/dev/shm/nameless", os.O_RDWR | os.O_CREAT, 0o600)
os.unlink("/dev/shm/nameless")
os.ftruncate(fd, 60 * {_MIB} + 5)
nameless = filled(mmap.mmap(fd, 60 * {_MIB} + 5), (0, 20 * {_MIB}), (40 * {_MIB} + 4096, 17 * {_MIB}))
def seen():
    ones = [block.buf, open("/dev/shm/second-name", "rb").read(), nameless]
    return [hashlib.blake2b(one).hexdigest()[:9] for one in ones]
def about():
    paths = ["/dev/shm/block", "/dev/shm/read-only", "/dev/shm/second-name", fd]
    found = [os.stat(path) for path in paths]
    return [(one.st_size, one.st_blocks, oct(one.st_mode), one.st_nlink, int(one.st_mtime)) for one in found]
ours, theirs = multiprocessing.get_context("fork").Pipe()
def look():
    while (place := theirs.recv()) is not None:
        theirs.send((block.buf[place], nameless[place], seen()))
child = multiprocessing.get_context("fork").Process(target=look)
child.start()
def theirs_is(place):
    ours.send(place)
    return ours.recv()
"""


def is_shared_on(notebook: Notebook) -> None:
    """See that kernel and child still share what is mapped."""
    for place in (5, 25 * _MIB):  # what had data, and what was a hole
        notebook.run(f"block.buf[{place}], nameless[{place}] = 77, 78")
        assert notebook.value(f"theirs_is({place})[:2]") == "(77, 78)"


def stored(name: str) -> int:
    return Store(store()).get(name).stored


def new_in(name: str, other: str) -> dict[str, int]:
    """Return of each file of a snapshot how many bytes are in no file of the other one."""
    of = [Store(store()).contents(Store(store()).get(one)).files for one in (name, other)]
    known = {chunk.hash for chunks in of[1].values() for chunk in chunks}
    return {path: sum(c.size for c in chunks if c.hash not in known) for path, chunks in of[0].items()}


def archive(notebook: Notebook) -> Path:
    """Return where a save puts what it packs, if that is memory."""
    (sleeper,) = KernelFolder(notebook.folder).sleepers()
    return Path(f"/proc/{sleeper}/root{settings.NAMESPACE_REST_DIR}/shm.tar")


def test_all_of_it_comes_back_and_is_stored_once(criu: Criu, start: StartKernel) -> None:
    notebook = start()
    notebook.run(_FILES)
    with criu.held_at("dump", "start") as reached:
        notebook.client.execute("%gpuckpt save here --wait")
        reached()
        assert archive(notebook).stat().st_blocks * 512 > 33 * _MIB  # its memory is ready before the pause
    assert notebook.reply()["content"]["status"] == "ok"
    assert not archive(notebook).exists()
    was, about = notebook.value("seen()"), notebook.value("about()")
    assert stored("here") > 70 * _MIB
    notebook.run("block.buf[:5] = b'other'; nameless[:5] = b'other'; os.unlink('/dev/shm/second-name')")
    for _ in range(2):
        notebook.run("%gpuckpt restore here")
        assert notebook.value("seen()") == was
        assert notebook.value("theirs_is(0)[2]") == was
        assert notebook.value("about()") == about
        is_shared_on(notebook)
    # All stands elsewhere in the archive, and is known, whatever else was saved meanwhile.
    notebook.run("%gpuckpt restore here")
    notebook.run("[open(f'/dev/shm/{n}', 'wb').write(bytes(n) * 999) for n in range(1, 30)]")
    notebook.run("%gpuckpt save again --wait")
    assert stored("again") < 20 * _MIB, new_in("again", "here")
    was = notebook.value("seen()")
    with notebook.keeper as keeper:
        keeper.request("hibernate")
    assert notebook.value("seen()") == was
    assert notebook.value("theirs_is(0)[2]") == was
    is_shared_on(notebook)
    notebook.run("ours.send(None); child.join(); block.close(); block.unlink()")
