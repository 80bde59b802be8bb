"""A restored kernel waits for its clients to hear it, and so has to know which of them do."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import zmq
from notebooks import wait_until

from jupyter_gpuckpt.kernel import clients

_INTRODUCTION = bytes(200)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


class _Client:
    """A client in another process, and what this one has of its connection."""

    def __init__(self, listener: socket.socket) -> None:
        with socket.create_connection(listener.getsockname()) as connection:
            self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=connection)
        self.here = listener.accept()[0]

    def introduce(self, said: bytes = _INTRODUCTION) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(said)
        self._process.stdin.flush()
        assert self.here.recv(len(said), socket.MSG_WAITALL) == said

    def close(self) -> None:
        self._process.communicate()
        self.here.close()


def test_a_client_counts_once_while_another_thread_looks_too(listener: socket.socket) -> None:
    """Each look holds file descriptors of its own for every connection."""
    port = listener.getsockname()[1]
    with contextlib.closing(_Client(listener)) as client:
        assert clients.introduced(encrypted=False)[port] == 0
        client.introduce()
        with client.here.dup():
            assert clients.introduced(encrypted=False)[port] == 1


def test_the_kernel_is_no_client_of_itself(listener: socket.socket) -> None:
    """A restored one would wait for itself, or take itself for a client that is not there yet."""
    port = listener.getsockname()[1]
    with socket.create_connection(listener.getsockname()) as own, listener.accept()[0] as here:
        own.sendall(_INTRODUCTION)
        assert here.recv(len(_INTRODUCTION), socket.MSG_WAITALL) == _INTRODUCTION
        assert clients.introduced(encrypted=False)[port] == 0
        with contextlib.closing(_Client(listener)) as client:
            client.introduce()
            assert clients.introduced(encrypted=False)[port] == 1


def test_nor_is_it_one_while_it_connects_to_itself(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """One end of the connection has a number that a look has listed already, the other a new one."""
    listed, made = os.listdir, list[socket.socket]()
    place = os.open("/dev/null", os.O_RDONLY)

    def list_then_connect(folder: str) -> list[str]:
        names = listed(folder)
        if not made:
            with open(os.devnull), socket.socket() as one:  # two numbers, one of them that of the folder itself
                made.append(one.dup())
            made[0].connect(listener.getsockname())
            with listener.accept()[0] as here:
                made.append(socket.socket(fileno=os.dup2(here.fileno(), place)))
            made[0].sendall(_INTRODUCTION)
            assert made[1].recv(len(_INTRODUCTION), socket.MSG_WAITALL) == _INTRODUCTION
            assert [str(end.fileno()) in names for end in made] == [False, True]
        return names

    monkeypatch.setattr(os, "listdir", list_then_connect)
    try:
        assert clients.introduced(encrypted=False)[listener.getsockname()[1]] == 0
        assert len(made) == 2
    finally:
        for one in made:
            one.close()


def test_clients_that_take_long_to_greet_are_waited_for_longer_than_those_that_want_nothing(
    listener: socket.socket,
) -> None:
    port = listener.getsockname()[1]
    with contextlib.closing(_Client(listener)) as client, contextlib.closing(_Client(listener)) as later:
        client.introduce(bytes(clients._GREETED))
        began = time.monotonic()
        assert not clients.wait_for_peers({port: 1}, encrypted=False, connecting=60)
        assert time.monotonic() - began < 60

        def greet() -> None:
            time.sleep(clients._SUBSCRIBING + 1)
            later.introduce()

        client.introduce()
        thread = threading.Thread(target=greet)
        thread.start()
        assert clients.wait_for_peers({port: 2}, encrypted=False, connecting=60)
        thread.join()


def test_zmq_reaches_a_client_when_its_threads_have_acted() -> None:
    """What a client said has been read before; but to which client zmq sends nothing yet, that is lost to it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.router_mandatory = True  # it tells
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def has_said_all(count: int) -> bool:
            heard = clients._heard_by_connection().items()
            return [here[1] for (here, _), size in heard if size >= clients._INTRODUCED].count(port) == count

        with contextlib.ExitStack() as connected:
            for number in range(50):
                client = connected.enter_context(context.socket(zmq.DEALER))
                client.routing_id = name = f"client {number}".encode()
                client.connect(f"tcp://127.0.0.1:{port}")
                wait_until(partial(has_said_all, number + 1), every=0)
                clients.until_zmq_has_acted()
                router.send_multipart([name, b""])


def test_what_a_slow_client_has_not_taken_is_waited_for() -> None:
    much = bytes(30_000_000)
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, socket.socket() as client:
        push.linger = 0
        port = push.bind_to_random_port("tcp://127.0.0.1")
        client.connect(("127.0.0.1", port))
        client.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))  # ZMTP 3.0, and a READY command
        client.sendall(b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PULL")
        push.send(much)
        clients.until_all_is_sent([port + 1], 60)  # others are not waited for
        began = time.monotonic()
        clients.until_all_is_sent([port], 0.2)
        assert 0.2 <= time.monotonic() - began < 30
        left = [len(much)]

        def take() -> None:
            while left[0] > 0:
                left[0] -= len(client.recv(1 << 20))

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        clients.until_all_is_sent([port], 60)
        thread.join(1)
        assert not thread.is_alive(), "the client has not got all of it"


def test_it_is_seen_whether_zmqs_threads_wait() -> None:
    computed = threading.Event()

    def compute() -> None:
        Path("/proc/thread-self/comm").write_text(f"{clients._THREADS}9")
        while not computed.is_set():
            pass

    with zmq.Context() as context, context.socket(zmq.ROUTER):
        wait_until(clients._zmq_waits)
        thread = threading.Thread(target=compute)
        thread.start()
        try:
            wait_until(lambda: clients._zmq_waits() is False)
        finally:
            computed.set()
            thread.join()
        wait_until(clients._zmq_waits)


def test_where_none_of_its_threads_are_seen_zmq_has_a_moment() -> None:
    program = """
import time
from jupyter_gpuckpt.kernel import clients
assert clients._zmq_waits() is None
began = time.monotonic()
clients.until_zmq_has_acted()
assert time.monotonic() - began >= clients._ACTING_UNSEEN
"""
    subprocess.run([sys.executable, "-c", program], check=True)
