"""The keeper's end of the two FIFOs in the kernel's run folder: how keeper and agent talk.

FIFOs, since a connected socket that leaves the namespace cannot be dumped, while a thread that waits on a FIFO comes
back waiting on the FIFO of the same path. Lines of JSON:

- agent to keeper: ``{"hello": {...}}``, ``{"request": n, "op": o, "args": {...}}``,
  ``{"reply": n, "result"|"error": ...}``, and ``{"busy": b, "used": b, "cells": n, "cell": {...},
  "seconds": s, "asked": {...}}`` when a cell begins or has ended
- keeper to agent: ``{"call": name, "id": n, "args": {...}}``, ``{"for": n, "progress"|"result"|"error": ...}``

User code can write to the FIFO too: what is no message is passed over, and so are requests beyond `MOST_REQUESTS`.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import itertools
import json
import logging
import os
import secrets
import termios
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from .. import settings
from ..checked import from_json
from ..client.kernel_start import FROM_KERNEL, TO_KERNEL
from ..client.protocol import LINE_LIMIT
from ..client.record import now
from ..errors import GpuckptError
from ..operations.results import RunningCell
from .agent_replies import CellNews, checked_reply

log = logging.getLogger("gpuckpt.keeper")

T = TypeVar("T")

MOST_REQUESTS = 100
"""So many requests of the agent's are worked on at once."""

OnRequest = Callable[[int, str, dict[str, Any]], Awaitable[None]]
OnIdle = Callable[[RunningCell | None, float], None]
"""Told when no cell runs any more: which one has ended, if it was the user's, and for how many seconds it ran."""


class AgentSilent(Exception):
    """The agent did not answer a call in time."""


