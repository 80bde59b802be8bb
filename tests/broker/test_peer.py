"""Whom the broker takes a process for, where that process does what it can to be taken for another."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path

import pytest
from notebooks import wait_until
from people import GID, UIDS, Machine, Person

from jupyter_gpuckpt.broker import peer
from jupyter_gpuckpt.errors import Refused

ASK = """
import os, socket
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(os.environ["GPUCKPT_BROKER"])
s.send(b'{"do": "criu"}')
print(s.recv(65536).decode())
"""

ANOTHER_FILE_SYSTEM = """
mount -t tmpfs chroot "$1"
root=$(mktemp -d "$1/XXXXXX")
# Inodes of a tmpfs are counted: sooner or later a folder has the number that "/" has, often 2.
for _ in $(seq 1000); do
    [ "$(stat -c %i /)" -gt "$(stat -c %i "$root")" ] || break
    root=$(mktemp -d "$1/XXXXXX")
done
chmod 755 "$1" "$root"
for path in /*; do
    if [ -L "$path" ]; then cp -P "$path" "$root"
    elif [ -d "$path" ]; then mkdir "$root$path"; mount --rbind "$path" "$root$path"
    fi
done
"""
MOUNTED_AGAIN = """
root=$1
mount --rbind / "$root"
"""
ENTER = """
shift
exec /usr/sbin/chroot "$root" "$@"
"""


@pytest.mark.criu
@pytest.mark.parametrize("way", [ANOTHER_FILE_SYSTEM, MOUNTED_AGAIN], ids=["another file system", "mounted again"])
def test_a_process_with_another_root_folder_is_not_served(machine: Machine, tmp_path: Path, way: str) -> None:
    """Also where that has the number of the machine's own, or is the same folder without what is mounted over it."""
    folder = machine.folder / tmp_path.name
    folder.mkdir()
    ids = [f"--reuid={UIDS['bob']}", f"--regid={UIDS['bob']}", f"--groups={GID}"]
    asking = ["setpriv", *ids, "--", sys.executable, "-c", ASK]
    done = machine.as_root(
        *("sh", "-ec", way + ENTER, "sh", str(folder), *asking), environment=machine.environment_of("bob")
    )
    assert done.returncode == 0, done.stderr
    assert "a different root folder" in json.loads(done.stdout)["error"]["why"], done


def test_a_process_that_becomes_a_set_user_id_program_while_it_is_looked_at_is_not_served(
    machine: Machine, bob: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limits and control groups would be taken for its user's."""
    program, path = machine.folder / "sleep", machine.folder / "asked.sock"
    shutil.copy("/bin/sleep", program)
    program.chmod(0o4755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen()
        pid = bob.does(
            "import os, socket",
            f"""
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    s = socket.socket(socket.AF_UNIX)
    s.connect({str(path)!r})
    os.read(read, 1)
    os.execv({str(program)!r}, ["sleep", "1000"])
""",
            "pid",
        )
        connection, _ = listener.accept()

        def become(pid: int) -> None:
            bob.does("os.write(write, b'go')")
            wait_until(lambda: f"\nUid:\t{bob.uid}\t0\t0\t0\n" in Path(f"/proc/{pid}/status").read_text())

        with connection:
            # Between two looks; which namespaces this process is in, is not the question here.
            monkeypatch.setattr(peer, "_refuse_confined", become)
            monkeypatch.setattr(peer, "_mount_namespace", lambda *_: -1)
            try:
                with pytest.raises(Refused, match="other rights"):
                    peer.Peer.at(connection)
            finally:
                bob.does(f"os.kill({pid}, 9)", f"os.waitpid({pid}, 0)")
