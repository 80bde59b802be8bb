"""Snapshots that keep the kernel's own files, restored where these are not."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from keeper_faults import Criu, names, small_disk, store
from notebooks import Notebook, StartKernel
from small_environment import SPEC, small_environment

from jupyter_gpuckpt.keeper.files.own_folders import environments, make, makeable
from jupyter_gpuckpt.keeper.files.placed_files import missing
from jupyter_gpuckpt.snapshots.kept_files import Kept, KeptFile, from_json, keep, survey
from jupyter_gpuckpt.snapshots.needs import NeededFile
from jupyter_gpuckpt.store import Contents, Store
from jupyter_gpuckpt.store.chunks import Chunk


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment that kernels are started from by the name `SPEC`."""
    folder = tmp_path / "project" / "env"
    small_environment(folder, tmp_path / "jupyter")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    return folder


@pytest.fixture
def top(tmp_path: Path) -> Iterator[Path]:
    """A folder right below the root of the machine."""
    folder = Path(f"/gpuckpt-test-{os.getpid()}")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _tree(folder: Path) -> set[str]:
    """Return what lies in a folder, but for what Python compiled: whether it keeps that is the machine's to say."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_a_kernel_comes_back_where_its_environment_is_not(
    criu: Criu, environment: Path, start: StartKernel, tmp_path: Path, top: Path
) -> None:
    project = environment.parent
    (project / "notes").mkdir()
    (project / "edited.py").write_text("version = 1")
    (project / "deleted.py").write_text("version = 1")
    (project / "config.txt").write_text("as saved")
    (project / "read only").mkdir()
    (project / "read only" / "once.txt").write_text("abc")
    (top / "read.txt").write_text("0123456789")
    kernel = start(SPEC, cwd=str(project))
    kernel.run(
        f"import sys, os; x = [1]; read = open({str(top / 'read.txt')!r}); read.read(3); log = open('run.log', 'w')"
    )
    kernel.run("log.write('begun '); log.flush(); config = open('config.txt'); once = open('read only/once.txt')")
    kernel.run("w = open('gone.txt', 'w'); w.write('deleted'); w.close(); gone = open('gone.txt')")
    kernel.run("os.unlink('gone.txt')")
    assert kernel.value("sys.prefix") == str(environment)
    saved = kernel.run("%gpuckpt save here --with-files").text
    assert "Saved here" in saved
    assert "own files" in kernel.run("%gpuckpt show here").text
    kernel.close()
    environment.rename(tmp_path / "hidden")
    shutil.rmtree(top)
    shutil.rmtree(project / "read only")
    for name in ("run.log", "deleted.py"):
        (project / name).unlink()
    (project / "edited.py").write_text("version = 22")
    (project / "config.txt").write_text("another text on this machine")
    before = _tree(project)

    kernel = start()
    criu.first("restore", "exit 1")
    kernel.fails("%gpuckpt restore here")
    assert _tree(project) == before
    criu.honest()
    answer = kernel.run("%gpuckpt restore here")
    assert "stand in for what is not here" in answer.text
    assert "were created again: " in answer.text
    assert str(project / "deleted.py") in answer.text
    assert "No new files can be created directly in /." in answer.text
    _is_as_saved(kernel, environment)
    assert kernel.value("gone.read()") == "deleted"
    # A user's own code is what it is now; a file in use is what it was, for this kernel alone.
    assert kernel.value("__import__('edited').version, __import__('deleted').version") == "22 1"
    assert kernel.value("config.read()") == "as saved"
    assert (project / "config.txt").read_text() == "another text on this machine"
    # What it lives from now is kept again without being asked for.
    kernel.run("x.append(2)")
    kernel.run("%gpuckpt save again")
    kernel.run("x.append(3)")
    kernel.close()
    # What it reads and writes in the user's own folders is no part of what only this kernel sees; its Python is.
    own = {"run.log", "deleted.py", "read only", "read only/once.txt", "new.txt", "read only/new.txt"}
    assert _tree(project) == before | own | {"env"}
    assert not list(environment.iterdir())
    assert (project / "run.log").read_text() == "begun and gone on"
    assert not top.exists()
    assert not kernel.folder.exists()

    kernel = start()
    kernel.run("%gpuckpt restore again")
    assert kernel.value("x") == "[1, 2]"
    assert kernel.value("latecomer.answer") == "42"
    kernel.run("import colorsys, latecomer.data; (open('notes/out.txt', 'w')).write('kept')")
    assert (project / "notes" / "out.txt").read_text() == "kept"
    assert Store(store()).get("again").stored < Store(store()).get("here").stored / 2
    kernel.close()
    assert _tree(project) == before | own | {"env", "notes/out.txt"}


def _is_as_saved(kernel: Notebook, environment: Path) -> None:
    assert not list(environment.iterdir())
    assert kernel.value("x, read.read()") == "[1] 3456789"
    kernel.run("import latecomer")
    assert kernel.value("latecomer.__file__").startswith(f"{environment}/lib")
    assert kernel.value("len(open(os.path.dirname(latecomer.__file__) + '/large.bin', 'rb').read())") == "100000"
    kernel.run("log.write('and gone on'); log.flush()")
    assert kernel.value("open('run.log').read()") == "begun and gone on"
    assert kernel.value("__import__('subprocess').check_output([sys.executable, '-c', 'print(6*7)'])") == r"b'42\n'"
    assert kernel.value("once.read()") == "abc"
    # It can create files wherever it could; but in the system's folders they would be lost with the sleeper.
    for folder in (".", "read only", str(environment)):
        kernel.run(f"with open({folder!r} + '/new.txt', 'w') as f: f.write('new')")
    assert kernel.fails("open('/gpuckpt-new.txt', 'w')").ename == "OSError"


def _file(path: Path, kind: int = stat.S_IFREG) -> KeptFile:
    return KeptFile(str(path), kind | 0o644, 0, 0, 0)


@pytest.mark.parametrize(
    "where", ["a stranger's", "below a stranger's", "for all", "a link to a stranger's", "/usr/lib"]
)
def test_files_are_made_again_on_the_disk_only_where_nobody_else_has_a_say(tmp_path: Path, where: str) -> None:
    own, folder = tmp_path / "own", tmp_path / "other"
    (folder / "below").mkdir(parents=True)
    own.mkdir()
    os.chown(folder, 12345, 12345)
    odd = {
        "a stranger's": folder,
        "below a stranger's": folder / "below",
        "for all": tmp_path / "all",
        "a link to a stranger's": own / "link",
        "/usr/lib": Path("/usr/lib"),
    }[where]
    (tmp_path / "all").mkdir()
    (tmp_path / "all").chmod(0o777)
    (own / "link").symlink_to(folder)
    new = [_file(own / "new"), _file(own / "data", stat.S_IFDIR), _file(own / "data" / "new")]
    assert makeable([*new, _file(odd / "new")], []) == {file.path for file in new}
    if where != "/usr/lib":  # also if it came to be so only now
        with pytest.raises(PermissionError, match="another user can change it"):
            make(_file(odd / "new"), None)
        assert not (odd / "new").exists()
    (own / "new").write_text("there")
    assert makeable(new[:1], []) == frozenset()
    with pytest.raises(FileExistsError):
        make(new[0], None)
    assert (own / "new").read_text() == "there"


def test_of_python_s_own_folders_nothing_is_made_but_the_outermost(tmp_path: Path) -> None:
    packages = tmp_path / ".venv" / "lib" / "site-packages"
    venv, mark, module = (
        _file(tmp_path / ".venv", stat.S_IFDIR),
        _file(tmp_path / ".venv" / "pyvenv.cfg"),
        packages / "a",
    )
    kept = [venv, mark, _file(packages, stat.S_IFDIR), _file(module)]
    found = environments(kept, [])
    assert makeable(kept, found) == {venv.path}
    packages.mkdir(parents=True)
    assert makeable(kept, found) == frozenset()
    # A notebook in it makes it a folder as others are.
    assert venv.path not in environments(kept, [NeededFile(venv.path, stat.S_IFDIR)])


@pytest.mark.parametrize(
    "odd",
    [
        {"path": "/home/../etc/passwd"},
        {"path": "etc/passwd"},
        {"path": "/etc//passwd"},
        {"path": "/"},
        {"path": "/proc/sys/kernel/core_pattern"},
        {"path": "/dev/sda"},
        {"path": "/etc/pass\0wd"},
        {"mode": stat.S_IFCHR | 0o600},
        {"part": "criu/pages-1.img"},
        {"part": "files/.."},
        {"part": "files/000002"},
        {"offset": -1},
        {"offset": 90},
        {"size": 101},
        {"size": "10"},
        {"writable": 1},
    ],
    ids=str,
)
def test_a_list_of_files_that_leads_elsewhere_is_refused(odd: dict[str, Any]) -> None:
    contents = Contents({"files/000001": [Chunk(b"x" * 32, 100)]})
    good = KeptFile("/etc/passwd", stat.S_IFREG | 0o644, 0, 0, 0, 20, "", "files/000001", 5)
    assert not missing(from_json(Kept([]).to_json()), contents)
    assert from_json(Kept([good]).to_json()).files == [good]
    with pytest.raises(ValueError, match=r"."):
        missing(from_json(Kept([good._replace(**odd)]).to_json()), contents)
    with pytest.raises(ValueError, match="twice"):
        from_json(Kept([good, good]).to_json())


def test_files_beyond_the_limit_are_refused_and_the_kernel_goes_on(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_FILES_LIMIT", "10M")
    kernel = start()
    kernel.run("x = 1")
    answer = kernel.fails("%gpuckpt save never --with-files")
    assert answer.ename == "SaveFailed"
    assert "the limit is 10 MB" in answer.text
    assert sys.prefix in answer.text
    assert kernel.value("x") == "1"
    kernel.run("%gpuckpt save here")
    assert names() == {"here"}


def test_a_disk_too_small_for_the_files_leaves_no_snapshot_and_the_kernel_as_it_was(
    start: StartKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 100):
        monkeypatch.setenv("GPUCKPT_STORE", str(disk / "store"))
        kernel = start()
        kernel.run("x = 1")
        answer = kernel.fails("%gpuckpt save never --with-files")
        assert answer.ename in ("SaveFailed", "StoreError")
        assert "No space left" in answer.text
        assert kernel.value("x") == "1"
        assert not names()
        assert not list((disk / "store" / "saving").iterdir())
        kernel.close()


def test_who_keeps_many_files_can_be_told_to_stop_at_each_of_them(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    files = survey(Path("/"), [NeededFile(str(tmp_path / name), stat.S_IFREG, 1) for name in "abc"], {})
    left = iter(files[:-1])
    with Store(tmp_path / "store").writer("never") as writer, pytest.raises(StopIteration):
        keep(files, Path("/"), writer, 10**6, lambda: next(left))
    assert Store(tmp_path / "store").list() == []


def test_links_are_followed_as_the_processes_see_them(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for folder in ("real/env/pack/__pycache__", "real/env/data", "stdlib/lib-dynload", "stdlib/test", "user/own", "x"):
        (root / folder).mkdir(parents=True)
    for file in ("real/env/pack/__init__.py", "real/env/pack/__pycache__/a.pyc", "stdlib/os.py", "stdlib/test/a.py"):
        (root / file).write_text("1")
    for file in ("user/mod.py", "user/large.csv", "user/own/__init__.py", "x/python", "user/log"):
        (root / file).write_text("1")
    (root / "home").symlink_to("/real")  # the processes' root, and not the machine's
    (root / "real/env/python").symlink_to("../../x/python")
    (root / "real/env/loop").symlink_to("loop")
    (root / "real/env/elsewhere").symlink_to("/user")
    environment = {"folders": ["/home/env", "/stdlib", "/nowhere"], "modules": ["/user"], "files": ["/home/env/python"]}
    needed = [NeededFile("/user/log", stat.S_IFREG, 1, writable=True)]
    found = {file.path: file for file in survey(root, needed, environment)}
    assert [path for path, file in found.items() if stat.S_ISREG(file.mode)] == [
        "/real/env/pack/__init__.py",
        "/stdlib/os.py",
        "/user/log",
        "/user/mod.py",
        "/user/own/__init__.py",
        "/x/python",
    ]
    assert found["/home"].link == "/real"
    assert {"/real/env/data", "/real/env/loop", "/real/env/elsewhere"} <= found.keys()
    assert [path for path, file in found.items() if file.loose] == [
        "/user/mod.py",
        "/user/own",
        "/user/own/__init__.py",
    ]
    assert [path for path, file in found.items() if file.writable] == ["/user/log"]
