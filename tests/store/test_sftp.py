"""Remotes of other machines, by SSH: who is connected to, how one logs in, and connections that break."""

from __future__ import annotations

import gc
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import asyncssh
import paramiko
import psutil
import pytest
from notebooks import wait_until
from remote_servers import SECRET, Sftp
from store_helpers import read_back, save
from transfer_helpers import LARGE, Counting, at, person

from jupyter_gpuckpt.errors import RemoteError
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.transfer import push as pushing
from jupyter_gpuckpt.store.transfer.pull import pull
from jupyter_gpuckpt.store.transfer.push import push
from jupyter_gpuckpt.store.transfer.remote_store import RemoteStore
from jupyter_gpuckpt.store.transfer.remotes.sftp_channel import LimitedSftp


@pytest.fixture
def ann(tmp_path: Path) -> Store:
    ann = person(tmp_path, "ann")
    save(ann, "it", files=LARGE)
    return ann


@pytest.fixture
def home(sftp: Sftp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of somebody who knows the server and has a key for it, to be changed."""
    home = tmp_path / "home"
    shutil.copytree(sftp.home, home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return home


def refusal(address: str, ann: Store, folder: Path) -> str:
    """Return the error with which a push is refused, before anything is there."""
    with pytest.raises(RemoteError) as caught:
        push(ann, "it", at(address, ann))
    assert not folder.exists()
    return f"{caught.value} {caught.value.as_dict()}"


def test_a_password_logs_in_and_is_nowhere_shown(ann: Store, sftp: Sftp, home: Path, tmp_path: Path) -> None:
    (home / ".ssh/id_ed25519").unlink()
    folder = tmp_path / "remote"
    wrong = refusal(f"sftp://ann:wr%6Fng@127.0.0.1:{sftp.port}{folder}", ann, folder)
    assert "wrong" not in wrong
    assert "wr%6Fng" not in wrong
    push(ann, "it", at(f"sftp://ann:{quote(SECRET)}@127.0.0.1:{sftp.port}{folder}", ann))
    assert (folder / "snapshots/it.json").exists()
    assert folder.stat().st_mode & 0o77 == 0


@pytest.mark.parametrize("known", ["", "another key"])
def test_a_machine_that_is_not_known_gets_nothing(
    ann: Store, sftp: Sftp, home: Path, tmp_path: Path, known: str
) -> None:
    key = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
    (home / ".ssh/known_hosts").write_text(f"[127.0.0.1]:{sftp.port} {key}" if known else "")
    said = refusal(sftp.address(tmp_path / "remote"), ann, tmp_path / "remote")
    assert "127.0.0.1" in said
    assert ("does not match" if known else "not found in known_hosts") in said


def test_it_is_called_as_the_configuration_of_ssh_calls_it(ann: Store, sftp: Sftp, home: Path, tmp_path: Path) -> None:
    (home / ".ssh/id_ed25519").rename(home / "elsewhere")
    config = f"Host cluster\n  HostName 127.0.0.1\n  Port {sftp.port}\n  User ann\n  IdentityFile {home}/elsewhere\n"
    (home / ".ssh/config").write_text(config)
    push(ann, "it", at(f"ssh://cluster{tmp_path}/remote", ann))
    assert (tmp_path / "remote/snapshots/it.json").exists()


def test_a_way_through_another_machine_is_refused_and_another_one_told(ann: Store, home: Path, tmp_path: Path) -> None:
    (home / ".ssh/config").write_text("Host cluster\n  ProxyJump gate\n")
    said = refusal(f"sftp://cluster{tmp_path}/remote", ann, tmp_path / "remote")
    assert "proxyjump" in said
    assert "ssh cluster" in said


class Line:
    """A way to a server that can be cut: whoever is connected through it loses that, and may connect again."""

    def __init__(self, port: int) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._to, self._ends = port, list[socket.socket]()
        self.left: int | None = None  # of bytes that the server may send before the line is cut
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, there = self._listening.accept()[0], socket.create_connection(("127.0.0.1", self._to))
                self._ends += [here, there]
                for source, to in ((here, there), (there, here)):
                    threading.Thread(target=self._carry, args=(source, to, source is there), daemon=True).start()

    def _carry(self, source: socket.socket, to: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                to.sendall(data)
                if is_answer and self.left is not None:
                    self.left -= len(data)
                    if self.left < 0:
                        self.left = None
                        self.cut()
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        for end in self._ends:
            end.close()


@pytest.fixture
def line(sftp: Sftp, home: Path) -> Iterator[Line]:
    """A way to the server, which is known there as well."""
    line = Line(sftp.port)
    known = home / ".ssh/known_hosts"
    known.write_text(known.read_text().replace(str(sftp.port), str(line.port)))
    yield line
    line.close()


# paramiko reads ahead in a thread of its own, which may end by what ends the connection.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_connection_that_breaks_is_made_again(
    ann: Store, line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "_PACK", 100_000)
    files = {f"pages-{n}.img": os.urandom(150_000) for n in range(6)}  # a pack each
    save(ann, "more", files=files)
    address = f"sftp://ann@127.0.0.1:{line.port}{tmp_path}/remote"

    def breaking(there: RemoteStore) -> list[str]:
        """Have the line be cut before the second request for a pack; return what was asked for when it was."""
        asked: list[str] = []

        def cut(what: str, path: str) -> None:
            if path.startswith("packs/"):
                asked.append(path)
                if len(asked) == 2:
                    line.cut()

        there.remote = Counting(there.remote, cut)
        return asked

    there = at(address, ann)
    asked = breaking(there)
    push(ann, "more", there)
    assert len(asked) >= 2
    bob = person(tmp_path, "bob")
    bob.trust.add(ann.trust.own(), "Ann")
    there = at(address, bob)
    asked = breaking(there)
    pull(bob, there)
    assert len(asked) >= 2
    assert read_back(bob, "more") == files


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_part_of_a_file_is_never_taken_for_the_whole(ann: Store, line: Line, tmp_path: Path) -> None:
    content = os.urandom(400_000)
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote/it").write_bytes(content)
    remote = at(f"sftp://ann@127.0.0.1:{line.port}{tmp_path}/remote", ann).remote
    for left in range(0, 400_000, 100_000):
        assert remote.read("it", 0, 500_000) == content
        line.left = left
        assert remote.read("it", 0, 500_000) == content
        assert line.left is None


def test_a_request_that_cannot_be_sent_is_not_the_end_of_the_file(sftp: Sftp, home: Path, tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(bytes(100_000))
    with paramiko.SSHClient() as client:
        client.load_system_host_keys(str(home / ".ssh/known_hosts"))
        client.connect("127.0.0.1", sftp.port, "ann", key_filename=str(home / ".ssh/id_ed25519"))
        transport = client.get_transport()
        assert transport is not None
        channel = LimitedSftp.from_transport(transport)
        file = channel.open(str(tmp_path / "it"), "rb")
        assert file.read(10) == bytes(10)
        listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        (server,) = (psutil.Process(one.pid) for one in listening if one.laddr[1:] == (sftp.port,))
        server.suspend()  # it would close the channel, which is another error
        try:
            channel.sock.shutdown_write()
            with pytest.raises(ConnectionError):
                file.read(50_000)
        finally:
            server.resume()


def test_who_is_done_leaves_no_connection_open(ann: Store, sftp: Sftp, home: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    push(ann, "it", at(sftp.address(tmp_path / "remote"), ann))
    gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_a_folder_in_the_home_folder_there(ann: Store, sftp: Sftp, home: Path, tmp_path: Path) -> None:
    push(ann, "it", at(f"sftp://ann@127.0.0.1:{sftp.port}/~/{tmp_path.name}/remote", ann))
    assert (sftp.home.parent / tmp_path.name / "remote/snapshots/it.json").exists()
