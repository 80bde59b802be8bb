"""Sockets of the user's own, across a restore."""

from __future__ import annotations

import socket
from pathlib import Path

from notebooks import Notebook, StartKernel


def test_a_unix_socket_is_there_again_though_its_folder_was_deleted(notebook: Notebook) -> None:
    notebook.run(
        """
import os, shutil, socket, tempfile, threading
folder = tempfile.mkdtemp(); listener = socket.socket(socket.AF_UNIX); listener.bind(f"{folder}/s"); listener.listen()
"""
    )
    notebook.run("%gpuckpt save here")
    notebook.run("listener.close(); shutil.rmtree(folder)")
    notebook.run("%gpuckpt restore here")
    notebook.run(
        """
client = socket.socket(socket.AF_UNIX); client.connect(f"{folder}/s"); client.sendall(b"hello")
got = listener.accept()[0].recv(5); mode = oct(os.stat(folder).st_mode & 0o777); shutil.rmtree(folder)
"""
    )
    assert notebook.value("got, mode") == "b'hello' 0o700"


def test_a_path_that_another_program_listens_at_is_taken_over_and_named(start: StartKernel, tmp_path: Path) -> None:
    first, second = start(), start()
    path, own = tmp_path / "server", "/dev/shm/each-kernel-has-its-own"
    first.run(f"""
        import socket
        listeners = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for listener, path in zip(listeners, ({str(path)!r}, {own!r})):
            listener.bind(path); listener.listen()
    """)
    first.run("%gpuckpt save here")
    # Its own socket ends with it, so nobody loses anything.
    assert str(path) not in first.run("%gpuckpt restore here").text
    restored = second.run("%gpuckpt restore here").text
    assert f"Another program had a Unix socket at {path}; new connections now come to the restored kernel." in restored
    assert own not in restored
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"hello")
        assert second.value("listeners[0].accept()[0].recv(5)") == "b'hello'"


def test_a_port_that_was_taken_meanwhile_becomes_a_free_one(notebook: Notebook) -> None:
    notebook.run(
        "import socket; listener = socket.socket(); listener.bind(('127.0.0.1', 0)); listener.listen()\n"
        "port = listener.getsockname()[1]"
    )
    port = int(notebook.value("port"))
    notebook.run("%gpuckpt save here")
    notebook.run("listener.close()")
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        notebook.run("%gpuckpt restore here")
        there = int(notebook.value("listener.getsockname()[1]"))
        assert there != port
        with socket.create_connection(("127.0.0.1", there), timeout=60) as client:
            client.sendall(b"hello")
            assert notebook.value("listener.accept()[0].recv(5)") == "b'hello'"


def test_a_connection_that_nobody_accepted_yet_is_not_saved(notebook: Notebook, tmp_path: Path) -> None:
    """criu would dump it and could never restore it."""
    with socket.socket(socket.AF_UNIX) as outside:
        outside.bind(str(tmp_path / "s"))
        outside.listen()
        notebook.run(f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(tmp_path / 's')!r}); x = 1")
        answer = notebook.fails("%gpuckpt save here")
        assert answer.ename == "SaveFailed"
        assert "accept" in answer.text
        assert notebook.value("x") == "1"
    notebook.run("s.close()")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"
