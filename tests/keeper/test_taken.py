"""Locks of files and terminals, which only one program can have: where another has them, nothing is lost."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from copies import Fork, forking
from keeper_faults import Criu, Requested
from notebooks import Notebook, StartKernel

from jupyter_gpuckpt.errors import Refused

LOCKING = """
    import fcntl, os, struct
    def lock(kind):
        file = open(os.path.join(folder, kind), "w")
        if kind == "flock":
            fcntl.flock(file, fcntl.LOCK_EX)
        elif kind == "lockf":
            fcntl.lockf(file, fcntl.LOCK_EX, 10, 5)
        else:  # of the open file (fcntl(2), F_OFD_SETLK)
            fcntl.fcntl(file, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 10, 20, 0))
        return file
    files = [lock(kind) for kind in ("flock", "lockf", "open file")]
    alive = 41
"""


@pytest.fixture
def locked(notebook: Notebook, tmp_path: Path) -> Path:
    """Have the kernel lock files in a folder, in every way that there is."""
    folder = tmp_path / "locked"
    folder.mkdir()
    notebook.run(f"folder = {str(folder)!r}")
    notebook.run(LOCKING)
    return folder


@contextlib.contextmanager
def locking(path: Path) -> Iterator[None]:
    """Have this process lock a file of the kernel's, in each way that excludes one of the kernel's."""
    with path.open("r+") as file:
        if path.name == "flock":
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        else:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def assert_held(folder: Path) -> None:
    for path in folder.iterdir():
        with pytest.raises(BlockingIOError), locking(path):
            pass


def refused(notebook: Notebook, line: str) -> str:
    answer = notebook.fails(line)
    assert answer.ename == "Refused", answer.text
    return answer.text


def test_what_another_program_has_locked_since_is_named_and_the_running_kernel_is_not_touched(
    notebook: Notebook, locked: Path
) -> None:
    notebook.run("%gpuckpt save a")
    notebook.run("%gpuckpt restore a")  # the running kernel's own locks are no obstacle
    assert_held(locked)
    notebook.run("[file.close() for file in files]; alive = 42")
    for path in locked.iterdir():
        with locking(path):
            assert f"{path} (process {os.getpid()}, " in refused(notebook, "%gpuckpt restore a")
    assert notebook.value("alive") == "42"
    with (locked / "lockf").open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 5, 0)  # other bytes than the kernel's
        notebook.run("%gpuckpt restore a")
    assert notebook.value("alive") == "41"
    assert_held(locked)


def test_a_kernel_stays_hibernated_while_another_program_has_its_lock(notebook: Notebook, locked: Path) -> None:
    with notebook.keeper as keeper:
        keeper.request("hibernate")
        with locking(locked / "flock"), pytest.raises(Refused, match=r"another program has now: .*flock"):
            keeper.request("wake")
    assert notebook.value("alive") == "41"
    assert_held(locked)


def test_a_terminal_that_is_another_programs_now_is_named_and_the_running_kernel_is_not_touched(
    notebook: Notebook,
) -> None:
    notebook.run("import os; ends = os.openpty(); name = os.ttyname(ends[1])")
    name = notebook.value("name")
    notebook.run("%gpuckpt save a")
    notebook.run("%gpuckpt restore a")
    notebook.run("[os.close(end) for end in ends]; name = 'closed'")
    with terminal(name):
        assert name in refused(notebook, "%gpuckpt restore a")
    assert notebook.value("name") == "closed"
    notebook.run("%gpuckpt restore a")
    assert notebook.value("os.ttyname(ends[1])") == name


@contextlib.contextmanager
def terminal(name: str) -> Iterator[None]:
    """Have this process make the terminal of that name: the system gives the lowest number that is free."""
    with contextlib.ExitStack() as closing:
        made = ""
        while made != name:
            for end in (ends := os.openpty()):
                closing.callback(os.close, end)
            made = os.ttyname(ends[1])
        yield


def test_a_copy_is_refused_what_the_kernel_has_alone(notebook: Notebook, locked: Path) -> None:
    with forking() as fork:
        assert_refused(fork, notebook, str(locked / "lockf"))
        notebook.run("%gpuckpt save a")
        assert_refused(fork, notebook, str(locked / "flock"), snapshot="a")
        notebook.run("[file.close() for file in files]; ends = os.openpty()")
        assert_refused(fork, notebook, "/dev/pts/")
        notebook.run("[os.close(end) for end in ends]")
        assert_refused(fork, notebook, str(locked / "open file"), snapshot="a", count=2)
        (copy,) = fork(notebook, snapshot="a")  # of which nobody has the locks now
        assert copy.value("alive") == "41"
        assert_held(locked)


def assert_refused(fork: Fork, notebook: Notebook, named: str, **request: object) -> None:
    with pytest.raises(Refused) as refusal:
        fork(notebook, **request)
    assert named in refusal.value.why
    assert refusal.value.what == "The kernel was not forked; it keeps running."


def test_locks_of_files_that_are_mapped_are_held_again(notebook: Notebook, tmp_path: Path) -> None:
    """Those of the process: criu opens such a file to map it, and closes it when it has taken the lock again."""
    notebook.run(f"folder = {str(tmp_path)!r}")
    notebook.run("""
        import fcntl, mmap, multiprocessing, os
        def locked(name, kind=fcntl.LOCK_EX, *where):
            file = open(os.path.join(folder, name), "w+b")
            file.write(bytes(4096))
            file.flush()
            memory = mmap.mmap(file.fileno(), 4096)
            fcntl.lockf(file, kind, *where)
            return file, memory
        mapped, part = locked("mapped"), locked("part", fcntl.LOCK_EX, 10, 100)
        reading = locked("reading", fcntl.LOCK_SH)
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        def hold():
            held = locked("a child's")
            theirs.send("locked")
            theirs.recv()
        child = multiprocessing.get_context("fork").Process(target=hold)
        child.start()
        ours.recv()
    """)
    notebook.run("%gpuckpt save here")
    for _ in range(2):
        assert "not held again" not in notebook.run("%gpuckpt restore here").text
        for name in ("mapped", "a child's"):
            with pytest.raises(BlockingIOError), locking(tmp_path / name):
                pass
        with (tmp_path / "part").open("r+b") as part:
            fcntl.lockf(part, fcntl.LOCK_EX | fcntl.LOCK_NB, 100, 0)
            with pytest.raises(BlockingIOError):
                fcntl.lockf(part, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 109)
        with (tmp_path / "reading").open("r+b") as reading:
            fcntl.lockf(reading, fcntl.LOCK_SH | fcntl.LOCK_NB)
            with pytest.raises(BlockingIOError):
                fcntl.lockf(reading, fcntl.LOCK_EX | fcntl.LOCK_NB)
    notebook.run("ours.send(None); child.join()")


def test_a_lock_that_another_takes_in_the_moment_of_the_restore_is_told(
    criu: Criu, start: StartKernel, tmp_path: Path
) -> None:
    notebook, path = start(), tmp_path / "mapped"
    path.write_bytes(bytes(4096))
    notebook.run(f"""
        import fcntl, mmap
        file = open({str(path)!r}, "r+b")
        memory = mmap.mmap(file.fileno(), 4096)
        fcntl.lockf(file, fcntl.LOCK_EX)
        alive = 41
    """)
    notebook.run("%gpuckpt save here")
    with path.open("r+b") as ours:
        with criu.held_at("restore", "post-restore") as reached:
            restoring = Requested(notebook, "restore", {"name": "here"})
            reached()
            fcntl.lockf(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)
        told = restoring.outcome()["warnings"]
        assert [text for text in told if text.startswith(f"The lock of {path} is not held again")]
    assert notebook.value("alive") == "41"


def test_a_write_transaction_of_sqlite_with_a_wal_stays_alone(notebook: Notebook, tmp_path: Path) -> None:
    path = tmp_path / "w.db"
    notebook.run(f"import sqlite3\nbase = sqlite3.connect({str(path)!r}, isolation_level=None)")
    notebook.run("_ = base.execute('pragma journal_mode=wal'), base.execute('create table t (x)')")
    notebook.run("_ = base.execute('begin immediate'), base.execute('insert into t values (1)')")
    notebook.run("%gpuckpt save here")
    notebook.run("%gpuckpt restore here")
    with contextlib.closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("insert into t values (2)")
        notebook.run("_ = base.execute('commit')")
        other.execute("insert into t values (2)")
        assert other.execute("select x from t").fetchall() == [(1,), (2,)]
        assert other.execute("pragma integrity_check").fetchall() == [("ok",)]
    assert notebook.value("base.execute('select count(*) from t').fetchone()[0]") == "2"
    notebook.run("base.close()")
