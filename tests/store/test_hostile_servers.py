"""Servers that send more than was asked for, next to nothing, or on to somewhere else are not listened to for long."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import paramiko
import pytest
from transfer_helpers import at, person

from jupyter_gpuckpt.errors import NoSuchSnapshot, RemoteError
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.transfer.pull import pull
from jupyter_gpuckpt.store.transfer.remote_listing import listed
from jupyter_gpuckpt.store.transfer.remotes import attempts

Answer = Callable[[BaseHTTPRequestHandler], None]
MARK = b'{"features":[],"format":2}\n'


@pytest.fixture
def ann(tmp_path: Path) -> Store:
    return person(tmp_path, "ann")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait as little as a test has time for."""
    monkeypatch.setattr(attempts, "PATIENCE", 2.0)
    monkeypatch.setattr(attempts, "_SLOWEST", 10**9)
    monkeypatch.setattr(attempts, "_PAUSES", ())


class Web:
    """Web servers that answer as a test wants."""

    def __init__(self) -> None:
        self.servers: list[tuple[ThreadingHTTPServer, threading.Thread]] = []
        self.ended = threading.Event()
        self.asked: list[str] = []
        self.sent = 0

    def start(self, answer: Answer) -> str:
        """Start one, and return its address."""
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked.append(self.path)
                with contextlib.suppress(OSError):
                    answer(self)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self.servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    def trickles(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "50000")
        handler.end_headers()
        while not self.ended.wait(0.1):
            handler.wfile.write(b" ")
            handler.wfile.flush()

    def never_ends(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not self.ended.is_set() and self.sent < 2**30:
            handler.wfile.write(bytes(2**20))
            self.sent += 2**20

    def is_silent(self, _: BaseHTTPRequestHandler) -> None:
        self.ended.wait(60)


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web()
    yield web
    web.ended.set()
    for server, thread in web.servers:
        server.shutdown()
        thread.join()
        server.server_close()


def leads_to(address: str, code: int = 302) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        handler.send_header("Location", address)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_web_server_cannot_have_others_asked(ann: Store, web: Web, code: int) -> None:
    inner: list[str] = []
    hidden = web.start(lambda handler: inner.append(handler.path))
    with pytest.raises(RemoteError, match=f"redirects to {hidden}, another address"):
        pull(ann, at(web.start(leads_to(f"{hidden}/latest/meta-data?secret", code)), ann, create=False), "it")
    assert inner == []


@pytest.mark.parametrize("there", ["file:///etc/passwd", "//evil.invalid/x", "http://[", "gopher://127.0.0.1:1/", "x:"])
def test_odd_places_to_lead_to_are_not_gone_to(ann: Store, web: Web, there: str) -> None:
    with pytest.raises(RemoteError):
        pull(ann, at(web.start(leads_to(there)), ann, create=False), "it")


def test_a_web_server_may_lead_to_another_address_of_its_own_but_not_in_a_circle(ann: Store, web: Web) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        if not handler.path.startswith("/moved"):
            leads_to(f"/moved{handler.path}")(handler)
        elif handler.path.endswith("format.json"):
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(MARK)
        else:
            handler.send_error(404)

    with pytest.raises(NoSuchSnapshot, match="no snapshot named it"):
        pull(ann, at(web.start(answer), ann, create=False), "it")
    with pytest.raises(RemoteError, match="redirects more than"):
        pull(ann, at(web.start(leads_to("/round")), ann, create=False), "it")


def test_what_is_compressed_is_not_unpacked(ann: Store, web: Web) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.end_headers()

    with pytest.raises(RemoteError, match="compressed data"):
        pull(ann, at(web.start(answer), ann, create=False), "it")


@pytest.fixture(params=["http", "s3"])
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return how one comes to what a web server has: as it is, or as one that speaks S3."""
    if request.param == "http":
        return lambda url: url

    def bucket(url: str) -> str:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(variable, "of-the-test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        return "s3://bucket/folder"

    return bucket


@pytest.mark.parametrize("way", ["trickles", "is_silent"])
def test_a_server_that_sends_next_to_nothing_is_given_up(
    ann: Store, web: Web, address: Callable[[str], str], way: str, impatient: None
) -> None:
    with pytest.raises(RemoteError, match=r"TooSlowError|Timeout"):
        pull(ann, at(address(web.start(getattr(web, way))), ann, create=False), "it")


def test_of_an_answer_without_end_no_more_is_taken_than_was_asked_for(
    ann: Store, web: Web, address: Callable[[str], str]
) -> None:
    with pytest.raises(RemoteError, match="has more than"):
        pull(ann, at(address(web.start(web.never_ends)), ann, create=False), "it")
    assert web.sent < 100 * 2**20


# -- SFTP


class Sftp(paramiko.ServerInterface):
    """Lets everybody in, and speaks as much of SFTP as somebody does who wants to be waited for."""

    way = ""
    ended = threading.Event()

    def get_allowed_auths(self, username: str) -> str:
        return "password"

    def check_auth_password(self, username: str, password: str) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_subsystem_request(self, channel: paramiko.Channel, name: str) -> bool:
        if self.way == "opens nothing":
            self.ended.wait(60)
            return False
        threading.Thread(target=self.serve, args=[channel], daemon=True).start()
        return True

    def serve(self, channel: paramiko.Channel) -> None:
        with contextlib.suppress(Exception):
            while len(head := exactly(channel, 4)) == 4:
                self.answer(channel, exactly(channel, struct.unpack(">I", head)[0]))

    def answer(self, channel: paramiko.Channel, asked: bytes) -> None:
        kind, number = asked[0], asked[1:5]
        if kind == 1:  # INIT
            channel.sendall(packet(2, struct.pack(">I", 3)))
        elif kind in (3, 11):  # OPEN, OPENDIR
            channel.sendall(packet(102, number + text(b"h")))
        elif kind in (8, 17):  # FSTAT, STAT
            channel.sendall(packet(105, number + struct.pack(">IQ", 1, len(MARK))))
        elif kind == 5 and self.way == "trickles":  # READ
            channel.sendall(struct.pack(">I", 50_000) + bytes([103]) + number)
            while not self.ended.wait(0.1):
                channel.sendall(b" ")
        elif kind == 5:
            channel.sendall(packet(103, number + text(MARK)))
        elif kind == 12:  # READDIR
            name = text(b"x" * 1000) * 2 + struct.pack(">I", 0)
            channel.sendall(packet(104, number + struct.pack(">I", 200) + name * 200))
        else:
            channel.sendall(packet(101, number + struct.pack(">I", 0) + text(b"") * 2))


def text(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


def packet(kind: int, content: bytes) -> bytes:
    return struct.pack(">IB", len(content) + 1, kind) + content


def exactly(channel: paramiko.Channel, size: int) -> bytes:
    found = b""
    while len(found) < size and (more := channel.recv(size - len(found))):
        found += more
    return found


@pytest.fixture
def hostile_sftp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    key = paramiko.RSAKey.generate(2048)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    known = f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}\n"
    (tmp_path / "home" / ".ssh" / "known_hosts").write_text(known)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    transports: list[paramiko.Transport] = []
    Sftp.ended = threading.Event()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                transport = paramiko.Transport(connection)
                transport.add_server_key(key)
                transports.append(transport)
                with contextlib.suppress(paramiko.SSHException, EOFError):
                    transport.start_server(server=Sftp())

    accepting = threading.Thread(target=accept)
    accepting.start()

    def address(way: str) -> str:
        monkeypatch.setattr(Sftp, "way", way)
        return f"sftp://ann:password@127.0.0.1:{port}/folder"

    yield address
    Sftp.ended.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    accepting.join()
    for transport in transports:
        transport.close()


@pytest.mark.parametrize("way", ["opens nothing", "trickles"])
def test_a_machine_that_sends_next_to_nothing_is_given_up(
    ann: Store, hostile_sftp: Callable[[str], str], way: str, impatient: None
) -> None:
    with pytest.raises(RemoteError):
        at(hostile_sftp(way), ann, create=False)


def test_a_list_of_files_without_end_is_not_listened_to(
    ann: Store, hostile_sftp: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jupyter_gpuckpt.store.transfer.remotes.sftp._LISTING", 2**20)
    there = at(hostile_sftp("lists without end"), ann, create=False)
    with pytest.raises(RemoteError, match="it sent more than was requested"):
        listed(there, ann.trust)
