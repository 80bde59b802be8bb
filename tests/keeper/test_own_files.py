"""Snapshots that keep the kernel's own files, restored where these are not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_faults import store
from notebooks import Notebook, StartKernel
from small_environment import SPEC, small_environment

from jupyter_gpuckpt.store import Store


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
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_kernel_comes_back_where_its_environment_is_not(
    environment: Path, start: StartKernel, tmp_path: Path, top: Path
) -> None:
    project = environment.parent
    (project / "notes").mkdir()
    (top / "read.txt").write_text("0123456789")
    kernel = start(SPEC, cwd=str(project))
    kernel.run(
        f"import sys, os; x = [1]; read = open({str(top / 'read.txt')!r}); read.read(3); log = open('run.log', 'w')"
    )
    kernel.run("log.write('begun '); log.flush()")
    assert kernel.value("sys.prefix") == str(environment)
    saved = kernel.run("%gpuckpt save here --with-files").text
    assert "Saved here" in saved
    assert "own files" in kernel.run("%gpuckpt show here").text
    kernel.close()
    environment.rename(tmp_path / "hidden")
    shutil.rmtree(top)
    (project / "run.log").unlink()
    before = _tree(project)

    kernel = start()
    answer = kernel.run("%gpuckpt restore here")
    assert "stand in for what is not here" in answer.text
    _is_as_saved(kernel, environment)
    # What it lives from now is kept again without being asked for.
    kernel.run("x.append(2)")
    kernel.run("%gpuckpt save again")
    kernel.run("x.append(3)")
    kernel.close()
    assert _tree(project) == before
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
    assert _tree(project) == before | {"notes/out.txt"}


def _is_as_saved(kernel: Notebook, environment: Path) -> None:
    assert not environment.exists()
    assert kernel.value("x, read.read()") == "[1] 3456789"
    kernel.run("import latecomer")
    assert kernel.value("latecomer.__file__").startswith(f"{environment}/lib")
    assert kernel.value("len(open(os.path.dirname(latecomer.__file__) + '/large.bin', 'rb').read())") == "100000"
    kernel.run("log.write('and gone on'); log.flush()")
    assert kernel.value("open('run.log').read()") == "begun and gone on"
    assert kernel.value("__import__('subprocess').check_output([sys.executable, '-c', 'print(6*7)'])") == r"b'42\n'"
    # Lost with the sleeper, if it was let happen.
    assert kernel.fails("open('new.txt', 'w')").ename == "OSError"
