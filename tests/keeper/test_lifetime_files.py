"""Files that go with the kernel: a snapshot has what is small of them, and says what became of the others."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from copies import forking
from keeper_faults import Criu
from notebooks import Notebook


def restart(notebook: Notebook) -> None:
    """Restart a kernel as JupyterLab's button does: Python ends, and tidies up behind itself."""
    notebook.manager.restart_kernel(now=False)
    notebook.wait_for_ready()


def refused(notebook: Notebook) -> str:
    answer = notebook.fails("%gpuckpt restore here")
    assert answer.ename == "Refused"
    return answer.text


def test_temporary_files_and_folders_come_back_after_a_restart(notebook: Notebook) -> None:
    notebook.run("""
        import fcntl, os, tempfile
        file = tempfile.NamedTemporaryFile("w+"); file.write("written"); file.flush(); os.chmod(file.name, 0o640)
        fcntl.flock(file, fcntl.LOCK_EX)
        folder = tempfile.TemporaryDirectory()
        os.makedirs(folder.name + "/below/empty"); inside = folder.name + "/below/file"
        with open(inside, "w") as f: f.write("closed")
        os.symlink("nowhere", folder.name + "/below/link")
    """)
    assert "too large" not in notebook.run("%gpuckpt save here").text
    paths = notebook.value("file.name, folder.name").split()
    restart(notebook)
    assert not any(map(os.path.exists, paths))
    notebook.run("%gpuckpt restore here")
    found = (
        "file.read(), open(inside).read(), sorted(os.listdir(folder.name + '/below')), "
        "oct(os.stat(file.name).st_mode), os.readlink(folder.name + '/below/link')"
    )
    assert notebook.value(f"file.seek(0), {found}") == "0 written closed ['empty', 'file', 'link'] 0o100640 nowhere"
    # They are as much the kernel's own as before: it goes on with them, and deletes them itself.
    notebook.run("file.write(' on'); file.flush(); open(folder.name + '/new', 'w').close()")
    assert Path(paths[0]).read_text() == "written on"
    restart(notebook)
    assert not any(map(os.path.exists, paths))


def test_what_a_cell_mounted_is_named_at_the_save(notebook: Notebook, tmp_path: Path) -> None:
    """It is in the kernel's mount namespace, which ends with it."""
    notebook.run(f"import os, subprocess; there = {str(tmp_path / 'mounted here')!r}; os.mkdir(there)")
    assert "Mounted" not in notebook.run("%gpuckpt save before").text
    notebook.run("subprocess.run(['mount', '-t', 'tmpfs', 'none', there], check=True)")
    assert f"Mounted in the kernel alone: {tmp_path}/mounted here." in notebook.run("%gpuckpt save here").text
    notebook.run("%gpuckpt restore here")
    assert notebook.value("os.path.ismount(there)") == "False"


@pytest.mark.parametrize("planted", ["folder", "link"])
def test_nothing_is_written_into_a_temporary_folder_that_a_stranger_has_made_since(
    notebook: Notebook, tmp_path: Path, planted: str
) -> None:
    notebook.run("""
        import tempfile
        folder = tempfile.TemporaryDirectory(dir="/tmp")
        f = open(folder.name + "/secret", "w"); f.write("secret"); f.flush()
    """)
    folder = Path(notebook.value("folder.name"))
    notebook.run("%gpuckpt save here")
    restart(notebook)
    into = tmp_path / "of a stranger" if planted == "link" else folder
    into.mkdir()
    os.chown(into, 12345, 12345)
    if planted == "link":
        folder.symlink_to(into)
        os.chown(folder, 12345, 12345, follow_symlinks=False)
    try:
        assert f"the folder belongs to another user: {folder}" in refused(notebook)
        assert list(into.iterdir()) == []
    finally:
        folder.unlink() if planted == "link" else folder.rmdir()


