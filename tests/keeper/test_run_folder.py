"""Where the folders of running kernels are: in Jupyter's runtime folder; where machines share that, or it holds no
sockets, in /var/tmp.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import COMMAND
from notebooks import Notebook, StartKernel

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.linux.special_files import holds_special_files

_FETCHED = Path(__file__).parents[2] / ".venv" / "pods" / "root" / "usr"
"""What `make test` fetches, as root: exFAT among it, unless the machine has it."""

pytestmark = pytest.mark.criu


def _program(name: str) -> Path:
    return next((path for path in (_FETCHED / "sbin" / name, Path("/usr/sbin", name)) if path.exists()), Path(name))


@pytest.fixture
def without_sockets(folders: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder on exFAT, which has neither sockets, FIFOs nor second names of files."""
    if not (_FETCHED.parents[1] / "ready").exists():
        pytest.skip("no exFAT was fetched here: `make test` does, as root, on Debian or Ubuntu")
    if not Path("/dev/fuse").exists():
        pytest.skip("this system has no FUSE")
    there, image = tmp_path / "exfat", tmp_path / "exfat.img"
    there.mkdir()
    with image.open("wb") as made:
        made.truncate(64 << 20)
    with monkeypatch.context() as fetched:
        fetched.setenv("LD_LIBRARY_PATH", str(_FETCHED / "lib" / "x86_64-linux-gnu"))
        subprocess.run([_program("mkfs.exfat"), image], check=True, stdout=subprocess.DEVNULL)
        loop = subprocess.run(["losetup", "--find", "--show", image], check=True, capture_output=True, text=True)
        device = loop.stdout.strip()
        try:
            mount = [_program("mount.exfat-fuse"), "-o", "umask=077", device, there]
            subprocess.run(mount, check=True, stdout=subprocess.DEVNULL)
            try:
                runtime = there / "runtime"
                runtime.mkdir()
                monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(runtime))
                yield runtime
            finally:
                subprocess.run(["umount", there], check=True)
        finally:
            subprocess.run(["losetup", "--detach", device], check=True)


@pytest.fixture
def kernel(without_sockets: Path, start: StartKernel) -> Iterator[Notebook]:
    notebook = start()
    yield notebook
    notebook.close()
    shutil.rmtree(settings.kernels_dir())


def test_a_kernel_is_saved_and_restored_where_the_runtime_folder_holds_no_sockets(
    kernel: Notebook, without_sockets: Path
) -> None:
    assert settings.kernels_dir() == Path(f"/var/tmp/gpuckpt-{os.getuid()}")
    assert settings.kernels_dir().stat().st_mode & 0o777 == 0o700
    kernel.run("x = 1")
    kernel.run("%gpuckpt save here")
    kernel.run("x = 2")
    kernel.run("%gpuckpt restore here")
    assert kernel.value("x") == "1"
    listed = subprocess.run([*COMMAND, "kernels", "--json"], check=True, capture_output=True, text=True).stdout
    assert kernel.manager.provisioner.kernel_id in listed
    doctor = subprocess.run([*COMMAND, "doctor", "--for", "slurm", "--json"], capture_output=True, text=True).stdout
    said = next(check["found"] for check in json.loads(doctor)["checks"] if check["name"] == "run folder")
    assert f"in place of {without_sockets}" in said
    assert [path.name for path in without_sockets.iterdir() if path.suffix != ".json"] == [], (
        "nothing of a trial is left"
    )


def test_what_somebody_else_has_made_there_is_not_used(without_sockets: Path, start: StartKernel) -> None:
    theirs = Path(f"/var/tmp/gpuckpt-{os.getuid()}")
    theirs.mkdir(mode=0o700)
    try:
        os.chown(theirs, 4242, 4242)
        said = start().fails("%gpuckpt save here").text
        assert f"{theirs} belongs to uid 4242" in said
    finally:
        theirs.rmdir()


@pytest.mark.parametrize(
    ("kind", "is_shared"),
    [("nfs4", True), ("fuse.sshfs", True), ("fuse.gocryptfs", False), ("ext4", False), ("", False)],
)
def test_in_a_home_that_machines_share_it_is_this_machine_s_own_unless_somebody_asks_for_it(
    kind: str, is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system says of a real NFS is seen by `tests/shared_store`."""
    monkeypatch.setattr(settings, "filesystem", lambda _: (kind, set()))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("JUPYTER_RUNTIME_DIR")
    here = Path(f"/var/tmp/gpuckpt-{os.getuid()}")
    assert settings.kernels_dir() == (here if is_shared else tmp_path / "runtime" / "gpuckpt")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    assert settings.kernels_dir() == tmp_path / "runtime" / "gpuckpt"


def test_a_folder_that_cannot_be_tried_is_taken_to_hold_them(tmp_path: Path) -> None:
    assert holds_special_files(tmp_path / "not" / "made")
    assert holds_special_files(Path("/proc/self/fd"))
    assert list(tmp_path.iterdir()) == []
