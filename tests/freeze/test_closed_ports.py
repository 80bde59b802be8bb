"""Ports that are closed for a while: who connects waits, and comes to whoever listens then."""

from __future__ import annotations

import os
import select
import socket
from concurrent.futures import ThreadPoolExecutor

from jupyter_gpuckpt.linux.foreign_sockets import ClosedPorts


def test_nobody_comes_in_until_they_are_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        closed = ClosedPorts(os.getpid(), {one.getsockname()[1]})
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(socket.create_connection, one.getsockname(), 60)
            with socket.create_connection(other.getsockname(), 60):
                assert select.select([other], [], [], 60)[0]
            assert not select.select([one], [], [], 0.2)[0]
            closed.open()
            with connecting.result(60):
                assert select.select([one], [], [], 60)[0]


def test_they_stay_closed_until_their_listener_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        address = before.getsockname()
        ClosedPorts(os.getpid(), {address[1]}).close()
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(socket.create_connection, address, 60)
            assert not select.select([before], [], [], 0.2)[0]
            before.close()
            with socket.create_server(address), connecting.result(60):
                pass