def test_what_is_there_is_not_touched_and_what_was_made_for_nothing_is_deleted(
    criu: Criu, notebook: Notebook, tmp_path: Path
) -> None:
    there, gone = tmp_path / "there", tmp_path / "gone"
    notebook.run(f"x = 1; files = [open(path, 'w') for path in ({str(there)!r}, {str(gone)!r})]")
    notebook.run("for f in files: f.write('saved'); f.flush()")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    there.write_text("longer by now")
    gone.unlink()
    criu.first("restore", "exit 1")
    notebook.fails("%gpuckpt restore here")
    assert not gone.exists()
    criu.honest()
    answer = notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"
    assert (there.read_text(), gone.read_text()) == ("longer by now", "saved")
    assert f"{there} (had 5 bytes, has 13)" in answer.text
    assert str(gone) not in answer.text
    gone.unlink()
    with forking() as fork:
        (copy,) = fork(notebook, snapshot="here")
        assert copy.value("x") == "1"
    assert gone.read_text() == "saved"


def test_fifos_and_files_that_are_only_written_as_memory_come_back_when_they_are_gone(
    notebook: Notebook, tmp_path: Path
) -> None:
    """As Open MPI has both, in a folder that it deletes at its end."""
    folder = tmp_path / "of the program"
    folder.mkdir()
    notebook.run(f"""
        import mmap, os, stat
        fifo, file = {str(folder / "fifo")!r}, {str(folder / "memory")!r}
        os.mkfifo(fifo, 0o640); listening = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        with open(file, "w+b") as f:
            f.truncate(4096); memory = mmap.mmap(f.fileno(), 4096)
        memory[:5] = b"saved"
    """)
    assert "too large" not in notebook.run("%gpuckpt save here").text
    for _ in range(2):
        for path in folder.iterdir():
            path.unlink()
        notebook.run("%gpuckpt restore here")
        found = "open(file, 'rb').read(5), memory[:5], oct(os.stat(fifo).st_mode)"
        assert notebook.value(found) == "b'saved' b'saved' 0o10640"
        notebook.run("writer = os.open(fifo, os.O_WRONLY); os.write(writer, b'heard')")
        assert notebook.value("os.read(listening, 5)") == "b'heard'"
        notebook.run("memory[:5] = b'later'")


def test_a_large_temporary_file_is_named_at_the_save(notebook: Notebook, tmp_path: Path) -> None:
    large = tmp_path / "large"
    notebook.run(f"f = open({str(large)!r}, 'wb'); f.truncate((16 << 20) + 1)")
    assert f"too large to be included in the snapshot: {large}" in notebook.run("%gpuckpt save here").text
    large.unlink()
    assert f"{large}: had 16777217 bytes, is gone" in refused(notebook)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database as another program does; it is closed afterwards."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        yield connection


def rows(notebook: Notebook) -> str:
    return notebook.value("db.execute('select count(*) from t').fetchone()[0]")


@pytest.fixture(params=["wal", "delete"])
def database(request: pytest.FixtureRequest, notebook: Notebook, tmp_path: Path) -> Path:
    """A database of SQLite's that the kernel has open, as `db`, with one row."""
    path = tmp_path / "notes.db"
    notebook.run(f"""
        import sqlite3
        db = sqlite3.connect({str(path)!r})
        db.execute("pragma journal_mode={request.param}"); db.execute("create table t (a)")
        db.execute("insert into t values (1)"); db.commit()
    """)
    return path


def is_sound(path: Path) -> bool:
    with opened(path) as connection:
        return connection.execute("pragma integrity_check").fetchone() == ("ok",)


def test_a_database_that_went_on_after_a_restart_is_read_as_it_is_now(notebook: Notebook, database: Path) -> None:
    assert "transaction" not in notebook.run("%gpuckpt save here").text
    notebook.run("db.executemany('insert into t values (?)', [('x' * 99,)] * 999); db.commit()")
    restart(notebook)  # which takes what SQLite has beside the database into it, and deletes that
    with opened(database) as connection:
        connection.execute("insert into t values (2)")
    answer = notebook.run("%gpuckpt restore here")
    assert f"{database}, a database of SQLite's (had " in answer.text
    assert rows(notebook) == "1001"
    notebook.run("db.execute('insert into t values (3)'); db.commit(); db.close()")
    assert is_sound(database)
    with opened(database) as connection:
        assert connection.execute("select count(*) from t").fetchone() == (1002,)


