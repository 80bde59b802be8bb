"""A client whose requests are under way for long."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from jupyter_client import BlockingKernelClient
from notebooks import PATIENCE, Notebook

__all__ = ["late_client"]


@contextlib.contextmanager
def late_client(notebook: Notebook) -> Iterator[tuple[BlockingKernelClient, Callable[[], None]]]:
    """Give another client, and what has its requests be under way until the kernel's side closes its connection."""
    connection = json.loads(Path(notebook.manager.connection_file).read_text())
    port, held = connection["shell_port"], threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as relay:
        threading.Thread(target=_relay, args=(relay, port, held), daemon=True).start()
        client = BlockingKernelClient()
        client.load_connection_info(connection | {"shell_port": relay.getsockname()[1]})
        client.start_channels()
        try:
            client.wait_for_ready(PATIENCE)
            yield client, held.set
        finally:
            client.stop_channels()
            relay.shutdown(socket.SHUT_RDWR)


def _relay(relay: socket.socket, port: int, held: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, kernel = relay.accept()[0], socket.create_connection(("127.0.0.1", port))
            threading.Thread(target=_connect, args=(client, kernel, held), daemon=True).start()


def _connect(client: socket.socket, kernel: socket.socket, held: threading.Event) -> None:
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
