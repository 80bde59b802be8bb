"""The kernel class of a kernel that a keeper holds: ipykernel's own, with an agent."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

from ipykernel.ipkernel import IPythonKernel

from ..errors import GpuckptError
from . import parking
from .agent import Agent, is_held, start_agent
from .channels import come_up_at_held_ports
from .debugger import keep_cells_private
from .executed import cell_id
from .gpu_room import make_room_after
from .magic import register
from .read_ahead import ReadAhead
from .senders import Senders
from .stopping import Interruption, StoppedHere
from .waking import wake_for_cell

log = logging.getLogger("gpuckpt.agent")

_PENDING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_RUNS_CODE = frozenset({"execute_request", "comm_open", "comm_msg", "comm_close"})
_NO_REQUEST = b"gpuckpt: see to the main loop"

# ipykernel's app imports its kernel's class before it binds anything, and makes the kernel afterwards.
come_up_at_held_ports()


class GpuckptKernel(IPythonKernel):  # type: ignore[misc]
    """IPython's kernel, which knows what it executes and lets its keeper save and restore it.

    Without a keeper it is a plain kernel.
    """

    agent: Agent | None = None
    _held: list[Any] | None = None
    """What came while a kernel that wakes must not execute anything yet; None otherwise."""
    read_ahead: ReadAhead | None = None
    """What the agent has read of the shell channel; None with ipykernel 7, where a thread reads it all the time."""
    _question: tuple[str, Any, Any, bool] | None = None
    _pending: ClassVar[deque[Any]] = deque(maxlen=32)
    """The last C functions that the main thread was given: Python has room for no more, and does not keep them."""

    def __init__(self, **kwargs: Any) -> None:
        # Before start-up files run, which may import torch.
        if is_held():
            parking.prepare()
            keep_cells_private()
        super().__init__(**kwargs)
        self._interruption = Interruption(self.shell)
        self._senders = Senders(self.session)
        for kind in ("comm_open", "comm_msg", "comm_close"):
            self.shell_handlers[kind] = self._wakes(self.shell_handlers[kind])

    @cached_property
    def banner(self) -> str | None:
        """IPython's, made once: it draws its tip from the user's random stream, and each client that connects asks."""
        banner: str | None = super().banner
        return banner

    def start(self) -> None:
        """Start as ipykernel does, and the agent and ``%gpuckpt`` with it."""
        super().start()
        if hasattr(self, "msg_queue"):  # ipykernel 6
            self.read_ahead = ReadAhead(self.shell_stream.socket)
        self.agent = start_agent(self)
        register(self.shell, self.agent)

    async def execute_request(self, stream: Any, ident: list[bytes], parent: dict[str, Any]) -> None:
        """Execute a cell (called by ipykernel for every request)."""
        if self.agent is None:
            await super().execute_request(stream, ident, parent)
            return
        content = parent["content"]
        if content.get("store_history", True) and not content.get("silent"):
            self.agent.executed.note(cell_id(parent), self.execution_count)
        with self.agent.execute(ident, parent):
            if not content.get("silent") and not self.agent.cells.is_line_of_ours():
                self.agent.tell_not_saved()
            await super().execute_request(stream, ident, parent)

    async def do_execute(self, code: str, silent: bool, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Execute code (called by ipykernel within `execute_request`); a kernel that sleeps is woken before."""
        reply: dict[str, Any] = {"status": "ok", "execution_count": self.execution_count}
        cell = None if self.agent is None else self.agent.cells.latest()
        with self._interruption.possible(cell) as was_interrupted:
            reply = await self._wake_and_execute(code, silent, *args, **kwargs)
        if was_interrupted() or reply.get("ename") == StoppedHere.__name__:
            # It was asked for: the cells behind it are executed.
            reply = {"status": "ok", "execution_count": reply["execution_count"], "payload": [], "user_expressions": {}}
        if self.agent is not None:
            if reply["status"] == "error" and not silent and not self.agent.sleeping.is_asleep:
                make_room_after(self.agent, reply)
            self.agent.leaving.reply()
        return reply

    async def _wake_and_execute(self, code: str, silent: bool, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.agent is not None and self.agent.sleeping.needs_waking(code):
            failure = wake_for_cell(self.agent, self.shell, silent)
            if failure is not None:
                if not silent:
                    self.send_response(self.iopub_socket, "error", failure)
                return {"status": "error", "execution_count": self.execution_count, **failure}
        reply: dict[str, Any] = await super().do_execute(code, silent, *args, **kwargs)
        return reply

    def stop_cell(self, cell: object) -> None:
        """Interrupt this cell if it still runs; it ends without an error (called by the agent, in its own thread)."""
        self._interruption.interrupt(cell)

    def do_complete(self, code: str, cursor_pos: int | None) -> Any:
        """Complete code (called by ipykernel); while the kernel sleeps there are no completions: they may evaluate."""
        if self.agent is not None and self.agent.sleeping.is_asleep:
            at = len(code) if cursor_pos is None else cursor_pos
            return {"matches": [], "cursor_start": at, "cursor_end": at, "metadata": {}, "status": "ok"}
        return super().do_complete(code, cursor_pos)

    def do_inspect(self, code: str, cursor_pos: int, *args: Any, **kwargs: Any) -> Any:
        """Describe an object (called by ipykernel); while the kernel sleeps nothing is found: it would be printed."""
        if self.agent is not None and self.agent.sleeping.is_asleep:
            return {"status": "ok", "found": False, "data": {}, "metadata": {}}
        return super().do_inspect(code, cursor_pos, *args, **kwargs)

    def do_shutdown(self, restart: bool) -> Any:
        """End (called by ipykernel, which then runs what is to be done at the end, and answers)."""
        if self.agent is not None and self.agent.sleeping.is_asleep:
            self.agent.tell_ending()
        return super().do_shutdown(restart)

    def _wakes(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Return a handler of a widget's message, which runs code of the user's: a kernel that sleeps wakes first."""

        def handle(stream: Any, ident: Any, message: Any) -> Any:
            if self.agent is not None and self.agent.sleeping.is_asleep:
                try:
                    self.agent.sleeping.wake()
                except GpuckptError as e:
                    print(e, file=sys.stderr)
                    return None
            return handler(stream, ident, message)

        return handle

    async def shell_channel_thread_main(self, msg: list[Any]) -> None:
        """Note a request when it arrives (called by ipykernel 7 in the thread that reads the shell channel)."""
        msg = self._senders.address(msg, self.header_of(msg))
        if self._held is not None:
            self._held.append(msg)
            return
        if self.agent is not None:
            self.agent.reconnection.until_known()
            self._note(msg)
            self.agent.reconnection.request_came(partial(self._is_heard, msg))
            if self.agent.executed.restored and self._is_for_a_lost_subshell(msg):
                self.shell_channel_thread.manager.get_shell_channel_to_subshell_socket(None).send_multipart(
                    msg, copy=False
                )
                return
        await super().shell_channel_thread_main(msg)

    def schedule_dispatch(self, dispatch: Any, *args: Any) -> None:
        """Note that a request has come (called by ipykernel 6 when it has read one, and for calls of its own)."""
        if dispatch != self.dispatch_shell:
            super().schedule_dispatch(dispatch, *args)
            return
        self._take_read_ahead()
        self._schedule_request(*args)

    def have_read(self) -> None:
        """Know of all that has come to ipykernel 6; from any thread."""
        if self.read_ahead is not None:
            self.read_ahead.read()
            self.io_loop.add_callback(self._take_read_ahead)

    def _take_read_ahead(self) -> None:
        while self.read_ahead is not None and self.read_ahead.requests:
            self._schedule_request(self.read_ahead.requests[0])
            self.read_ahead.requests.popleft()  # from now on it is in the queue: it is never in neither

    def _schedule_request(self, msg: list[Any]) -> None:
        msg = self._senders.address(msg, self.header_of(msg))
        if self._held is not None:
            self._held.append(msg)
            return
        if self.agent is not None:
            self.agent.reconnection.request_came(partial(self._is_heard, msg))
        super().schedule_dispatch(self.dispatch_shell, msg)

    async def dispatch_shell(self, msg: list[Any], *args: Any, **kwargs: Any) -> None:
        """Dispatch a request whose turn has come (called by ipykernel), unless it is to be passed over."""
        # One that is a single frame is ours, or ipykernel's own.
        if len(msg) == 1 and bytes(msg[0]) == _NO_REQUEST:
            return
        if self.agent is None or len(msg) == 1:
            await super().dispatch_shell(msg, *args, **kwargs)
            return
        self.agent.reconnection.until_known()
        if self.agent.leaving.is_under_way():
            if self.read_ahead is not None:  # it was taken from there
                self._note(msg)
            self.agent.leaving.wait()
        header = self.header_of(msg)
        if str(header.get("msg_type")) in _RUNS_CODE:
            await self.agent.reconnection.until_ready()
        if self.agent.cells.begins(header):
            try:
                await super().dispatch_shell(msg, *args, **kwargs)
            finally:
                self.agent.leaving.replied()

    def _is_heard(self, msg: Sequence[Any]) -> bool:
        """Tell whether somebody wants the outputs of a request as it came, unverified: it is a cell, and not silent."""
        try:
            _, parts = self.session.feed_identities(list(msg), copy=not hasattr(msg[0], "bytes"))
            header, content = (self.session.unpack(bytes(parts[at])) for at in (1, 4))
            return header["msg_type"] == "execute_request" and not content.get("silent", False)
        except (ValueError, TypeError, IndexError, KeyError, AttributeError):
            return False

    def header_of(self, msg: Sequence[Any]) -> dict[str, Any]:
        """Return the header of a request as it came, unverified; one that has none gives an empty id."""
        try:
            _, parts = self.session.feed_identities(list(msg), copy=not hasattr(msg[0], "bytes"))
            header = self.session.unpack(bytes(parts[1]))
            return {"msg_id": "", **header}
        except (ValueError, TypeError, IndexError):
            return {"msg_id": ""}

    def _is_for_a_lost_subshell(self, msg: list[Any]) -> bool:
        """Tell whether a request would go to a subshell that the kernel before a restore had and this one has not.

        JupyterLab has one made for widgets, and goes on naming it. ipykernel in turn has a comm answered by the
        subshell that it spoke from last.
        """
        _, parts = self.session.feed_identities(msg, copy=False)
        header = self.session.unpack(bytes(parts[1]))
        wanted = {header.get("subshell_id")}
        if header.get("msg_type") == "comm_msg":
            comm = self.comm_manager.comms.get(self.session.unpack(bytes(parts[4])).get("comm_id"))
            wanted.add(getattr(comm, "_reply_subshell_id", None))
        return not wanted <= {None, *self.shell_channel_thread.manager.list_subshell()}

    def _note(self, msg: list[Any]) -> None:
        if self.agent is not None:
            self.agent.cells.received(self.header_of(msg), [bytes(part) for part in msg])

    def _input_request(self, prompt: str, ident: Any, parent: Any, password: bool = False) -> str:
        """Ask the client, and note what was asked (called by ipykernel for ``input()`` and ``getpass()``)."""
        self._question = (prompt, ident, parent, password)
        try:
            answer: str = super()._input_request(prompt, ident, parent, password)
        finally:
            self._question = None
        return answer

    def ask_again(self) -> None:
        """Ask what the running cell waits for once more, of the client that it answers now; from any thread."""
        self.in_main_thread(self._repeat_question)

    def _repeat_question(self) -> None:
        if self._question is not None:
            prompt, ident, parent, password = self._question
            content = {"prompt": prompt, "password": password}
            self.session.send(self.stdin_socket, "input_request", content, parent, ident=ident)

    def in_main_thread(self, do: Callable[[], None]) -> None:
        """Do something in the main thread, whose the stdin channel is, also in the middle of a cell that waits there.

        It waits in ipykernel's loop, which no event loop reaches; nobody else may use its sockets. What is raised ends
        up in the kernel's log.
        """

        def pending(_: Any) -> int:
            try:
                do()
            except Exception:
                log.exception("what was to be done in the main thread failed")
            return 0

        call = _PENDING(pending)
        self._pending.append(call)
        ctypes.pythonapi.Py_AddPendingCall(call, None)
        self.in_main_loop(lambda: None)  # have it execute something, where it has nothing to do

    def in_main_loop(self, do: Callable[..., object], *args: Any) -> None:
        """Have the main thread's event loop do something, when no cell runs; from any thread.

        Between cells a toolkit's loop (``%gui``) has that thread, which gives way to messages alone.
        """
        self.io_loop.add_callback(do, *args)
        thread = getattr(self, "shell_channel_thread", None)
        if self.eventloop is not None and thread is not None:  # in ipykernel 6 it waits for a client's
            thread.io_loop.add_callback(self._send_no_request)

    def _send_no_request(self) -> None:
        self.shell_channel_thread.manager.get_shell_channel_to_subshell_socket(None).send(_NO_REQUEST)

    def hold(self, hold: bool) -> None:
        """Keep what comes from now on, or execute it; that, behind what `take_request` was given, in the main loop."""
        if hold:
            self._held = []
            return
        thread = getattr(self, "shell_channel_thread", None)
        if thread is not None:
            thread.io_loop.add_callback(self._let_in)
        else:
            self._let_in()

    def _let_in(self) -> None:
        held, self._held = self._held or [], None
        thread = getattr(self, "shell_channel_thread", None)
        for msg in held:
            if thread is not None:
                thread.io_loop.add_callback(self.shell_channel_thread_main, msg)
            elif self.read_ahead is not None:
                self._schedule_request(msg)

    def reply_stream(self) -> Any:
        """Return what replies on the shell channel are sent through, from the main thread."""
        thread = getattr(self, "shell_channel_thread", None)
        if thread is None:
            return self.shell_stream
        return thread.manager.get_subshell_to_shell_channel_socket(None)

    async def take_request(self, frames: list[bytes]) -> None:
        """Execute a request that came to the kernel before this one; called in the main thread's loop."""
        from zmq.sugar.frame import Frame

        msg = [Frame(frame) for frame in frames]
        thread = getattr(self, "shell_channel_thread", None)
        if thread is not None:
            if self.agent is not None:
                self._note(msg)
            thread.io_loop.add_callback(super().shell_channel_thread_main, msg)
        elif self.read_ahead is not None:
            super().schedule_dispatch(self.dispatch_shell, msg)
        else:
            await self.shell_main(None, msg)
