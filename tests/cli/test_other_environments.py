"""Kernels of other environments than the one that starts them, and of other kernelspecs than ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Cli
from notebooks import PATIENCE, Notebook, StartKernel
from small_environment import SPEC, small_environment

from jupyter_gpuckpt.launch_command import with_agent

_MODULE = ("-m", "ipykernel_launcher", "-f", "{connection_file}")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a virtual environment, `env`, on the base Python of ours; our package is not in it."""
    folder = tmp_path_factory.mktemp("other")
    small_environment(folder / "env", folder / "jupyter")
    next(folder.glob("env/lib/python3*/site-packages/ours.pth")).unlink()
    return folder


def test_a_kernel_of_another_environment_on_the_same_python_runs_and_is_saved_from_outside(
    made: Path, start: StartKernel, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("JUPYTER_PATH", str(made / "jupyter"))
    kernel = start(SPEC)
    assert kernel.value("__import__('sys').prefix") == str(made / "env")
    kernel.run("x = 1")
    kernel_id = kernel.manager.provisioner.kernel_id
    # It has no %gpuckpt that an advice could name.
    assert f"`jupyter gpuckpt save {kernel_id[:8]} NAME`" in cli("restore", kernel_id).err
    assert cli("save", kernel_id, "one").status == 0
    kernel.run("x = 2")
    before = _history_session(kernel)
    assert cli("restore", kernel_id, "one").status == 0
    kernel.wait_for_ready()
    # What follows the save in that session is the kernel's before it: IPython would print an error into a cell.
    assert _history_session(kernel) != before
    assert kernel.value("x") == "1"


def _history_session(kernel: Notebook) -> str:
    """Return the number of the session that the next cell will be in."""
    wanted = {"session": "get_ipython().history_manager.session_number"}
    silently = {"silent": True, "store_history": False, "reply": True, "timeout": PATIENCE}
    reply = kernel.client.execute("", user_expressions=wanted, **silently)
    number: str = reply["content"]["user_expressions"]["session"]["data"]["text/plain"]
    return number


def test_a_kernelspec_that_ipykernel_installs_has_the_magic(
    start: StartKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = [sys.executable, "-m", "ipykernel", "install", "--prefix", str(tmp_path), "--name", "mine"]
    subprocess.run(install, check=True, capture_output=True)
    path = tmp_path / "share" / "jupyter" / "kernels" / "mine" / "kernel.json"
    spec = json.loads(path.read_text())
    spec["metadata"]["kernel_provisioner"] = {"provisioner_name": "gpuckpt-provisioner"}
    path.write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    assert "Saved here" in start("mine").run("%gpuckpt save here").text


def _has_agent(*cmd: str, cwd: str = "/", **env: str) -> bool:
    return bool(with_agent(cmd, {**os.environ, **env}, cwd)[1])


@pytest.mark.parametrize("options", ["", "-Xfrozen_modules=off", "-X utf8", "-u", "-I", "-W ignore -uB -E"])
def test_pythons_own_options_do_not_keep_the_agent_away(options: str) -> None:
    assert _has_agent(sys.executable, *options.split(), *_MODULE)
    assert _has_agent(sys.executable, *options.split(), "-um", *_MODULE[1:])


@pytest.mark.parametrize("cmd", [["-S", *_MODULE], ["-Sm", *_MODULE[1:]], ["-c", "0", *_MODULE], ["-m"], []])
def test_a_command_that_could_not_import_the_kernel_class_is_left_alone(cmd: list[str]) -> None:
    assert with_agent([sys.executable, *cmd], os.environ, "/") == ([sys.executable, *cmd], "")


def test_a_kernel_class_of_somebody_elses_is_not_replaced() -> None:
    assert not _has_agent(sys.executable, *_MODULE, "--IPKernelApp.kernel_class=ipykernel.ipkernel.IPythonKernel")


def test_an_environment_is_known_by_whatever_path_leads_to_it(tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(sys.prefix)
    name = Path(sys.executable).name
    assert _has_agent(str(tmp_path / "linked" / "bin" / name), *_MODULE)
    assert _has_agent(f"linked/bin/{name}", *_MODULE, cwd=str(tmp_path))
    assert _has_agent(name, *_MODULE, PATH=str(Path(sys.prefix, "bin")))
    assert not _has_agent(name, *_MODULE, PATH=str(tmp_path))


def test_another_environment_has_the_agent_where_it_has_this_version_of_the_package(made: Path, tmp_path: Path) -> None:
    python = str(made / "env" / "bin" / "python")
    ours = str(Path(__file__).parents[2])
    assert not _has_agent(python, *_MODULE, cwd=ours)
    assert _has_agent(python, *_MODULE, PYTHONPATH=ours)
    assert not _has_agent(python, "-I", *_MODULE, PYTHONPATH=ours)
    (tmp_path / "jupyter_gpuckpt.py").write_text("__version__ = '0.0.1'")
    assert not _has_agent(python, *_MODULE, PYTHONPATH=str(tmp_path))


def test_an_interpreter_that_shares_its_file_with_ours_is_another_all_the_same(tmp_path: Path) -> None:
    base = Path(sys.executable).resolve()
    (tmp_path / "link").symlink_to(sys.executable)  # this way Python does not find the environment
    assert not _has_agent(str(tmp_path / "link"), *_MODULE)
    conda = tmp_path / "conda"
    (conda / "bin").mkdir(parents=True)
    (conda / "lib").symlink_to(base.parents[1] / "lib")
    try:
        (conda / "bin" / "python").hardlink_to(base)
    except OSError:
        shutil.copy2(base, conda / "bin" / "python")
    assert not _has_agent(str(conda / "bin" / "python"), *_MODULE)
