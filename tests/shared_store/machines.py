"""Machines with a Linux each that share a folder by NFS: a server, whose disk it is on, and clients.

They are User Mode Linux: a kernel that runs as a process. Each has its own clock, boot and network, and dies when its
process is killed. Their root is this machine's, read-only; what they write is their own memory and the server's disk.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from notebooks import wait_until

TOOLS = Path(sys.prefix) / "shared-store"
"""What `make test-shared-store` has put there: User Mode Linux, and the programs of an NFS server."""
LEASE = 10
"""Seconds after which the server gives up on a client that it does not hear of; Linux takes no less."""
_MEMORY = "512M"
_GUEST = Path(__file__).with_name("in_guest.py")


class Gone(AssertionError):
    """The machine has died."""


class Machine:
    """One of them, which runs Python as it is told to."""

    def __init__(self, name: str, folder: Path, cables: dict[str, socket.socket], *options: str) -> None:
        """Boot it; `cables` are its network, by the addresses that it has there."""
        self.name = name
        told, asked = os.pipe(), os.pipe()
        fds = [cable.fileno() for cable in cables.values()]
        network = [f"vec{number}:transport=fd,fd={fd}" for number, fd in enumerate(fds)]
        addresses = {f"vec{number}": address for number, address in enumerate(cables)}
        init = folder / f"{name}.sh"
        guest = shlex.join([sys.executable, str(_GUEST), json.dumps([str(TOOLS), name, addresses])])
        init.write_text(f"#!/bin/sh\nstty -F /dev/ttyS0 raw -echo\nexec {guest} < /dev/ttyS0 > /dev/ttyS0\n")
        init.chmod(0o755)
        words = [
            *(str(TOOLS / "usr/bin/linux.uml"), f"umid={name}", f"mem={_MEMORY}", "quiet", "ro"),
            *("rootfstype=hostfs", "rootflags=/", f"init={init}"),
            *("con=null", "con0=null,fd:1", f"ssl0=fd:{asked[0]},fd:{told[1]}"),
        ]
        self.log = folder / f"{name}.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [*words, *network, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[asked[0], told[1], *fds],
                env={"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": "/dev/shm"},
                start_new_session=True,
            )
        os.close(asked[0])
        os.close(told[1])
        self._ask, self._told = os.fdopen(asked[1], "w"), os.fdopen(told[0])
        self.answer()

    def does(self, *code: str) -> Any:
        """Execute statements; return the value of the last one, if it is an expression. Names last."""
        self.begins(*code)
        return self.answer()

    def begins(self, *code: str) -> None:
        """Have statements executed; `answer` waits for their end."""
        self._ask.write(json.dumps(code) + "\n")
        self._ask.flush()

    def answer(self) -> Any:
        """Return the value of the last of the statements that were begun first."""
        line = self._told.readline()
        if not line:
            raise Gone(f"{self.name}: {self.log.read_text()[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"{self.name}: {answer['error']}")
        return answer["value"]

    @property
    def runs(self) -> bool:
        """Whether it has not died."""
        return self._process.poll() is None

    def die(self) -> None:
        """End it, as the loss of its power would."""
        if self.runs:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._ask.close()
            self._told.close()
            wait_until(lambda: not _of_session(self._process.pid), what=f"processes of {self.name} are left")


def _of_session(session: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = path.joinpath("stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(int(path.name))
    return found


class Cluster:
    """A server and two clients; one that has died is booted again by who asks for it."""

    def __init__(self, options: str = "vers=4.2") -> None:
        """Boot the server; the clients mount its folder with these options."""
        self._folder = Path(tempfile.mkdtemp(prefix="gpuckpt-shared-"))
        self._options = options
        self.store = "store"
        """Which folder of the shared one is the store of clients that are booted."""
        self._cables = {name: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for name in ("a", "b")}
        for pair in self._cables.values():
            for end in pair:
                end.setblocking(False)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        disk = self._folder / "disk"
        with disk.open("wb") as file:
            file.truncate(2 << 30)
        subprocess.run(["mkfs.ext4", "-q", str(disk)], check=True)
        self._clients: dict[str, Machine] = {}
        ends = {f"10.9.{number}.1": pair[0] for number, pair in enumerate(self._cables.values(), 1)}
        self.server = Machine("server", self._folder, ends, f"ubd0={disk}")
        self.server.does(
            f"serve({LEASE}, ['10.9.1.0/24', '10.9.2.0/24'])", _STORE, "store = Store(Path(SHARED, 'store'), trust)"
        )

    def client(self, name: str) -> Machine:
        """Return a client, which has the folder."""
        found = self._clients.get(name)
        if found is None or not found.runs:
            number = 1 + list(self._cables).index(name)
            found = Machine(name, self._folder, {f"10.9.{number}.2": self._cables[name][1]})
            self._clients[name] = found
            mounting = f"mount('10.9.{number}.1', '10.9.{number}.2', {self._options!r})"
            found.does(
                f"SERVER = '10.9.{number}.1'", mounting, _STORE, f"store = Store(Path(SHARED, {self.store!r}), trust)"
            )
        return found

    @property
    def machines(self) -> list[Machine]:
        """The server, which has the folder as a disk of its own, and the clients."""
        return [self.server, self.client("a"), self.client("b")]

    def close(self) -> None:
        for machine in (*self._clients.values(), self.server):
            machine.die()
        for pair in self._cables.values():
            for end in pair:
                end.close()
        shutil.rmtree(self._folder)


_STORE = """
import errno, threading, time
from pathlib import Path
from notebooks import wait_until
from store_helpers import ABOUT, FILES, fill, litter, read_back, save
from jupyter_gpuckpt.errors import Busy, GpuckptError, NoSuchSnapshot, StoreError
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.trust import Trust
trust = Trust(Path(SHARED, "keys"))
"""
