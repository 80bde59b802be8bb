"""The keeper's socket: who may connect, how much one may ask at once, and what is answered."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

from ..checked import to_json
from ..client.protocol import REQUEST_LIMIT
from ..client.record import SOCKET
from ..linux import proof
from ..linux.unix_sockets import peer_pid, peer_uid, short_path
from ..operations.requests import Attach, Close, request_of
from ..operations.results import Closing, Progress
from .answers import answer_to, without_magic
from .holders import send
from .operations.progress import ProgressCallback
from .operations.shut_down import shut_down
from .requests import Requests

__all__ = ["MOST_CLIENTS", "SocketServer"]

log = logging.getLogger("gpuckpt.keeper")

MOST_CLIENTS = 64
"""So many connections are served at once; more are hung up on."""
MOST_REQUESTS = 16
"""So many requests of one connection are worked on at once; what it sends beyond is not read before one is answered."""
_TO_PROVE = 30.0  # how long a client may take to say what only those know who may look into this process, in seconds


class SocketServer:
    """Serves the clients of one keeper: the provisioner, the server extension and the command line."""

    def __init__(self, requests: Requests) -> None:
        self._requests, self._keeper = requests, requests.keeper
        self._connections = 0
        self._secret = proof.read(proof.make())

    async def open(self) -> asyncio.AbstractServer:
        """Open the socket (0600) and listen.

        Raises
        ------
        OSError : it could not be opened.
        """
        path = self._keeper.folder.path / SOCKET
        listener = socket.socket(socket.AF_UNIX)
        path.unlink(missing_ok=True)
        with short_path(path) as short:
            listener.bind(short)
        path.chmod(0o600)
        return await asyncio.start_unix_server(self._serve, sock=listener, limit=REQUEST_LIMIT)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = peer_uid(writer.get_extra_info("socket"))
        if peer not in (0, os.getuid()):
            log.warning("refused a connection of user %d", peer)
            writer.close()
            return
        if self._connections >= MOST_CLIENTS:
            log.warning("a client was disconnected: %d others are connected", self._connections)
            writer.close()
            return
        self._connections += 1
        slots = asyncio.Semaphore(MOST_REQUESTS)
        try:
            if not await self._is_proven(reader):
                return
            while line := await reader.readline():
                request = json.loads(line)
                if not isinstance(request, dict):
                    raise ValueError("a request is a JSON object")
                await slots.acquire()
                task = self._keeper.in_background(self._answer(request, writer))
                task.add_done_callback(lambda _: slots.release())
        except (ValueError, RecursionError, ConnectionError) as e:
            log.warning("a client was disconnected: %s", e)
        except asyncio.CancelledError:
            pass  # the keeper ends; asyncio of Python 3.11 would log that as an error
        finally:
            self._connections -= 1
            self._keeper.holders.discard(writer)
            writer.close()
            if self._keeper.exit_status is not None and not self._keeper.holders.want_to_know:
                self._keeper.closing.set()

    async def _is_proven(self, reader: asyncio.StreamReader) -> bool:
        try:
            line = await asyncio.wait_for(reader.readline(), _TO_PROVE)
        except (TimeoutError, asyncio.TimeoutError):
            line = b"nothing"
        if line and not proof.is_right(line, self._secret):
            log.warning("a client was disconnected: it could not prove that it may inspect this process")
            return False
        return bool(line)  # who only looks whether somebody listens says nothing

    async def _answer(self, request: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        number, op, args = request.get("id"), str(request.get("op")), request.get("args") or {}

        async def on_progress(progress: Progress) -> None:
            await send(writer, {"id": number, "progress": to_json(progress)})

        async def done(on_progress: ProgressCallback) -> Any:
            request = None if op not in ("attach", "close") else request_of(op, args)
            if isinstance(request, Attach):
                return await self._attach(writer, request.end_after)
            if isinstance(request, Close):
                return await self._close()
            return await self._requests.do(op, args, on_progress)

        answer = await answer_to(op, done, on_progress, on_progress, self._keeper.folder.path)
        launch = self._keeper.launch
        if not launch.agent:
            answer = without_magic(answer, launch.job or launch.kernel_id[:8])
        await send(writer, {"id": number, **answer.as_members()})

    async def _attach(self, writer: asyncio.StreamWriter, end_after: float | None) -> None:
        """Have a client hold the kernel: it is told when that ends.

        The kernel ends `end_after` seconds after the client's process has, or outlives it with None.
        """
        pid = peer_pid(writer.get_extra_info("socket"))
        self._keeper.ends_with(pid, end_after)
        self._keeper.holders.add(writer)
        if self._keeper.exit_status is not None:
            await send(writer, {"event": "exited", "status": self._keeper.exit_status})

    async def _close(self) -> Closing:
        """End the kernel and its keeper."""
        await shut_down(self._keeper)
        self._keeper.closing.set()
        return Closing(writing=self._keeper.operations.writes)
