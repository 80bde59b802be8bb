"""Clients whose requests are under way for long, who are slow to take what a kernel says, or to say something."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jupyter_client import BlockingKernelClient
from notebooks import PATIENCE, Notebook

__all__ = ["late_client", "mute_client", "slow_client"]


@contextlib.contextmanager
def late_client(notebook: Notebook) -> Iterator[tuple[BlockingKernelClient, Callable[[], None]]]:
    """Give another client, and what has its requests be under way until the kernel's side closes its connection."""
    held = threading.Event()
    with _client(notebook, "shell_port", lambda client, kernel: _hold(client, kernel, held)) as client:
        yield client, held.set


@contextlib.contextmanager
def slow_client(notebook: Notebook) -> Iterator[tuple[BlockingKernelClient, threading.Event]]:
    """Give another client, which takes what the kernel publishes while the event is set, and never much at once."""
    takes = threading.Event()
    takes.set()
    with _client(notebook, "iopub_port", lambda client, kernel: _pass(client, kernel, kernel, takes)) as client:
        yield client, takes


@contextlib.contextmanager
def mute_client(
    notebook: Notebook, channel: str = "shell_port"
) -> Iterator[tuple[BlockingKernelClient, threading.Event]]:
    """Give another client, which connects to the kernel at once, and says anything only while the event is set.

    Of one channel alone, the others are as of any client.
    """
    speaks = threading.Event()
    speaks.set()
    with _client(notebook, channel, lambda client, kernel: _pass(client, kernel, client, speaks)) as client:
        yield client, speaks


@contextlib.contextmanager
def _client(
    notebook: Notebook, channel: str, connect: Callable[[socket.socket, socket.socket], None]
) -> Iterator[BlockingKernelClient]:
    """Give a client of which each connection to a channel is one to `connect` to the kernel's."""
    connection = json.loads(Path(notebook.manager.connection_file).read_text())
    with socket.create_server(("127.0.0.1", 0)) as relay:
        threading.Thread(target=_relay, args=(relay, connection[channel], connect), daemon=True).start()
        client = BlockingKernelClient()
        client.load_connection_info(connection | {channel: relay.getsockname()[1]})
        client.start_channels()
        try:
            client.wait_for_ready(PATIENCE)
            yield client
        finally:
            client.stop_channels()
            relay.shutdown(socket.SHUT_RDWR)


def _relay(relay: socket.socket, port: int, connect: Callable[[socket.socket, socket.socket], None]) -> None:
    with contextlib.suppress(OSError):
        while True:
            client = relay.accept()[0]
            try:
                kernel = socket.create_connection(("127.0.0.1", port))
            except ConnectionRefusedError:  # nobody listens for a moment: it comes again
                client.close()
                continue
            threading.Thread(target=connect, args=(client, kernel), daemon=True).start()


def _pass(client: socket.socket, kernel: socket.socket, held: socket.socket, flows: threading.Event) -> None:
    """Pass on what the two say; of the one that is `held` only while the event is set."""
    with contextlib.suppress(OSError), client, kernel:
        while True:
            listened_to = [one for one in (client, kernel) if one is not held or flows.is_set()]
            ready, _, _ = select.select(listened_to, [], [], 0.001)
            for one, other in ((client, kernel), (kernel, client)):
                if one in ready:
                    if not (data := one.recv(1 << 16)):
                        return
                    other.sendall(data)
            time.sleep(0.002)


def _hold(client: socket.socket, kernel: socket.socket, held: threading.Event) -> None:
    """Pass on what the two say; what is `held`, when the kernel's side is closed, and that of the next connection."""
    waiting = b""
    with contextlib.suppress(OSError), client, kernel:
        while True:
            ready, _, _ = select.select([client, kernel], [], [])
            data = {one: one.recv(1 << 16) for one in ready}
            if data.get(kernel) == b"":
                held.clear()
                kernel.sendall(waiting)
                return
            if data.get(client) == b"":
                return
            client.sendall(data.get(kernel, b""))
            waiting += data.get(client, b"")
            if not held.is_set():
                kernel.sendall(waiting)
                waiting = b""