class AgentChannel:
    """The FIFO pair of one run folder.

    `on_request` is called with (id, operation, arguments), `on_idle` when no cell runs any more.

    Attributes
    ----------
    hello : done when an agent listens at the other end.
    busy : whether a cell is being executed.
    cells : how many cells have begun, as the kernel counts them; None until it says so.
    cell : the one that is being executed; None where there is none.
    asked : that one, to be answered by another kernel (`kernel.cells`); nothing in it where that is not known.
    is_told_more : whether the agent is known to be told more about saves (`ReadyForSave`).
    last_active : when a cell of the user's last began or ended, as the manifests write times; at first, when the link
        was made.
    """

    def __init__(self, run_dir: Path, on_request: OnRequest, on_idle: OnIdle) -> None:
        # Read and write, so that neither end has to wait for the other to open, and none sees an end of file.
        flags = os.O_RDWR | os.O_NONBLOCK
        self._out = os.open(run_dir / TO_KERNEL, flags)
        self._in = os.open(run_dir / FROM_KERNEL, flags)
        self._on_request, self._on_idle = on_request, on_idle
        self._began = time.monotonic()
        self._line = bytearray()
        self._too_long = False
        self._calls: dict[int, asyncio.Future[Any]] = {}
        # A FIFO outlives its keeper: an answer to an earlier one must not be taken for an answer to this one.
        self._ids = itertools.count(secrets.randbits(48) + 1)
        self._introduction: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._closed = False
        self.busy = False
        self.cells: int | None = None
        self.cell: RunningCell | None = None
        self.asked: dict[str, Any] = {}
        self.is_told_more = False
        self.last_active = now()
        self.hello: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._in, self._read)

    def close(self) -> None:
        """Stop listening; calls under way fail."""
        if self._closed:
            return
        self._closed = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._in)
        loop.remove_writer(self._out)
        os.close(self._in)
        os.close(self._out)
        waiting = [*self._calls.values(), self.hello, *filter(None, [self._writable])]
        for future in waiting:
            if not future.done():
                future.set_exception(AgentSilent("the link was closed"))
                future.exception()  # seen: nobody may be waiting for it
        self._calls.clear()

    def introduce(self, has_agent: bool, *, comes_back: bool) -> None:
        """Tell the agent, which another keeper had, that there is a new one: it ends whatever it waits for.

        One whose kernel `comes_back` from a snapshot does not, where it was not told yet what became of that: it is
        now. What it says until it has heard of this was meant for the dead keeper.
        """
        if not has_agent:
            self.hello.set_result({})
            return
        self._introduction = next(self._ids)
        # The first line ends one that the dead keeper may have left unfinished.
        args = {"comes_back": comes_back}
        self._background(self._send(b"\n" + _line({"call": "new_keeper", "id": self._introduction, "args": args})))

    def _background(self, work: Awaitable[None]) -> None:
        async def done() -> None:
            with contextlib.suppress(AgentSilent):
                await work

        task = asyncio.create_task(done())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _read(self) -> None:
        try:
            data = os.read(self._in, 1 << 20)
        except BlockingIOError:
            return
        *ends, rest = data.split(b"\n")
        for end in ends:
            line = bytes(self._line) + end
            self._line.clear()
            if self._too_long:
                self._too_long = False
                continue
            try:
                self._take(json.loads(line))
            except Exception as e:  # noqa: BLE001 - whatever it was, the next line may be the agent's
                log.debug("passed over a line of %d bytes: %s", len(line), e)
        if not self._too_long:
            self._line += rest
        if len(self._line) > LINE_LIMIT:
            self._line.clear()
            self._too_long = True

    def _take(self, message: Any) -> None:
        if self._introduction is not None:
            if message.get("reply") != self._introduction:
                return
            self._introduction = None
            self._note_cells(from_json(CellNews, message.get("result") or {}))
            self.hello.set_result({})
        elif "hello" in message:
            if not self.hello.done():
                self.hello.set_result(message["hello"])
        elif "reply" in message:
            call = self._calls.pop(message["reply"], None)
            if call is not None and not call.done():
                if "error" in message:
                    call.set_exception(GpuckptError.from_dict(message["error"]))
                else:
                    call.set_result(message.get("result"))
        elif "busy" in message:
            news = from_json(CellNews, message)
            ended = self.cell
            if self.cell is None:
                self._began = time.monotonic()
            self._note_cells(news)
            if not news.busy:
                seconds = news.seconds if news.seconds is not None else time.monotonic() - self._began
                self._on_idle(ended, seconds)
            if news.used:
                self.last_active = now()
        elif "request" in message and len(self._tasks) < MOST_REQUESTS:
            args = message.get("args")
            work = self._answer(message["request"], str(message.get("op")), args if isinstance(args, dict) else {})
            self._background(work)

    def _note_cells(self, news: CellNews) -> None:
        self.busy, self.asked = news.busy, news.asked
        self.cells = self.cells if news.cells is None else news.cells
        self.cell = news.cell if news.busy else None

    async def _answer(self, request: int, op: str, args: dict[str, Any]) -> None:
        await self._on_request(request, op, args)

    async def send(self, message: dict[str, Any]) -> None:
        """Write one line, waiting while the FIFO is full.

        Raises
        ------
        AgentSilent : the link was closed.
        """
        await self._send(_line(message))

    async def pulse(self, message: dict[str, Any]) -> None:
        """Write one line if the agent has read all others: while the kernel is paused they must not pile up."""
        unread = array.array("i", [0])
        if not self._closed:
            fcntl.ioctl(self._out, termios.FIONREAD, unread)
            if unread[0] == 0 and not self._sending.locked():
                await self.send(message)

    async def _send(self, line: bytes) -> None:
        await self._sending.acquire()  # whoever stops waiting here has sent nothing
        # Whoever stops waiting later has: half a line would take the next one with it.
        self._writing = asyncio.create_task(self._write(line))
        self._writing.add_done_callback(self._written)
        await asyncio.shield(self._writing)

    def _written(self, writing: asyncio.Task[None]) -> None:
        self._sending.release()
        if not writing.cancelled():
            writing.exception()  # seen: nobody may be waiting for it

    async def _write(self, line: bytes) -> None:
        data = memoryview(line)
        while data:
            if self._closed:
                raise AgentSilent("the link was closed")
            try:
                data = data[os.write(self._out, data) :]
            except BlockingIOError:
                await self._until_writable()

    async def _until_writable(self) -> None:
        loop = asyncio.get_running_loop()
        writable = self._writable = loop.create_future()

        def note() -> None:
            if not writable.done():
                writable.set_result(None)

        loop.add_writer(self._out, note)
        try:
            await writable
        finally:
            self._writable = None
            if not self._closed:
                loop.remove_writer(self._out)

    async def call(self, name: str, args: dict[str, Any], timeout: float | None) -> Any:
        """Have the agent do something and return its answer.

        Raises
        ------
        AgentSilent : it did not answer within `timeout` seconds, if that is not None; or the link was closed.
        GpuckptError : it answered with that error.
        """
        number = next(self._ids)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()

        async def ask() -> Any:
            await self.send({"call": name, "id": number, "args": args})
            return await answer

        try:
            return await asyncio.wait_for(ask(), timeout)
        except (TimeoutError, asyncio.TimeoutError):
            raise AgentSilent(f"no answer to {name!r} within {timeout:.0f} s") from None
        finally:
            self._calls.pop(number, None)

    async def ask(self, name: str, kind: type[T], not_done: type[GpuckptError], what: str) -> T:
        """Return what the agent says to a call, once it listens; it has as long as the user's hooks.

        Raises
        ------
        GpuckptError : it does not answer, or not so, and `what` was not done for it: of the type `not_done`. Or the
            agent's own.
        """
        try:
            answer = await self.call_when_there(name, {}, settings.hook_timeout())
        except AgentSilent:
            why = f"It did not answer within {settings.hook_timeout():.0f} s: something in it holds Python's lock."
            raise not_done(what, why, "Try again when the running code is done.") from None
        return checked_reply(kind, answer, not_done, what)

    async def call_when_there(self, name: str, args: dict[str, Any], timeout: float) -> Any:
        """Wait for the agent's hello, then `call`; `timeout` (seconds) is for either of the two.

        Raises
        ------
        AgentSilent, GpuckptError : as `call`.
        """
        try:
            await asyncio.wait_for(asyncio.shield(self.hello), timeout)
        except (TimeoutError, asyncio.TimeoutError):
            raise AgentSilent(f"no agent within {timeout:.0f} s") from None
        return await self.call(name, args, timeout)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
