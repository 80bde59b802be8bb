"""What the library that criu is started with makes of names of sockets, in a /dev/shm of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpuckpt import installed

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a /dev/shm of its own takes root")

_OWN_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && "$@"; ls /dev/shm', "sh"]
_RUN = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"


def bound(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python under the library, and list afterwards what is in /dev/shm."""
    begin = f"import os, socket; run = {_RUN!r}\n"
    return subprocess.run(
        [*_OWN_SHM, "env", f"LD_PRELOAD={installed.CRIU_SOCKETS_LIBRARY}", sys.executable, "-c", begin + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_names_that_are_not_criu_s_stay_as_they_are() -> None:
    done = bound("""
for name in (b"\\0/crtools", b"\\0cuda-uvmfd-1-2\\0", b"\\0" + b"x" * 107, b"/dev/shm/at-a-path"):
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other:
        one.bind(name)
        one.listen()
        other.connect(name)
        print(one.getsockname() in (name, name.decode()))
""")
    assert done.stdout.split() == [*["True"] * 4, "at-a-path"], done.stderr


def test_another_user_s_process_of_the_tree_reaches_criu_and_nothing_is_left_afterwards() -> None:
    done = bound("""
import ctypes
class Address(ctypes.Structure):
    _fields_ = [("family", ctypes.c_uint16), ("path", ctypes.c_char * 108)]
name = b"\\0/crtools-pr-10013-" + run.encode()
criu = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
address, size = Address(socket.AF_UNIX, name), 2 + len(name)
libc = ctypes.CDLL(None, use_errno=True)
def len_of_name():
    size = ctypes.c_uint32(110)
    assert libc.getsockname(criu.fileno(), ctypes.byref(Address()), ctypes.byref(size)) == 0
    return size.value
for process in (1, 2):  # each is told the address anew
    ctypes.memmove(ctypes.addressof(address) + 2, name, len(name))
    assert len_of_name() == 2  # it has none
    assert libc.bind(criu.fileno(), ctypes.byref(address), size) == 0, ctypes.get_errno()
    criu.listen(1)
    if (pid := os.fork()) == 0:
        os.setresuid(65534, 65534, 65534)
        dumped = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os._exit(libc.connect(dumped.fileno(), ctypes.byref(address), size) != 0)
    assert os.waitpid(pid, 0)[1] == 0
    criu.accept()
print(os.listdir("/dev/shm"))
""")
    assert done.stdout == "['gpuckpt-criu']\n", done.stderr


@pytest.mark.parametrize("planted", ["os.symlink(victim, folder)", "os.mkdir(folder); os.chown(folder, 65534, 65534)"])
def test_a_folder_that_another_user_has_planted_is_not_used_or_changed(tmp_path: Path, planted: str) -> None:
    victim = tmp_path / "private"
    victim.mkdir(0o700)
    (victim / "file").touch()
    done = bound(f"""
victim, folder = {str(victim)!r}, "/dev/shm/gpuckpt-criu"
{planted}
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).bind("\\0/criu-fdstore-1f-" + run)
""")
    assert "PermissionError" in done.stderr or "NotADirectoryError" in done.stderr
    assert victim.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in victim.iterdir()] == ["file"]
