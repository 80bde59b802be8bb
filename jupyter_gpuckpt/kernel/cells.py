"""The cells that clients wait for, and how a restored kernel answers one that was asked of the kernel before it.

A cell's request is known inside ipykernel as one dictionary (the message) and one list (its routing identities), which
everything that writes or replies holds on to. Changing both in place makes a running cell answer another request: this
is how the rest of a saved cell writes into the cell that asked for the restore.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .executed import cell_id

_COMING, _COMING_TIMEOUT = 0.05, 1.0  # how long no request has to come, and how long that is waited for, in seconds
_BEGINS = 60  # how much of a cell names it: what tells of it has to fit in PIPE_BUF
Asked = dict[str, Any]
"""Requests as they travel between kernels: ``cell`` (header, idents, display_id, id), the one that asked or ran,
``owed`` (cells), others that have ended, and ``queued`` (raw messages), those that wait for their turn."""


class Cells:
    """The requests of one kernel that are being executed, or wait for it."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._running: list[tuple[list[bytes], dict[str, Any]]] = []
        self._saved: tuple[list[bytes], dict[str, Any]] | None = None
        self._received: dict[str, list[bytes]] = {}
        self._others: set[str] = set()
        self._since_save: dict[str, bool] | None = None
        self._begun_in_save: set[str] = set()
        self._forgotten: set[str] = set()
        self._forgotten_cells: set[str] = set()
        self._taken: set[str] = set()
        self._owed: list[Asked] = []
        self.begun = 0
        """How many cells' turns have come, silent ones among them."""
        self._begun_before_save = 0

    @contextlib.contextmanager
    def run(self, idents: list[bytes], message: dict[str, Any]) -> Iterator[None]:
        """Count a request as running."""
        entry = (idents, message)
        self._running.append(entry)
        try:
            yield
        finally:
            self._running.remove(entry)

    def are_running(self) -> bool:
        """Tell whether a request is being executed."""
        return bool(self._running)

    def latest(self) -> object:
        """Return the request that is being executed, as something to compare with; None where there is none."""
        return self._running[-1] if self._running else None

    def saved(self) -> object:
        """Return likewise the one that was being executed when the kernel was saved, where it still is."""
        return next((one for one in self._running if one is self._saved), None)

    def received(self, header: dict[str, Any], frames: list[bytes]) -> None:
        """Note a request that has come and is not being executed yet."""
        msg_id = header["msg_id"]
        if header.get("msg_type") == "execute_request":
            self._received[msg_id] = frames
        else:  # such are asked again by a client that gets no answer, or need none
            self._others.add(msg_id)
        if self._since_save is not None:
            self._since_save[msg_id] = msg_id in self._received

    def begins(self, header: dict[str, Any]) -> bool:
        """Note that a request's turn has come; False where it is to be passed over.

        That is so for what waited when the kernel was saved: the kernel that went on has answered it. Where that one
        handed it over at the restore, it is executed once.
        """
        msg_id = header["msg_id"]
        self.begun += header.get("msg_type") == "execute_request"
        self._received.pop(msg_id, None)
        self._others.discard(msg_id)
        if self._since_save is not None:
            self._begun_in_save.add(msg_id)
            self._since_save.setdefault(msg_id, header.get("msg_type") == "execute_request")
        if msg_id in self._taken:
            self._taken.discard(msg_id)
            self._forgotten.add(msg_id)
            return True
        return msg_id not in self._forgotten

    def beginning(self) -> str | None:
        """Return how the user's cell that runs begins, for people: a line, cut short; None where none runs."""
        code = self._code()
        return None if code is None else (code.splitlines() or [""])[0][:_BEGINS]

    def is_line_of_ours(self) -> bool:
        """Tell whether the cell that runs is one line of %gpuckpt: it changes nothing in the kernel."""
        (line, *more) = (self._code() or "").splitlines() or [""]
        return not more and line.startswith("%gpuckpt ")

    def is_at_its_end(self) -> bool:
        """Tell whether the cell that runs does nothing after what it waits for: that is its last line, of %gpuckpt."""
        lines = self._lines()
        return _line_that_runs() == len(lines) and lines[-1].startswith("%gpuckpt ")

    def is_at_its_beginning(self) -> bool:
        """Tell whether the cell that runs did nothing before what it waits for: a line of %gpuckpt."""
        numbered = enumerate(self._lines(), 1)
        number, line = next(((n, line) for n, line in numbered if line.strip() and line[0] != "#"), (0, ""))
        return _line_that_runs() == number and line.startswith("%gpuckpt ")

    def _lines(self) -> list[str]:
        return (self._code() or "").splitlines() or [""]

    def _code(self) -> str | None:
        """Return the code of the user's cell that runs; a silent request is a front end's."""
        contents = [message["content"] for _, message in self._running]
        own = [str(content.get("code", "")).strip() for content in contents if not content.get("silent")]
        return own[-1] if own else None

    def describe(self, display_id: str | None = None) -> Asked:
        """Return the running cell, to be answered by another kernel."""
        if not self._running:
            return {}
        idents, message = self._running[-1]
        header = json.loads(json.dumps(message["header"], default=str))
        return {
            "cell": {
                "header": header,
                "idents": [ident.hex() for ident in idents],
                "display_id": display_id,
                "id": cell_id(message),
                "worked": not self.is_at_its_beginning(),
            }
        }

    def unanswered(self) -> Asked:
        """Return all that another kernel is to answer in this one's place, what it has from the one before included."""
        owed = list(self._owed)
        return {
            **self.describe(),
            "owed": [one["cell"] for one in owed if "cell" in one],
            "queued": [*(frames for one in owed for frames in one.get("queued", [])), *self.queued()],
        }

    def shows_updates(self) -> bool:
        """Tell whether the client of the running cell shows what becomes of a display; a terminal prints and is done.

        Notebooks say which cell it is, and programs that execute notebooks that nobody can be asked anything. Whoever
        says neither is taken for a terminal: where that is wrong, a line too many is shown, and none too few.
        """
        if not self._running:
            return True
        message = self._running[-1][1]
        return bool(cell_id(message)) or not message["content"].get("allow_stdin", False)

    def queued(self) -> list[list[str]]:
        """Return the requests that wait behind the running cell; they stay where they are."""
        self._let_come()
        self._kernel.have_read()
        queued = [*self._received.values(), *self._unread()]
        return [[frame.hex() for frame in frames] for frames in queued]

    def save_begins(self) -> None:
        """Note from now on what comes: it may be in what is saved without having been read there."""
        self._since_save = self._waiting()
        self._begun_in_save.clear()
        self._begun_before_save = self.begun

    @property
    def begun_since_save(self) -> int:
        """How many have begun since `save_begins`: they may have been in the middle when the kernel was frozen."""
        return self.begun - self._begun_before_save

    def save_ended(self) -> dict[str, bool]:
        """Return the requests that wait, or have come since the save began, by their ids: whether each is a cell."""
        self.let_be_read()
        since, self._since_save = self._since_save or {}, None
        return {**since, **self._waiting()}

    def wait_or_run(self) -> bool:
        """Tell whether a request is being executed, or waits for that."""
        return self.are_running() or bool(self._waiting())

    def _waiting(self) -> dict[str, bool]:
        unread = [self._kernel.header_of(frames)["msg_id"] for frames in self._unread()]
        return {**dict.fromkeys(self._others, False), **dict.fromkeys([*self._received, *unread], True)}

    def forget(self, waited: dict[str, bool]) -> None:
        """Pass over, from now on, what waited at the save: what the kernel knew of then, and what it was told since.

        What had begun before the kernel was frozen did not wait.
        """
        waited = {msg_id: is_cell for msg_id, is_cell in waited.items() if msg_id not in self._begun_in_save}
        waited |= self._waiting()
        self._since_save = None
        self._received.clear()
        self._others.clear()
        self._forgotten = set(waited)
        self._forgotten_cells = {msg_id for msg_id, is_cell in waited.items() if is_cell}

    def forgotten(self, asked: Asked) -> int:
        """Return how many cells waited at the save and are not executed: they do not wait behind the restore, too."""
        return len(self._forgotten_cells - set(map(self._id_of, asked.get("queued", []))))

    def _id_of(self, frames: list[str]) -> str:
        return str(self._kernel.header_of([bytes.fromhex(frame) for frame in frames])["msg_id"])

    def _let_come(self) -> None:
        """Wait while requests keep coming: a client that sends hundreds at once takes its time."""
        deadline, before = time.monotonic() + _COMING_TIMEOUT, 0
        while len(self._received) > before and time.monotonic() < deadline:
            before = len(self._received)
            time.sleep(_COMING)

    def let_be_read(self) -> None:
        """Have what has come be read: by ipykernel 7 in a thread that may just have begun to run again."""
        thread = getattr(self._kernel, "shell_channel_thread", None)
        if thread is None:
            self._kernel.have_read()
            return
        read = threading.Event()

        def flush(then: Callable[[], None]) -> None:
            self._kernel.shell_stream.flush()
            thread.io_loop.add_callback(then)  # behind what each request has begun

        # Twice: a reply comes from the main thread first, and is sent in a second turn.
        thread.io_loop.add_callback(flush, partial(flush, read.set))
        read.wait(_COMING_TIMEOUT)

    def _unread(self) -> list[list[bytes]]:
        """Return requests that ipykernel 6 has queued, or not taken yet."""
        kernel = self._kernel
        if kernel.read_ahead is None:
            return []
        not_taken = list(kernel.read_ahead.requests)
        # The queue holds calls of ipykernel's own, too.
        queued = [args[0] for _, do, args in list(kernel.msg_queue._queue) if do == kernel.dispatch_shell]
        taken = {id(frames[-1]) for frames in queued}
        waiting = queued + [frames for frames in not_taken if id(frames[-1]) not in taken]
        return [[bytes(frame) for frame in frames] for frames in waiting]

    def come_back(self) -> None:
        """Note which cell goes on in a kernel that was just restored; others may run before that one is adopted.

        What the kernel that was saved had to answer yet, it has answered.
        """
        self._saved = self._running[-1] if self._running else None
        self._owed.clear()

    def adopt(self, asked: Asked) -> bool:
        """Make the cell that was saved in its middle answer what was asked; False where none was, or it has ended."""
        if not asked.get("cell") or self._saved is None or self.saved() is None:
            return False
        idents, message = self._saved
        cell = asked["cell"]
        idents[:] = [bytes.fromhex(ident) for ident in cell["idents"]]
        header = message["header"]
        header.clear()
        header.update(cell["header"])
        message["msg_id"] = header["msg_id"]
        message["parent_header"] = {}
        self._kernel.ask_again()
        return True

    def show(self, asked: Asked, data: dict[str, str]) -> None:
        """Show something in the cell that asked, in place of its progress display if it has one."""
        display_id = asked["cell"].get("display_id")
        content: dict[str, Any] = {"data": data, "metadata": {}, "transient": {}}
        if display_id:
            content["transient"] = {"display_id": display_id}
        kind = "update_display_data" if display_id else "display_data"
        self._publish(kind, content, asked)

    def answer(self, asked: Asked, error: dict[str, Any] | None = None) -> None:
        """Complete the cell that asked, from the kernel's own thread; `error`: ename, evalue, traceback."""
        self._owe({"cell": asked["cell"]}, self._answer, error)

    def answer_owed(self, asked: Asked, error: dict[str, Any]) -> None:
        """Complete likewise the cells that had ended, and whose answers did not come to their clients."""
        for cell in asked.get("owed", []):
            self.answer({"cell": cell}, error)

    def _owe(self, asked: Asked, answer: Callable[..., None], *args: Any) -> None:
        """Have the kernel's own thread answer what was asked of the kernel before this one, unless this one leaves."""
        self._owed.append(asked)

        def do() -> None:
            with self._kernel.agent.leaving.replying():
                if self._is_owed(asked):
                    answer(asked, *args)
                    self._owed.remove(asked)

        self._kernel.in_main_loop(do)

    def _is_owed(self, asked: Asked) -> bool:
        """Tell whether this kernel owes an answer, and is not a restored one: there, the one that was saved gave it."""
        self._kernel.agent.reconnection.until_known()
        return any(one is asked for one in self._owed)

    def _answer(self, asked: Asked, error: dict[str, Any] | None) -> None:
        kernel = self._kernel
        count = kernel.execution_count
        content: dict[str, Any] = {"status": "ok", "user_expressions": {}, "payload": []}
        if error is not None:
            content = {"status": "error", **error}
            self._publish("error", error, asked)
        content["execution_count"] = count
        self._reply("execute_reply", content, asked["cell"])
        self._publish("status", {"execution_state": "idle"}, asked)

    def announce(self, what: str) -> None:
        """Tell whoever listens that the kernel is ``restoring``, about to go, or ``restored``, ``asleep`` and so on.

        By a status message with a member of our own, which other clients pass over: to them it says what they know.
        """
        kernel = self._kernel
        content = {"execution_state": "busy" if self._running else "idle", "gpuckpt": what}
        kernel.session.send(kernel.iopub_socket, "status", content, parent={}, ident=kernel._topic("status"))

    def take_queued(self, asked: Asked) -> None:
        """Execute the requests that waited behind the cell that asked, as if they came now."""
        for frames in asked.get("queued", []):
            self._taken.add(self._id_of(frames))
            self._owed.append(one := {"queued": [frames]})
            self._kernel.in_main_loop(self._take, one)

    async def _take(self, asked: Asked) -> None:
        if self._is_owed(asked):
            await self._kernel.take_request([bytes.fromhex(frame) for frame in asked["queued"][0]])
            self._owed.remove(asked)

    def refuse_queued(self, asked: Asked) -> None:
        """Answer the requests that waited behind the cell as aborted, as after an error."""
        self._owe({"queued": asked.get("queued", [])}, self._refuse)

    def _refuse(self, asked: Asked) -> None:
        session = self._kernel.session
        for frames in asked["queued"]:
            idents, rest = session.feed_identities([bytes.fromhex(frame) for frame in frames])
            header = session.unpack(rest[1])
            cell = {"header": header, "idents": [ident.hex() for ident in idents]}
            reply = header["msg_type"].replace("_request", "_reply")
            self._reply(reply, {"status": "aborted"}, cell)
            self._publish("status", {"execution_state": "idle"}, {"cell": cell})

    def _reply(self, kind: str, content: dict[str, Any], cell: dict[str, Any]) -> None:
        idents = [bytes.fromhex(ident) for ident in cell["idents"]]
        self._kernel.session.send(self._kernel.reply_stream(), kind, content, parent=cell["header"], ident=idents)

    def _publish(self, kind: str, content: dict[str, Any], asked: Asked) -> None:
        kernel = self._kernel
        kernel.session.send(
            kernel.iopub_socket,
            kind,
            content,
            parent=asked["cell"]["header"],
            ident=kernel._topic(kind),
        )


def _line_that_runs() -> int:
    """Return which line of its cell the main thread is in; 0 where it runs none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return 0 if frame is None else frame.f_lineno
