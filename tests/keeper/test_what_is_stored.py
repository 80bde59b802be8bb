"""What a save adds to the store, and what a quota and the rules of retention do about it, with real kernels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from keeper_faults import names, store
from notebooks import Notebook, StartKernel

from jupyter_gpuckpt.store import Store

MB, MIB = 10**6, 1 << 20


def stored(name: str) -> int:
    return Store(store()).get(name).stored


def test_a_second_save_stores_what_changed(notebook: Notebook) -> None:
    notebook.run("import os, mmap, zlib; new = lambda pages: mmap.mmap(-1, pages * 4096, mmap.MAP_PRIVATE)")
    notebook.run("x = new(15000); x[:] = os.urandom(len(x))")
    notebook.run("%gpuckpt save first")
    notebook.run("%gpuckpt save second")
    assert stored("first") > 60 * MB
    # A kernel changes some MB of its own from one save to the next.
    assert stored("second") < stored("first") / 4
    # Most of the bytes at other addresses.
    notebook.run("between, y = new(7), new(15000); y[:] = x[:]; x.close(); x = y; x[4096:10**6] = bytes(10**6 - 4096)")
    notebook.run("%gpuckpt save third")
    assert stored("third") < stored("first") / 2
    digest = notebook.value("zlib.crc32(x)")
    notebook.run("%gpuckpt restore first")
    notebook.run("%gpuckpt rm first")
    notebook.run("%gpuckpt rm second")
    notebook.run("%gpuckpt restore third")
    assert notebook.value("zlib.crc32(x)") == digest


def test_of_a_file_mapped_amid_memory_only_what_was_written_is_stored(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("%gpuckpt save without")
    file = tmp_path / "mapped"
    file.write_bytes(os.urandom(20 * MIB))
    notebook.run(f"""
import ctypes, mmap, os, zlib
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
start = libc.mmap(None, {60 * MIB}, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
fd = os.open({str(file)!r}, os.O_RDONLY)
assert libc.mmap(start + {20 * MIB}, {20 * MIB}, 3, mmap.MAP_PRIVATE | 0x10, fd, 0) == start + {20 * MIB}  # MAP_FIXED
memory = (ctypes.c_char * {60 * MIB}).from_address(start)
memory[0:{8 * MIB}] = memory[{44 * MIB}:{52 * MIB}] = os.urandom({8 * MIB})
memory[{30 * MIB}:{30 * MIB} + 5] = b"wrote"
digest = zlib.crc32(memory)  # all of the file is read, and in memory
""")
    notebook.run("%gpuckpt save here")
    assert 8 * MB < stored("here") < 20 * MB  # what is there twice once, and nothing else of the file
    notebook.run("%gpuckpt restore here")
    assert notebook.value("zlib.crc32(memory) == digest, memory[30 << 20:(30 << 20) + 5]") == "True b'wrote'"


def test_what_lies_in_shared_memory_counts_once(notebook: Notebook) -> None:
    """So that the disk, and the memory at a restore, are known to have room for it."""
    notebook.run("""
import mmap, multiprocessing, os
from multiprocessing import shared_memory
here, there = multiprocessing.Pipe()
def looks_at_all_of_it():
    there.recv()
    twice = [mmap.mmap(os.open("/dev/shm/mapped", os.O_RDWR), 0) for _ in range(2)]
    there.send(sum(sum(one[::4096]) for one in twice))
    there.recv()
child = multiprocessing.get_context("fork").Process(target=looks_at_all_of_it)
child.start()
""")
    notebook.run("%gpuckpt save without")
    notebook.run(f"""
with open("/dev/shm/nobody-has-it-mapped", "wb") as file:
    file.write(os.urandom({40 * MB}))
mapped = shared_memory.SharedMemory("mapped", create=True, size={40 * MB})
mapped.buf[:] = bytes({40 * MB})
here.send(0); here.recv()
""")
    notebook.run("%gpuckpt save both")
    without, both = (Store(store()).get(name).process["private_bytes"] for name in ("without", "both"))
    assert 80 * MB <= both - without < 110 * MB
    notebook.run("here.send(0); child.join(); mapped.close(); mapped.unlink()")


def test_a_snapshot_knows_the_one_that_its_kernel_came_from(notebook: Notebook) -> None:
    for line in ("save a", "save b", "restore a", "save c"):
        notebook.run(f"%gpuckpt {line}")
    manifests = {m.name: m for m in Store(store()).list()}
    parents = {
        name: next((p.name for p in manifests.values() if p.id == m.parent), "") for name, m in manifests.items()
    }
    assert parents == {"a": "", "b": "a", "c": "a"}


def test_a_save_beyond_the_quota_fails_and_the_kernel_goes_on(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_STORE_QUOTA", "60M")
    notebook = start()
    notebook.run("%gpuckpt save small")
    notebook.run(f"import os; x = os.urandom({60 * MB})")
    answer = notebook.fails("%gpuckpt save large")
    assert answer.ename == "StoreError"
    assert "quota" in answer.text
    assert names() == {"small"}
    assert notebook.value("len(x)") == str(60 * MB)
    notebook.run("del x")
    notebook.run("%gpuckpt save again")
    assert names() == {"small", "again"}


def test_old_snapshots_go_after_a_save_and_pinned_ones_stay(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_KEEP_LAST", "2")
    mine, other = start(), start()
    other.run("%gpuckpt save other")
    mine.run("%gpuckpt save a")
    Store(store()).pin("a", True)
    for name in "bcd":
        mine.run(f"%gpuckpt save {name}")
    assert names() == {"other", "a", "c", "d"}
