"""The programs that tests run as jobs, and how the tests talk to them."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import Ran, run
from notebooks import wait_until

from jupyter_gpuckpt.client.record import KernelFolder

COUNTER = """
import socket, sys
kind, port, reuse = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
s.bind(("127.0.0.1", port))
n = 100
if kind == "tcp":
    s.listen()
print("ready", flush=True)
while True:
    if kind == "udp":
        _, asker = s.recvfrom(100)
    else:
        connection, _ = s.accept()
    n += 1
    print(n, flush=True)
    if kind == "udp":
        s.sendto(str(n).encode(), asker)
    else:
        connection.sendall(str(n).encode())
        connection.close()
"""

TRAIN = """
import os, sys, time
import numpy
gate = sys.argv[1]
rng = numpy.random.default_rng(7)
weights = rng.standard_normal((32, 8))
moment = numpy.zeros_like(weights)
for step in range(60):
    x = rng.standard_normal((64, 32))
    error = x @ weights - x[:, :8]
    gradient = x.T @ error / len(x)
    moment = 0.9 * moment + gradient
    weights -= 0.01 * moment
    print(step, float((error ** 2).mean()).hex(), flush=True)
    while step == 29 and not os.path.exists(gate):
        time.sleep(0.01)
print(weights.tobytes().hex(), flush=True)
"""


@dataclass
class Job:
    """A job of a test, by its name."""

    name: str

    def start(self, *command: str, **environment: str) -> None:
        """Start it; that it cannot be is a failure."""
        started = run("exec", self.name, "--", *command, **environment)
        assert (started.status, started.err) == (0, "")

    def told(self) -> dict[str, Any]:
        """Return what `ps` says of it."""
        listed = run("ps", "--json").json
        assert listed["faults"] == []
        found: dict[str, Any] = next(job for job in listed["jobs"] if job["job"] == self.name)
        return found

    def output(self) -> str:
        return run("logs", self.name).out

    def lines(self) -> list[str]:
        return self.output().splitlines()

    def wait_for(self, lines: int) -> None:
        """Wait until it has written so many lines."""
        # Looked for in its files: the command takes its time to start, each time.
        wait_until(lambda: self._written() >= lines, what=f"{self.name} did not write {lines} lines")

    def _written(self) -> int:
        paths = [*folder_of(self.name).glob("run-*/kernel.log"), folder_of(self.name) / "output"]
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            return max((path.read_bytes().count(b"\n") for path in paths if path.exists()), default=0)
        return 0

    def wait_for_end(self) -> int | None:
        """Wait until it has ended, and return its exit status."""
        folder = KernelFolder(folder_of(self.name))
        wait_until(lambda: folder.has_ended() or not folder.has_keeper(), what=f"{self.name} did not end")
        wait_until(lambda: self.told()["state"] == "ended", what=f"{self.name} is not told to have ended")
        status: int | None = self.told()["exit_status"]
        return status

    def save(self, *words: str) -> None:
        assert run("save", self.name, *words).status == 0

    def restore(self, *words: str) -> Ran:
        restored = run("restore", self.name, *words)
        assert restored.status == 0, restored.err
        return restored

    def kill(self) -> None:
        assert run("stop", self.name, "--force").status == 0


def program(folder: Path, source: str) -> str:
    """Write a program, and return its path."""
    path = folder / f"program-{len(list(folder.glob('program-*')))}.py"
    path.write_text(source)
    return str(path)


def free_port(kind: str) -> int:
    """Return a port that is free, and that the system gives to nobody who does not ask for it by its number."""
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    while True:
        port = random.randrange(max(1024, first // 2), first)
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM) as s,
        ):
            s.bind(("127.0.0.1", port))
            return port


def start_counter(folder: Path, name: str, kind: str, *, reuse: bool = True) -> tuple[Job, int]:
    """Start a counter that answers at a free port; return it and the port. SO_REUSEADDR is set as `reuse` says."""
    job, port = Job(name), free_port(kind)
    job.start(sys.executable, program(folder, COUNTER), kind, str(port), str(int(reuse)))
    job.wait_for(1)
    return job, port


def ask(kind: str, port: int) -> str:
    """Ask a counter at a port, and return its answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM) as s:
        s.settimeout(60)
        s.connect(("127.0.0.1", port))
        if kind == "udp":
            s.send(b"?")
        return s.recv(100).decode()


def folder_of(name: str) -> Path:
    return Path(os.environ["JUPYTER_RUNTIME_DIR"], "gpuckpt", f"job-{name}")
