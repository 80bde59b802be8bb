"""Servers that snapshots are sent to and fetched from in tests: each a process of its own, on this machine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from notebooks import wait_until

KEY, SECRET = "key-of-the-tests", "secret-of-the-tests"


@dataclass
class S3:
    """A server that speaks S3, by moto."""

    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs to know to use it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def make_bucket(self, name: str) -> str:
        """Make a bucket, and return its address."""
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT", data=b"")
        with urllib.request.urlopen(request, timeout=60):
            return f"s3://{name}"


@contextlib.contextmanager
def s3_server(log: Path) -> Iterator[S3]:
    """Run a server of S3 that keeps everything in its memory."""
    with _running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], log) as port:
        yield S3(f"http://127.0.0.1:{port}")


@dataclass
class Sftp:
    """A server that speaks SSH and SFTP, by asyncssh, and the folder of somebody who knows it and has a key for it."""

    port: int
    home: Path

    def address(self, folder: Path) -> str:
        """Return the address of a folder, for who has the key."""
        return f"sftp://ann@127.0.0.1:{self.port}{folder}"


@contextlib.contextmanager
def sftp_server(folder: Path) -> Iterator[Sftp]:
    """Run a server of SFTP for all files of this machine; its keys and log lie in `folder`."""
    words = [sys.executable, str(Path(__file__).with_name("sftp_server.py")), str(folder)]
    with _running(words, folder / "log") as port:
        yield Sftp(port, folder / "home")


@contextlib.contextmanager
def web_server(folder: Path, log: Path) -> Iterator[str]:
    """Run Python's own web server, which knows no ranges, on a folder; give its address."""
    words = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(folder), "0"]
    with _running(words, log) as port:
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def _running(words: list[str], log: Path) -> Iterator[int]:
    """Run a server that takes a free port; give that, once it listens there."""
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def port() -> int | None:
        assert process.poll() is None, log.read_text()
        taken = psutil.Process(process.pid).net_connections("tcp")
        return next((one.laddr.port for one in taken if one.status == psutil.CONN_LISTEN), None)

    try:
        yield wait_until(port)
    finally:
        process.kill()
        process.wait()
