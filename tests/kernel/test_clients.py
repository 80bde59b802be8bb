"""A restored kernel waits for its clients to hear it, and so has to know which of them do."""

from __future__ import annotations

import socket

from jupyter_gpuckpt.kernel import cells

_GREETING_AND_MORE = bytes(200)


def test_a_client_counts_once_while_another_thread_looks_too() -> None:
    """Each look holds file descriptors of its own for every connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, listener.accept()[0] as one:
            client.sendall(_GREETING_AND_MORE[:90])
            assert one.recv(90, socket.MSG_WAITALL)
            assert cells.introduced(encrypted=False)[port] == 0
            client.sendall(_GREETING_AND_MORE[90:])
            assert one.recv(110, socket.MSG_WAITALL)
            with one.dup():
                assert cells.introduced(encrypted=False)[port] == 1
                assert not cells.wait_for_peers({port: 2}, encrypted=False)
                with socket.create_connection(("127.0.0.1", port)) as another, listener.accept()[0] as two:
                    another.sendall(_GREETING_AND_MORE)
                    assert two.recv(200, socket.MSG_WAITALL)
                    assert cells.wait_for_peers({port: 2}, encrypted=False)
