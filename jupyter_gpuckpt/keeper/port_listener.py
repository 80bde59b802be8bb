"""Listens at the ports of a hibernated kernel, and keeps what clients send.

It answers what needs no kernel (the heartbeat, what kind of kernel it is, which comms there are), so that neither an
open notebook nor a server that looks now and then wakes one. What needs a kernel is handed to `on_request` as it came,
and executed by the kernel that wakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import zmq.asyncio
from jupyter_client.session import Session
from zmq.constants import Flag, SocketOption, SocketType
from zmq.error import ZMQError
from zmq.sugar.socket import Socket

from ..checked import from_json
from ..client.sleep_record import KernelReplies
from ..errors import GpuckptError
from ..linux.listening import listen
from ..spelling import in_a_cell
from .connections import Connections
from .ports import of_connection_file
from .ports import peers as connected

__all__ = ["PortListener"]

log = logging.getLogger("gpuckpt.keeper")

_UNHURRIED = ("debug_request", "usage_request", "create_subshell_request", "delete_subshell_request")
"""Requests that front ends send by themselves when they open a notebook, or now and then: nobody wakes for them."""
_BIND_AGAIN = 1.0  # how often it tries for ports that somebody else has, in seconds
_ENDING = 2.0  # how long clients have to close their connections, in seconds
_COMING_BACK = 3.0  # how long clients have to come back when the ports were taken, in seconds
_GREETED = 10.0  # and until when they may have introduced themselves, where something waits for them
_CLOSING, _POLL = 0.02, 0.01  # seconds
_LINGER = 500  # for how long what was sent may be on its way after the end, in milliseconds


@dataclass(frozen=True)
class _Connection:
    """What of the kernel's connection file is needed here, beside the ports."""

    ip: str
    key: str
    signature_scheme: str
    curve_publickey: str | None = None
    curve_secretkey: str | None = None
    """Both are None where what is said is not encrypted."""


@dataclass(frozen=True)
class _Header:
    """What of a message's header is read here."""

    msg_type: str


@dataclass(frozen=True)
class _CommInfo:
    """Asks for the comms of a target; None for all."""

    target_name: str | None = None


@dataclass(frozen=True)
class _Shutdown:
    """Asks for the kernel's end; or its restart."""

    restart: bool | None = None


@dataclass(frozen=True)
class _Request:
    """What a client asks for: its type, and who it is for zmq."""

    kind: str
    idents: list[bytes]
    header: dict[str, Any]
    """As it came: the answers say it again."""
    content: object = None
    """JSON, which each type of request has its own of."""

    @classmethod
    def of(cls, header: object, idents: list[bytes], content: object = None) -> _Request:
        """Raises `ValueError` where the header is none."""
        return cls(from_json(_Header, header).msg_type, idents, from_json(dict[str, Any], header), content)

    @property
    def reply(self) -> str:
        """The type of its reply."""
        return self.kind.replace("_request", "_reply")


Announced = Literal["hibernated", "waking"]
OnRequest = Callable[[list[bytes]], None]


