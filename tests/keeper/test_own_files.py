"""Snapshots that keep the kernel's own files, restored where these are not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from keeper_faults import store
from notebooks import Notebook, StartKernel

import jupyter_gpuckpt
from jupyter_gpuckpt.store import Store

SPEC = "small"


def _installed(name: str, found: set[str]) -> Iterator[Path]:
    """Yield what stands at the top of site-packages for a distribution and for what it needs."""
    if name in found:
        return
    found.add(name)
    try:
        one = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return
    for file in one.files or ():
        if ".." not in file.parts and file.parts[0] != "__pycache__":
            yield Path(str(one.locate_file(file.parts[0])))
    for needed in one.requires or ():
        if "extra ==" not in needed and (match := re.match(r"[A-Za-z0-9._-]+", needed)):
            yield from _installed(match[0], found)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment with ipykernel, a module that nobody has imported, and a kernelspec."""
    folder = tmp_path / "project" / "env"
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for path in set(_installed("ipykernel", set())) | set(_installed("jupyter_gpuckpt", set())):
        if path.is_dir() and not (packages / path.name).exists():
            ignored = shutil.ignore_patterns("__pycache__", "tests")
            shutil.copytree(path, packages / path.name, copy_function=_linked, ignore=ignored, symlinks=True)
        elif path.is_file() and not path.name.startswith("__editable__"):
            _linked(str(path), str(packages / path.name))
    (packages / "ours.pth").write_text(str(Path(jupyter_gpuckpt.__file__).parents[1]))
    (packages / "latecomer").mkdir()
    (packages / "latecomer" / "__init__.py").write_text("from .data import answer\n")
    (packages / "latecomer" / "data.py").write_text("answer = 42\n")
    (packages / "latecomer" / "large.bin").write_bytes(os.urandom(100_000))
    spec = tmp_path / "jupyter" / "kernels" / SPEC
    spec.mkdir(parents=True)
    argv = [str(folder / "bin" / "python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    provisioner = {"kernel_provisioner": {"provisioner_name": "gpuckpt-provisioner"}}
    about = {"argv": argv, "display_name": SPEC, "language": "python", "metadata": provisioner}
    (spec / "kernel.json").write_text(json.dumps(about))
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
