"""What the library that criu is started with does when criu saves its first TCP socket."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpuckpt import installed

_SAVES = """
import os, signal, socket
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
listening = socket.create_server(("127.0.0.1", 0))
one = socket.create_connection(listening.getsockname())
other, _ = listening.accept()
one.send(b"not read yet")
listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
print(os.fstat(other.fileno()).st_ino, bool(signal.sigpending()))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="taking sockets of all processes takes root")
def test_what_is_unread_is_written_down_and_no_child_s_end_is_signalled(tmp_path: Path) -> None:
    """criu gives up where a child ends that it does not know: it may not even see the signal."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(installed.CRIU_SOCKETS_LIBRARY),
        "GPUCKPT_DUMP_UNREAD": str(tmp_path),
    }
    alone = ["unshare", "--pid", "--fork", "--mount-proc"]
    done = subprocess.run(
        [*alone, sys.executable, "-c", _SAVES], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    inode, is_signalled = done.stdout.split()
    assert (tmp_path / f"tcp-unread-{int(inode):x}").read_bytes() == b"not read yet"
    assert is_signalled == "False"
