"""Completion by Tab: what may follow, and in the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pexpect
import pytest
from argcomplete import CompletionFinder, split_line
from command_line import COMMAND, PROGRAM, Cli
from many_snapshots import store_of
from notebooks import PATIENCE, Notebook

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.cli.completion import prepared
from jupyter_gpuckpt.client.jobs import launch_of
from jupyter_gpuckpt.client.record import KernelFolder

_SHELLS = {
    "bash": (["--norc", "--noprofile", "-i"], "PS1='ready> '", 'eval "$(jupyter-gpuckpt completion bash)"'),
    "zsh": (
        ["-f", "-i"],
        "PS1='ready> '; autoload -U compinit; compinit -u -D",
        'eval "$(jupyter-gpuckpt completion zsh)"',
    ),
    "fish": (
        ["--no-config", "-i"],
        "function fish_prompt; echo 'ready> '; end",
        "jupyter-gpuckpt completion fish | source",
    ),
}


def completed(line: str) -> list[str]:
    """Return what may follow a line, as a shell is told."""
    quote, prefix, _, words, _ = split_line(line, len(line))
    finder = CompletionFinder(prepared(), always_complete_options=False)
    return [word.rstrip() for word in finder._get_completions(words, prefix, quote, None)]


def test_commands_options_and_names_are_completed(cli: Cli, folders: None) -> None:
    store_of(settings.store_dir(), 2)
    assert cli("tag", "many-0001", "best").status == 0
    for line, may_follow in {
        "jupyter-gpuckpt re": ["recipe", "recipient", "redo", "repair", "remote", "restore"],
        "jupyter-gpuckpt show ": ["many-0000", "many-0001"],
        "jupyter-gpuckpt rm many-0001 ": ["many-0000"],
        "jupyter-gpuckpt save kernel ": [],  # a new name
        "jupyter-gpuckpt list --tag ": ["best"],
        "jupyter-gpuckpt log --notebook ": ["many.ipynb"],
        "jupyter-gpuckpt rm --dry": ["--dry-run"],
        "jupyter-gpuckpt awake kernel ": ["off", "on"],
        "jupyter-gpuckpt help vers": ["version"],
        "jupyter-gpuckpt recipe jupyter@": ["jupyter@.service"],
    }.items():
        assert sorted(completed(line)) == sorted(may_follow), line


def test_remotes_that_were_used_are_completed(cli: Cli, folders: None, tmp_path: Path) -> None:
    store_of(settings.store_dir(), 1)
    remote = str(tmp_path / "remote")
    assert cli("push", "many-0000", remote, "--encrypt-to", cli("recipient").out.strip()).status == 0
    assert remote in completed(f"jupyter-gpuckpt remote {tmp_path}/r")


def test_a_kernel_and_a_job_are_completed(notebook: Notebook) -> None:
    folder, lock = KernelFolder.create(launch_of("nightly", ["true"], {}, "/", 0o077))
    try:
        found = completed("jupyter-gpuckpt stop ")
        assert sorted(found) == sorted([notebook.manager.provisioner.kernel_id, "nightly"])
        assert completed("jupyter-gpuckpt logs n") == ["nightly"]
    finally:
        os.close(lock)
        shutil.rmtree(folder.path)


def test_nothing_that_takes_long_is_imported_for_a_tab(folders: None, tmp_path: Path) -> None:
    store_of(settings.store_dir(), 1)
    told = subprocess.run(
        ["env", "PYTHONPROFILEIMPORTTIME=1", *COMMAND],
        env={
            **os.environ,
            "COMP_LINE": "jupyter-gpuckpt show ",
            "COMP_POINT": "21",
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer"),
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    loaded = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines() if line.startswith("import time:")}
    assert "jupyter_gpuckpt.store.store" in loaded
    assert not {"IPython", "asyncio", "cryptography.x509", "jupyter_client", "psutil", "traitlets", "zmq"} & loaded


@pytest.mark.parametrize("name", _SHELLS)
def test_a_shell_completes_a_line(name: str, folders: None, tmp_path: Path) -> None:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"there is no {name} here")
    store_of(settings.store_dir(), 1)
    options, prepare, install = _SHELLS[name]
    path = f"{Path(PROGRAM).parent}:{os.environ['PATH']}"
    env = {**os.environ, "TERM": "xterm", "PATH": path, "HOME": str(tmp_path), "NO_COLOR": "1", "PAGER": "cat"}
    shell = pexpect.spawn(program, options, env=env, timeout=PATIENCE, encoding="utf-8", dimensions=(24, 200))
    with shell:
        for line in (prepare, install, 'echo be""gin'):
            shell.sendline(line)
        shell.expect("begin")
        for line in ("jupyter gpuckpt ta\tmany\t", "jupyter-gpuckpt  tag many\t--js\t"):
            shell.sendline(line)
            shell.expect('no tags|"tags": ')
        shell.expect(r"\}")
        shell.sendline("exit")
        shell.expect(pexpect.EOF)
