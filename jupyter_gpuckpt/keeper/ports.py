"""Which ports and socket names a restored kernel gets."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..freeze import processes

CHANNELS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")


def of_connection_file(path: str) -> dict[str, int]:
    """Return the ports of the five channels, as a connection file names them."""
    content: dict[str, Any] = json.loads(Path(path).read_text())
    return {channel: int(content[channel]) for channel in CHANNELS}


def peers(connection_file: str) -> dict[str, int]:
    """Return how many clients are connected to the channels on which a cell is answered, and asks."""
    ports = of_connection_file(connection_file)
    return {channel: processes.connections({ports[channel]}) for channel in ("shell_port", "iopub_port", "stdin_port")}


class Choice:
    """Gives every saved port the one it gets here: a channel's own, the same, or a free one if that is taken."""

    def __init__(self, saved: Mapping[str, int], connection_file: str) -> None:
        here = of_connection_file(connection_file)
        self._table = {saved[channel]: here[channel] for channel in CHANNELS}
        self._taken = set(here.values())

    def __call__(self, port: int) -> int:
        if port not in self._table:
            chosen = port if port not in self._taken and _is_free(port) else self._free()
            self._taken.add(chosen)
            self._table[port] = chosen
        return self._table[port]

    def _free(self) -> int:
        while True:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = int(s.getsockname()[1])
            if port not in self._taken:
                return port


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError:
            return False
    return True


def free_abstract_name(name: bytes) -> bytes:
    """Return the abstract socket name itself, or a fresh one if somebody has it (proc(5), net/unix)."""
    shown = "@" + os.fsdecode(name.rstrip(b"\0").replace(b"\0", b"@"))
    if any(other.rstrip("@") == shown.rstrip("@") for _, other in processes.unix_sockets()):
        return b"gpuckpt-" + secrets.token_hex(8).encode()
    return name
