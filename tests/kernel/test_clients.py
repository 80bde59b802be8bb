"""A restored kernel waits for its clients to hear it, and so has to know which of them do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from jupyter_gpuckpt.kernel import cells

_INTRODUCTION = bytes(200)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def _connect(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    return socket.create_connection(listener.getsockname()), listener.accept()[0]


def _introduce(client: socket.socket, one: socket.socket) -> None:
    client.sendall(_INTRODUCTION)
    assert one.recv(len(_INTRODUCTION), socket.MSG_WAITALL)


def test_a_client_counts_once_while_another_thread_looks_too(listener: socket.socket) -> None:
    """Each look holds file descriptors of its own for every connection."""
    port = listener.getsockname()[1]
    client, one = _connect(listener)
    with client, one:
        assert cells.introduced(encrypted=False)[port] == 0
        _introduce(client, one)
        with one.dup():
            assert cells.introduced(encrypted=False)[port] == 1


def test_clients_that_take_long_to_connect_are_waited_for_longer_than_those_that_say_nothing(
    listener: socket.socket,
) -> None:
    port = listener.getsockname()[1]
    client, one = _connect(listener)
    with client, one:
        began = time.monotonic()
        assert not cells.wait_for_peers({port: 1}, encrypted=False, connecting=60)
        assert time.monotonic() - began < 60
        later: list[socket.socket] = []

        def connect() -> None:
            time.sleep(cells._INTRODUCING + 1)
            later.extend(_connect(listener))
            _introduce(*later)

        _introduce(client, one)
        thread = threading.Thread(target=connect)
        thread.start()
        assert cells.wait_for_peers({port: 2}, encrypted=False, connecting=60)
        thread.join()
        for end in later:
            end.close()