class PortListener:
    """One hibernated kernel's.

    Parameters
    ----------
    connection_file : the kernel's.
    said : what the kernel said before it went.
    expected : how many clients come back, as `ports.peers` counts them.
    on_request : called with the frames of every request that needs a kernel.
    on_shutdown : called when a client asks for the kernel's end.
    """

    def __init__(
        self,
        connection_file: str,
        said: KernelReplies,
        expected: Mapping[str, int],
        on_request: OnRequest,
        on_shutdown: Callable[[], object],
    ) -> None:
        self._connection_file = connection_file
        self._connection = from_json(_Connection, json.loads(Path(connection_file).read_text()))
        self._ports = of_connection_file(connection_file)
        self._said, self._on_request, self._on_shutdown = said, on_request, on_shutdown
        scheme = self._connection.signature_scheme
        self._session = Session(key=self._connection.key.encode(), signature_scheme=scheme)
        self._context = zmq.asyncio.Context()
        self._sockets: dict[str, zmq.asyncio.Socket] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._expected = expected
        self._announced: Announced = "hibernated"
        self._listeners = 0
        self._opened = asyncio.get_running_loop().time()

    def open(self) -> None:
        """Take the ports; while somebody else has one of them, it is tried again until it is free."""
        self._tasks = [asyncio.create_task(self._open())]

    async def _open(self) -> None:
        while not self._bound():
            await asyncio.sleep(_BIND_AGAIN)
        answers = {"shell": self._on_shell, "control": self._on_control, "stdin": self._on_stdin, "hb": self._on_beat}
        self._tasks += [
            *(asyncio.create_task(self._serve(name, answer)) for name, answer in answers.items()),
            asyncio.create_task(self._serve("iopub", self._on_subscription)),
        ]
        self._opened = asyncio.get_running_loop().time()
        self.announce(self._announced)

    def _bound(self) -> bool:
        kinds = {
            "shell": SocketType.ROUTER,
            "control": SocketType.ROUTER,
            "stdin": SocketType.ROUTER,
            "hb": SocketType.ROUTER,
            "iopub": SocketType.XPUB,
        }
        try:
            for name, kind in kinds.items():
                one = self._sockets[name] = self._context.socket(kind)
                one.linger = _LINGER
                if kind == SocketType.XPUB:
                    one.setsockopt(SocketOption.XPUB_VERBOSER, 1)
                if kind == SocketType.ROUTER:
                    one.router_handover = 1  # a client that connects again is the same client
                    one.router_mandatory = 1
                if self._connection.curve_secretkey and self._connection.curve_publickey:
                    one.curve_secretkey = self._connection.curve_secretkey.encode()
                    one.curve_publickey = self._connection.curve_publickey.encode()
                    one.curve_server = True
                listen(one, self._connection.ip, self._ports[f"{name}_port"])
        except ZMQError as e:
            log.warning("a port of the hibernated kernel cannot be had (%s); it is tried again", e)
            self._close_sockets()
            return False
        return True

    def _address(self, name: str) -> str:
        return f"tcp://{self._connection.ip}:{self._ports[f'{name}_port']}"

    async def leave(self) -> None:
        """Give the ports up, for the kernel that wakes; every request that has come was handed to `on_request`."""
        waiting = {self._ports[f"{name}_port"] for name in ("shell", "stdin")}
        for name, one in self._sockets.items():
            with contextlib.suppress(ZMQError):
                one.unbind(self._address(name))
        await asyncio.sleep(_CLOSING)  # zmq closes the listeners in a thread of its own
        connections = Connections(os.getpid(), waiting)
        try:
            if not await connections.end(_ENDING) or not await connections.read_out(_ENDING):
                log.warning("a client of the hibernated kernel did not let go of its connection")
        finally:
            connections.close()
        await self._until_quiet()
        await self.close()

    async def _until_quiet(self) -> None:
        """Take what zmq has read and not handed over yet."""
        for name in ("shell", "stdin"):
            quiet = 0
            while name in self._sockets and quiet < 2:
                quiet += 0 if await self._sockets[name].poll(0) else 1
                await asyncio.sleep(_POLL)

    async def close(self) -> None:
        """Give everything up; the ports are free then."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._close_sockets()
        await asyncio.to_thread(self._context.term)

    def _close_sockets(self) -> None:
        for one in self._sockets.values():
            one.close()
        self._sockets = {}

    # -- what clients send

    async def _serve(self, name: str, answer: Callable[[list[bytes]], None]) -> None:
        one = self._sockets[name]
        while True:
            frames = await one.recv_multipart()
            try:
                answer(frames)
            except Exception as e:  # noqa: BLE001 - whatever a client sent, others are to be answered
                log.warning("a message at the %s port of the hibernated kernel was passed over: %s", name, e)

    def _on_beat(self, frames: list[bytes]) -> None:
        with contextlib.suppress(ZMQError):
            Socket.shadow(self._sockets["hb"].underlying).send_multipart(frames, Flag.NOBLOCK)

    def _on_subscription(self, frames: list[bytes]) -> None:
        """Count who listens (zmq_setsockopt(3), ZMQ_XPUB_VERBOSER), and tell that there is somebody."""
        self._listeners += 1 if frames[0][:1] == b"\x01" else -1
        self.announce(self._announced)

    def _on_stdin(self, frames: list[bytes]) -> None:
        """Wake for an answer to a question, which the kernel asks once more: the answer itself is gone."""
        self._read(frames)
        self._on_request([])

    def _on_shell(self, frames: list[bytes]) -> None:
        request = self._read(frames)
        if request.kind == "kernel_info_request":
            self._reply("shell", request, self._said.kernel_info)
        elif request.kind == "comm_info_request":
            wanted = from_json(_CommInfo, request.content).target_name
            comms = {
                comm: about
                for comm, about in self._said.comms.items()
                if wanted is None or about["target_name"] == wanted
            }
            self._reply("shell", request, {"status": "ok", "comms": comms})
        else:
            self._on_request(frames)

    def _on_control(self, frames: list[bytes]) -> None:
        request = self._read(frames)
        if request.kind == "kernel_info_request":
            self._reply("control", request, self._said.kernel_info)
        elif request.kind == "interrupt_request":
            self._reply("control", request, {"status": "ok"})
        elif request.kind == "shutdown_request":
            restart = bool(from_json(_Shutdown, request.content).restart)
            self._reply("control", request, {"status": "ok", "restart": restart})
            self._on_shutdown()
        elif request.kind not in _UNHURRIED:
            log.info("a %s to the hibernated kernel was passed over", request.kind)

    def _read(self, frames: list[bytes]) -> _Request:
        """Return what is asked for. Raises `ValueError` for what was not signed with the kernel's key."""
        idents, rest = self._session.feed_identities(frames)
        message = self._session.deserialize(rest)
        return _Request.of(message["header"], idents, message["content"])

    # -- what clients are told

    async def refuse(self, requests: Sequence[Sequence[bytes]], error: GpuckptError) -> None:
        """Answer requests that no kernel came up for."""
        text = str(error.spelled(in_a_cell))
        content = {"ename": type(error).__name__, "evalue": text, "traceback": text.splitlines()}
        if requests:
            await self.settled()
        for frames in requests:
            if not frames:
                continue  # an answer to a question
            idents, parts = self._session.feed_identities(list(frames))
            request = _Request.of(self._session.unpack(parts[1]), idents)  # it was verified when it came
            self._status("busy", request)
            if request.kind == "execute_request":
                self._send("iopub", "error", content, request)
            if request.kind.endswith("_request"):
                await self._reply_when_there(request, {"status": "error", **content})
            self._status("idle", request)

    async def _reply_when_there(self, request: _Request, content: Mapping[str, object]) -> None:
        """Send a reply as soon as zmq knows whose the client's new connection is: it may be connected before that."""
        loop = asyncio.get_running_loop()
        while not self._send("shell", request.reply, content, request, request.idents):
            if loop.time() > self._opened + _GREETED:
                log.info("who sent a %s to the hibernated kernel has gone", request.kind)
                return
            await asyncio.sleep(_POLL)

    async def settled(self) -> None:
        """Wait until the clients are connected again; for those that have gone, not long after the ports were taken."""
        loop = asyncio.get_running_loop()
        while loop.time() < self._opened + _COMING_BACK:
            there = connected(self._connection_file)["shell_port"] >= self._expected.get("shell_port", 0)
            if self._sockets and there and self._listeners >= self._expected.get("iopub_port", 0):
                return
            await asyncio.sleep(_POLL)

    def announce(self, what: Announced) -> None:
        """Tell who listens, now or later, what the kernel is.

        By a status message with a member of our own, as a kernel itself does.
        """
        self._announced = what
        self._status("busy" if what == "waking" else "idle", None, gpuckpt=what)

    def _reply(self, channel: str, request: _Request, content: Mapping[str, object]) -> None:
        self._status("busy", request)
        self._send(channel, request.reply, content, request, request.idents)
        self._status("idle", request)

    def _status(self, state: str, request: _Request | None, **more: str) -> None:
        self._send("iopub", "status", {"execution_state": state, **more}, request)

    def _send(
        self,
        channel: str,
        kind: str,
        content: Mapping[str, object],
        request: _Request | None,
        idents: Sequence[bytes] | None = None,
    ) -> bool:
        """Send a message; tell whether somebody may have it, which is known of replies."""
        ident = [b"kernel." + kind.encode()] if idents is None else list(idents)
        if channel not in self._sockets:
            return True  # somebody else has the ports
        parent = {"header": request.header} if request is not None else {}
        try:
            socket = Socket.shadow(self._sockets[channel].underlying)
            self._session.send(socket, kind, dict(content), parent=parent, ident=ident)
        except ZMQError:  # who asked is not there (zmq_setsockopt(3), ZMQ_ROUTER_MANDATORY)
            return False
        return True