def test_a_transaction_goes_on_where_nothing_was_written_since_and_is_refused_elsewhere(
    notebook: Notebook, database: Path
) -> None:
    notebook.run("db.execute('pragma wal_checkpoint'); db.execute('insert into t values (2)')")
    assert f"A transaction of {database} is open" in notebook.run("%gpuckpt save here").text
    restart(notebook)
    with opened(database) as connection:
        assert connection.execute("select count(*) from t").fetchone() == (1,)
    notebook.run("%gpuckpt restore here")
    assert rows(notebook) == "2"
    notebook.run("db.commit()")
    assert "a transaction of SQLite's was open, and the file was written to since" in refused(notebook)
    notebook.run("db.close()")
    assert is_sound(database)
    assert str(database) in refused(notebook)


def test_a_write_transaction_of_lmdb_goes_on_only_where_nothing_was_written_since(
    notebook: Notebook, tmp_path: Path
) -> None:
    """By its files: who writes is told by a mutex of the C library's, in memory that all its programs share."""
    data, lock, mark = tmp_path / "data.mdb", tmp_path / "lock.mdb", bytes.fromhex("dec0efbe")
    data.write_bytes(bytes(16) + mark + bytes(4076))
    lock.write_bytes(mark + bytes(8188))
    notebook.run(f"""
        import ctypes, mmap
        data, lock = open({str(data)!r}, "r+b", 0), open({str(lock)!r}, "r+b")
        shared, libc, kind = mmap.mmap(lock.fileno(), 8192), ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutexattr_init(kind); libc.pthread_mutexattr_setpshared(kind, 1)
        libc.pthread_mutexattr_setrobust(kind, 1)
        writer = ctypes.byref(ctypes.c_char.from_buffer(shared, 64))
        begun = libc.pthread_mutex_init(writer, kind), libc.pthread_mutex_lock(writer)
    """)
    assert notebook.value("begun") == "(0, 0)"
    assert f"A transaction of {data} is open" in notebook.run("%gpuckpt save here").text
    notebook.run("%gpuckpt restore here")
    notebook.run("data.write(b'committed'); libc.pthread_mutex_unlock(writer)")
    assert f"{data}: a transaction of LMDB's was open, and the file was written to since" in refused(notebook)
    assert "A transaction of" not in notebook.run("%gpuckpt save here --replace").text
    notebook.run("data.write(b'committed')")
    assert f"{data}, a database of LMDB's (written to since" in notebook.run("%gpuckpt restore here").text


def test_a_database_of_duckdb_is_gone_on_with_only_as_it_was(notebook: Notebook, tmp_path: Path) -> None:
    path, log = tmp_path / "numbers.duckdb", tmp_path / "numbers.duckdb.wal"
    as_saved = bytes(8) + b"DUCK" + bytes(3 * 4096)  # its headers, and something behind them
    path.write_bytes(as_saved)
    notebook.run(f"f = open({str(path)!r}, 'r+b'); log = open({str(log)!r}, 'ab', 0); log.write(b'rows')")
    assert "DuckDB" not in notebook.run("%gpuckpt save here").text
    assert "DuckDB" not in notebook.run("%gpuckpt restore here").text
    # What is not in the database yet, for lack of a checkpoint, takes nothing from what was there.
    notebook.run("log.write(b'more'); f.seek(3 * 4096); f.write(b'rows'); f.flush()")
    answer = notebook.run("%gpuckpt restore here").text
    assert f"{path}, a database of DuckDB's (" in answer
    assert f"It is in {log} until the kernel closes the database" in answer
    with path.open("r+b") as f:
        f.seek(4096)
        f.write(b"another header")
    log.unlink()
    answer = refused(notebook)
    assert "it was written to since: the kernel would destroy it" in answer
    assert f"Move {path} and {log} away, if they are there, and restore again" in answer
    path.unlink()
    notebook.run("%gpuckpt restore here")
    assert (path.read_bytes(), log.read_bytes()) == (as_saved, b"rows")


