"""What the broker demands before it serves: nothing that root runs, or trusts, may be changed by others."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from notebooks import wait_until
from people import GROUP, UIDS, Machine

import jupyter_gpuckpt
from jupyter_gpuckpt import settings
from jupyter_gpuckpt.freeze.criu_program import find_criu

pytestmark = pytest.mark.criu


class Installation:
    """A virtual environment of root's, with this package copied into it and everything else where it is."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self._machine, self.folder = machine, folder
        self.packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        self.packages.mkdir(parents=True)
        (folder / "bin").mkdir()
        self.python = folder / "bin" / "python"
        self.python.symlink_to(os.path.realpath(sys.executable))
        self.configuration = folder / "pyvenv.cfg"
        self.configuration.write_text(f"home = {Path(sys.base_prefix, 'bin')}\n")
        package = Path(jupyter_gpuckpt.__file__).parent
        skipped = shutil.ignore_patterns("labextension", "__pycache__")
        shutil.copytree(package, self.packages / package.name, ignore=skipped)
        self.ways = self.packages / "others.pth"
        self.ways.write_text(sysconfig.get_path("purelib"))
        self.socket = folder / "run" / "broker.sock"
        self.socket.parent.mkdir()
        self._environment = machine.environment

    def with_criu_of_its_own(self) -> Path:
        """Copy criu's packages to here; return a library among them."""
        if find_criu().origin != "prefix":
            pytest.skip("criu's libraries are the system's")
        prefix = self.folder / "criu"
        shutil.copytree(settings.criu_prefix(), prefix, symlinks=True)
        self._environment = {**self._environment, "GPUCKPT_CRIU_PREFIX": str(prefix)}
        return next(path for path in prefix.rglob("libprotobuf-c.so*") if not path.is_symlink())

    def starts(self, **environment: str) -> str:
        """Start a broker from here and end it once it listens; return what it said."""
        log = self.folder / "log"
        named = {**self._environment, "GPUCKPT_BROKER": str(self.socket), **environment}
        argv = [*self._machine.entering, str(self.python), "-I", "-m", "jupyter_gpuckpt.broker", GROUP]
        with log.open("w") as out, subprocess.Popen(argv, cwd="/", env=named, stdout=out, stderr=out) as broker:
            try:
                wait_until(lambda: broker.poll() is not None or "listens" in log.read_text())
            finally:
                broker.terminate()
        return log.read_text()


@pytest.fixture
def installation(machine: Machine, tmp_path: Path) -> Installation:
    folder = machine.folder / tmp_path.name
    folder.mkdir()
    return Installation(machine, folder)


def give(path: Path) -> None:
    os.chown(path, UIDS["bob"], UIDS["bob"])


def open_to_all(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o022 | stat.S_ISVTX)  # which keeps nobody from writing into a file


def test_a_broker_starts_where_all_is_root_s_and_makes_the_socket_s_folder_for_users(
    installation: Installation,
) -> None:
    installation.socket = installation.folder / "new" / "run" / "broker.sock"
    assert "listens" in installation.starts()
    assert stat.S_IMODE(installation.socket.parent.stat().st_mode) == 0o755
    assert stat.S_IMODE(installation.socket.parent.parent.stat().st_mode) == 0o755


CHANGEABLE: dict[str, Callable[[Installation], Path]] = {
    "the environment's settings": lambda i: i.configuration,
    "a .pth file": lambda i: i.ways,
    "a module that is loaded": lambda i: i.packages / "jupyter_gpuckpt" / "broker" / "images.py",
    "a module that is not loaded yet": lambda i: i.packages / "jupyter_gpuckpt" / "cli" / "command.py",
    "a folder of a package": lambda i: i.packages / "jupyter_gpuckpt" / "kernel",
    "the folder of packages": lambda i: i.packages,
    "what a dump runs": lambda i: i.packages / "jupyter_gpuckpt" / "freeze" / "at_post_dump.sh",
    "the socket's folder": lambda i: i.socket.parent,
    "a library of criu's": lambda i: i.with_criu_of_its_own(),
}


@pytest.mark.parametrize("how", [give, open_to_all], ids=["of another's", "open to all"])
@pytest.mark.parametrize("what", CHANGEABLE.values(), ids=CHANGEABLE)
def test_it_does_not_start_from_what_others_could_change(
    installation: Installation, what: Callable[[Installation], Path], how: Callable[[Path], None]
) -> None:
    path = what(installation)
    how(path)
    assert f"{path} can be changed by users other than root" in installation.starts()


def test_it_does_not_start_by_a_link_that_others_could_turn(installation: Installation, machine: Machine) -> None:
    """What it leads to is root's, today."""
    theirs = machine.folder / "bob" / "criu"
    theirs.symlink_to(find_criu().path)
    assert f"{theirs.parent} can be changed by users other than root" in installation.starts(GPUCKPT_CRIU=str(theirs))
    shared = installation.folder / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    link = shared / "criu"
    link.symlink_to(find_criu().path)
    assert "listens" in installation.starts(GPUCKPT_CRIU=str(link))  # nobody else may replace a link of root's there
    os.chown(link, UIDS["bob"], UIDS["bob"], follow_symlinks=False)
    assert f"{link} can be changed by users other than root" in installation.starts(GPUCKPT_CRIU=str(link))


def test_folders_that_somebody_planted_are_left_as_they_are(installation: Installation) -> None:
    theirs, roots = installation.socket.parent, installation.folder / "of-root"
    roots.mkdir(mode=0o755)
    (theirs / "sleepers").symlink_to(roots)
    give(theirs)
    assert f"{theirs} can be changed by users other than root" in installation.starts()
    assert stat.S_IMODE(roots.stat().st_mode) == 0o755
