"""The keeper's end of the two FIFOs in the kernel's run folder: how keeper and agent talk.

FIFOs, since a connected socket that leaves the namespace cannot be dumped, while a thread that waits on a FIFO comes
back waiting on the FIFO of the same path. Lines of JSON:

- agent to keeper: ``{"hello": {...}}``, ``{"request": n, "op": o, "args": {...}}``,
  ``{"reply": n, "result"|"error": ...}``
- keeper to agent: ``{"call": name, "id": n, "args": {...}}``, ``{"for": n, "progress"|"result"|"error": ...}``
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ..errors import GpuckptError

TO_KERNEL, FROM_KERNEL = "to-kernel", "from-kernel"

Request = Callable[[int, str, dict[str, Any]], Awaitable[None]]


class AgentSilent(Exception):
    """The agent did not answer a call in time."""


class Link:
    """The FIFO pair of one run folder; `on_request` is called with (id, operation, arguments)."""

    def __init__(self, run_dir: Path, on_request: Request) -> None:
        for name in (TO_KERNEL, FROM_KERNEL):
            with contextlib.suppress(FileExistsError):
                os.mkfifo(run_dir / name, 0o600)
        # Read and write, so that neither end has to wait for the other to open, and none sees an end of file.
        flags = os.O_RDWR | os.O_NONBLOCK
        self._out = os.open(run_dir / TO_KERNEL, flags)
        self._in = os.open(run_dir / FROM_KERNEL, flags)
        self._on_request = on_request
        self._buffer = b""
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self.hello: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._in, self._read)

    def close(self) -> None:
        """Stop listening; calls under way fail."""
        asyncio.get_running_loop().remove_reader(self._in)
        os.close(self._in)
        os.close(self._out)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(AgentSilent("the link was closed"))
        self._calls.clear()

    def _read(self) -> None:
        try:
            data = os.read(self._in, 1 << 20)
        except BlockingIOError:
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):  # not ours: user code can write to the FIFO too
                self._take(json.loads(line))

    def _take(self, message: Any) -> None:
        if not isinstance(message, dict):
            return
        if "hello" in message:
            if not self.hello.done():
                self.hello.set_result(message["hello"])
        elif "reply" in message:
            call = self._calls.pop(message["reply"], None)
            if call is not None and not call.done():
                if "error" in message:
                    call.set_exception(GpuckptError.from_dict(message["error"]))
                else:
                    call.set_result(message.get("result"))
        elif "request" in message:
            task = asyncio.create_task(
                self._answer(message["request"], str(message.get("op")), message.get("args") or {})
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: int, op: str, args: dict[str, Any]) -> None:
        await self._on_request(request, op, args)

    async def send(self, message: dict[str, Any]) -> None:
        """Write one line, waiting while the FIFO is full."""
        loop = asyncio.get_running_loop()
        data = memoryview(json.dumps(message).encode() + b"\n")
        async with self._sending:
            while data:
                try:
                    data = data[os.write(self._out, data) :]
                except BlockingIOError:
                    writable = loop.create_future()
                    loop.add_writer(self._out, writable.set_result, None)
                    try:
                        await writable
                    finally:
                        loop.remove_writer(self._out)

    async def call(self, name: str, args: dict[str, Any], timeout: float) -> Any:
        """Have the agent do something and return its answer.

        Raises
        ------
        AgentSilent : it did not answer within `timeout` seconds.
        GpuckptError : it answered with that error.
        """
        number = next(self._ids)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        await self.send({"call": name, "id": number, "args": args})
        try:
            return await asyncio.wait_for(answer, timeout)
        except (TimeoutError, asyncio.TimeoutError):
            raise AgentSilent(f"no answer to {name!r} within {timeout:.0f} s") from None
        finally:
            self._calls.pop(number, None)