def test_a_database_of_bbolt_is_gone_on_with_only_as_it_was(notebook: Notebook, tmp_path: Path) -> None:
    path = tmp_path / "member.db"
    page = bytes(16) + b"\xed\xda\x0c\xed" + struct.pack("<II", 2, 4096)  # a meta page begins so
    as_saved = (page.ljust(4096, b"0") + page.ljust(4096, b"1")).ljust(32768, b"2")
    path.write_bytes(as_saved)
    notebook.run(f"f = open({str(path)!r}, 'r+b')")
    assert "bbolt" not in notebook.run("%gpuckpt save here").text
    notebook.run("f.seek(8192); f.write(b'a page that was free'); f.flush()")
    assert f"{path}, a database of bbolt's (written to since" in notebook.run("%gpuckpt restore here").text
    notebook.run("f.seek(4096 + 100); f.write(b'a commit'); f.flush()")
    answer = refused(notebook)
    assert "a database of bbolt's, and would use it as it was at the save. But it was written to since" in answer
    assert f"Move {path} away and restore again" in answer
    path.unlink()
    notebook.run("%gpuckpt restore here")
    assert path.read_bytes() == as_saved


def test_a_log_of_duckdb_is_not_joined_with_another_database(notebook: Notebook, tmp_path: Path) -> None:
    path, log = tmp_path / "numbers.duckdb", tmp_path / "numbers.duckdb.wal"
    path.write_bytes(bytes(8) + b"DUCK" + bytes(17 << 20))
    notebook.run(f"f = open({str(path)!r}, 'r+b')")
    assert f"DuckDB has {path} open, and the snapshot has no copy of it" in notebook.run("%gpuckpt save here").text
    log.write_bytes(b"of what came since")
    assert (
        f"{path}, a database of DuckDB's (a file that belongs to it is new)"
        in notebook.run("%gpuckpt restore here").text
    )
    with path.open("r+b") as f:
        f.truncate(4096)
    notebook.run("%gpuckpt save here --replace")
    path.unlink()
    assert f"its log ({log}) exists" in refused(notebook)
    assert log.read_bytes() == b"of what came since"


def test_files_that_were_written_may_have_another_size_or_be_gone(notebook: Notebook, tmp_path: Path) -> None:
    shorter, appended, mapped = tmp_path / "shorter", tmp_path / "appended", tmp_path / "mapped"
    longer = tmp_path / "a longer one"
    mapped.write_bytes(bytes(8192))
    notebook.run(f"""
        import mmap
        shorter, appended = open({str(shorter)!r}, "w"), open({str(appended)!r}, "a")
        longer = open({str(longer)!r}, "w")
        for f in shorter, appended, longer: f.write("saved"); f.flush()
        with open({str(mapped)!r}, "r+b") as f: memory = mmap.mmap(f.fileno(), 8192)
    """)
    notebook.run("%gpuckpt save here")
    notebook.run("longer.write(', and what was given up'); longer.flush()")
    shorter.write_text("new")
    appended.unlink()
    answer = notebook.run("%gpuckpt restore here").text
    assert f"Longer than it was: {longer}. Unless the kernel appends, it writes at its old position" in answer
    command = f"truncate -s 5 '{longer}'"
    assert f"in a terminal: `{command}`" in answer
    assert f"{shorter} (had 5 bytes, has 3)" in answer
    assert f"{shorter} is shorter than it was: unless the kernel appends, it writes at its old position" in answer
    notebook.run("longer.write(' on'); longer.flush()")
    assert longer.read_text() == "saved onnd what was given up"
    assert notebook.run("%gpuckpt restore here --discard").text
    subprocess.run(["/bin/sh", "-c", command], check=True)
    notebook.run("for f in shorter, appended, longer: f.write(' on'); f.flush()")
    assert [each.read_text() for each in (shorter, appended, longer)] == ["new\0\0 on", "saved on", "saved on"]
    # Memory behind the end of a file would kill whoever touches it.
    mapped.write_bytes(bytes(4096))
    assert f"{mapped}: had 8192 bytes, here 4096" in refused(notebook)
