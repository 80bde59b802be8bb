"""CRIU from the distribution's own packages, into a folder: a real installation each time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpuckpt.errors import GpuckptError, Unavailable
from jupyter_gpuckpt.freeze.criu_program import check, find_criu, minimum_version, program_in_prefix
from jupyter_gpuckpt.machine.criu_install import install_criu
from jupyter_gpuckpt.machine.private_apt import AptFailed, PrivateApt

needs_apt = pytest.mark.skipif(shutil.which("apt-get") is None, reason="a system without apt")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

# A program that prints the version, or the error as JSON.
INSTALL = """
import json, pathlib, sys
from jupyter_gpuckpt.errors import Unavailable
from jupyter_gpuckpt.machine.criu_install import install_criu
try:
    print(install_criu(pathlib.Path(sys.argv[1]), lambda line: print(line, file=sys.stderr)).path)
except Unavailable as error:
    print(json.dumps(error.as_dict()))
"""


def _state_of_apt() -> list[tuple[str, int]]:
    folders = ("/var/lib/apt/lists", "/var/cache/apt", "/var/lib/dpkg", "/etc/apt")
    return sorted(
        (str(path), path.lstat().st_mtime_ns) for folder in folders for path in [Path(folder), *Path(folder).rglob("*")]
    )


@needs_apt
def test_it_is_installed_works_and_changes_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _state_of_apt()
    steps: list[str] = []
    prefix = tmp_path / "deep" / "criu"
    program = install_criu(prefix, steps.append)
    assert program.version >= minimum_version()
    assert program.origin == "prefix"
    assert Path(program.path).is_relative_to(prefix)
    if os.geteuid() == 0:
        check(program)
    assert steps
    assert _state_of_apt() == before
    assert sorted(path.name for path in prefix.parent.iterdir()) == [".criu.lock", "criu"]

    steps.clear()
    made = prefix.stat().st_ino
    assert install_criu(prefix, steps.append) == program
    assert prefix.stat().st_ino == made
    assert len(steps) == 1
    assert "already" in steps[0]

    moved = prefix.rename(tmp_path / "elsewhere")
    assert program_in_prefix(moved).version >= minimum_version()
    named = moved / Path(program.path).relative_to(prefix)
    monkeypatch.setenv("GPUCKPT_CRIU", str(named))
    assert find_criu().origin == "environment"


@needs_apt
def test_two_at_once_make_one_in_place_of_what_is_unfit_or_left_over(tmp_path: Path) -> None:
    prefix = tmp_path / "criu"
    (prefix / "usr/sbin").mkdir(parents=True)
    (prefix / "usr/sbin/criu").write_text("half of one")
    (tmp_path / ".criu-interrupted").mkdir()
    both = [
        subprocess.Popen(
            [sys.executable, "-c", INSTALL, str(prefix)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    answers = [one.communicate(timeout=500) for one in both]
    assert [out.strip() for out, _ in answers] == [str(prefix / "usr/sbin/criu")] * 2, answers
    assert sorted(len(err.splitlines()) for _, err in answers)[0] == 1
    assert program_in_prefix(prefix).version >= minimum_version()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".criu.lock", "criu"]


@needs_root
@pytest.mark.parametrize(
    ("system", "command"),
    [
        ("ID=fedora\nNAME=Fedora\nVERSION_ID=43", "dnf install criu"),
        ("ID=arch\nNAME=Arch", "pacman -S criu"),
        ('ID="opensuse-leap"\nID_LIKE="suse opensuse"\nNAME=openSUSE', "zypper install criu"),
        ("ID=alpine\nNAME=Alpine", "apk add criu"),
        ("ID=hut\nNAME=Hut", "criu` is in PATH"),
    ],
)
def test_on_other_systems_it_says_what_to_run(tmp_path: Path, system: str, command: str) -> None:
    (tmp_path / "os-release").write_text(system + "\n")
    script = 'mount --bind "$1" /etc/os-release && shift && exec "$@"'
    argv = [sys.executable, "-c", INSTALL, str(tmp_path / "criu")]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path / "os-release"), *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    with pytest.raises(Unavailable) as caught:
        raise GpuckptError.from_dict(json.loads(done.stdout))
    assert command in caught.value.then
    assert not (tmp_path / "criu").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="GPUCKPT_CRIU_PREFIX") as caught:
        install_criu(tmp_path / "file" / "criu", lambda _: None)
    assert str(tmp_path / "file") in caught.value.why


@needs_apt
def test_unsigned_lists_are_refused(tmp_path: Path) -> None:
    lists = tmp_path / "dists/trixie/main"
    for machine in ("amd64", "arm64"):
        folder = lists / f"binary-{machine}"
        folder.mkdir(parents=True)
        (folder / "Packages").write_text("Package: criu\nVersion: 9.9\n\n")
    (lists.parent / "Release").write_text("Suite: trixie\nComponents: main\n")
    tmp_path.chmod(0o755)
    stanza = f"Types: deb\nURIs: file:{tmp_path}\nSuites: trixie\nComponents: main\n"
    with PrivateApt(stanza) as apt, pytest.raises(AptFailed, match="not signed"):
        apt.update()
