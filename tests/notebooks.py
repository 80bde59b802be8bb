"""A kernel and a client of it, as a user at a notebook has them."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ipykernel
from jupyter_client import BlockingKernelClient, KernelManager

SPEC = "python3-gpuckpt"
"""The name of our kernelspec."""
PATIENCE = 150.0
"""For how long a test waits for what must come, in seconds: no promise of ours, but the end of a hang."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Answer:
    """What came of a cell: everything it showed, as text; `status` is the reply's."""

    status: str
    shown: list[str] = field(default_factory=list)
    html: list[str] = field(default_factory=list)
    ename: str = ""
    evalue: str = ""
    count: int | None = None

    @property
    def text(self) -> str:
        return "\n".join(self.shown).strip()


class Notebook:
    """A kernel started as Jupyter starts it, and a client of it."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client

    def run(self, code: str, timeout: float = PATIENCE, allow_error: bool = False) -> Answer:
        """Execute a cell as a notebook does, and wait for its reply and for idle."""
        answer = Answer("")
        last = ""

        def hook(message: dict[str, Any]) -> None:
            nonlocal last
            content = message["content"]
            before, last = last, message["msg_type"]
            kind = last
            if kind == before == "stream":
                answer.shown[-1] += content["text"]  # what one print writes may come in pieces
            elif kind == "stream":
                answer.shown.append(content["text"])
            elif kind in ("execute_result", "display_data", "update_display_data"):
                answer.shown.append(content["data"].get("text/plain", ""))
                answer.html.append(content["data"].get("text/html", ""))
            elif kind == "error":
                answer.ename, answer.evalue = content["ename"], content["evalue"]
                answer.shown.append(_ANSI.sub("", "\n".join(content["traceback"])))

        self.look_at_outputs()
        reply = self.client.execute_interactive(code, output_hook=hook, timeout=timeout)
        if reply["content"]["status"] == "aborted" and ipykernel.version_info < (7,):
            # It aborts what comes behind an error for a moment longer than it says that it is busy.
            reply = self.client.execute_interactive(code, output_hook=hook, timeout=timeout)
        answer.status, answer.count = reply["content"]["status"], reply["content"].get("execution_count")
        if answer.status != "ok" and not allow_error:
            raise AssertionError(f"{code!r} ended with {answer.status}: {answer.text}")
        return answer

    def reply(self, timeout: float = PATIENCE) -> dict[str, Any]:
        """Return the next reply to a cell that was sent; after one of an error, once the kernel takes cells again.

        For a moment after an error ipykernel aborts what comes, as it does on a plain kernel.
        """
        reply: dict[str, Any] = self.client.get_shell_msg(timeout=timeout)
        if reply["content"]["status"] == "error":
            self._wait_for_idle(reply["parent_header"]["msg_id"])
        return reply

    def _wait_for_idle(self, msg_id: str) -> None:
        with contextlib.suppress(queue.Empty):  # the test has read it itself
            while True:
                message = self.client.get_iopub_msg(timeout=2)
                idle = message["content"].get("execution_state") == "idle"
                if idle and message["parent_header"].get("msg_id") == msg_id:
                    return

    def until_printed(self, text: str) -> None:
        """Wait until a cell that runs has printed this: it may come in pieces."""
        printed = ""
        while text not in printed:
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            if message["msg_type"] == "stream":
                printed += message["content"]["text"]

    def value(self, expression: str) -> str:
        """Return what an expression prints."""
        return self.run(f"print({expression})").text

    def look_at_outputs(self) -> None:
        """Subscribe to them again after a restore, as a client does when it looks; the kernel waits for that."""
        self.client.iopub_channel.socket.poll(0)

    def look(self, expression: str) -> str:
        """Return the representation of a value, which is asked for without a cell of the user's."""
        self.look_at_outputs()
        asked = self.client.execute("", silent=True, user_expressions={"said": expression})
        while (reply := self.reply())["parent_header"]["msg_id"] != asked:
            pass
        return str(reply["content"]["user_expressions"]["said"]["data"]["text/plain"])

    def fails(self, code: str, timeout: float = PATIENCE) -> Answer:
        """Execute a cell that must end with an error."""
        answer = self.run(code, timeout, allow_error=True)
        assert answer.status == "error", answer.text
        return answer

    def wait_for_ready(self) -> None:
        """Wait until the kernel, which was started again, answers and is heard."""
        wait_for_ready(self.client)

    @property
    def folder(self) -> Path:
        """The folder of this kernel's keeper."""
        return Path(os.environ["JUPYTER_RUNTIME_DIR"], "gpuckpt", self.manager.provisioner.kernel_id)

    @property
    def keeper(self) -> Any:
        """A connection to this kernel's keeper."""
        from jupyter_gpuckpt.client import keepers
        from jupyter_gpuckpt.client.record import KernelFolder

        return keepers.connect(KernelFolder(self.folder))

    def kill_keeper(self) -> None:
        """Kill this kernel's keeper, and wait until the manager, which looks now and then, has given it another."""
        from jupyter_gpuckpt.client.record import KernelFolder

        folder = KernelFolder(self.folder)
        killed = folder.state().keeper
        assert killed is not None
        os.kill(killed[0], signal.SIGKILL)

        def is_replaced() -> bool:
            assert self.manager.is_alive()
            return folder.state().keeper != killed

        wait_until(is_replaced)

    def close(self) -> None:
        self.hang_up()
        self.manager.shutdown_kernel(now=True)

    def hang_up(self) -> None:
        """Close the client and its context, whose twenty descriptors jupyter_client keeps until it is collected."""
        self.client.stop_channels()
        self.client.context.destroy(linger=0)


StartKernel = Callable[..., Notebook]


def start_kernel(spec: str = SPEC, transport: str = "tcp", **kwargs: Any) -> Notebook:
    """Start a kernel, and wait until it answers; where it does not, its logs are told, and nothing of it is left."""
    manager = KernelManager(kernel_name=spec, transport=transport)
    manager.start_kernel(**kwargs)
    notebook = Notebook(manager, manager.client())
    open_channels(notebook.client)
    try:
        notebook.wait_for_ready()
    except AssertionError as e:
        logs = "\n".join(path.read_text() for path in sorted(notebook.folder.rglob("*.log")))
        notebook.close()
        raise AssertionError(f"{e}; its logs say:\n{logs}") from e
    return notebook


def open_channels(client: BlockingKernelClient) -> None:
    """Open a client's channels but for the heartbeat, which a test that wants it starts, and waits for.

    jupyter_client's thread for it, where it is stopped before it has begun, opens sockets until there are no more.
    """
    client.start_channels(hb=False)


def client_of(connection_file: Path | str) -> BlockingKernelClient:
    """Return a client of a kernel that somebody else holds, with its channels open."""
    client = BlockingKernelClient(connection_file=str(connection_file))
    client.load_connection_file()
    open_channels(client)
    return client


@contextlib.contextmanager
def connected(connection_file: Path | str) -> Iterator[Notebook]:
    """Give a client of a kernel that somebody else holds, once it answers; it hangs up at the end."""
    notebook = Notebook(None, client_of(connection_file))  # type: ignore[arg-type]
    try:
        notebook.wait_for_ready()
        yield notebook
    finally:
        notebook.hang_up()


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders in a kernel's; what is called like one and is a socket or a file is none."""
    return [path for path in folder.glob("run-*") if path.is_dir()]


def wait_until(condition: Callable[[], Any], timeout: float = PATIENCE, what: str = "", every: float = 0.01) -> Any:
    """Wait for something that other processes do, looking every so many seconds; fail when it does not come."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, what or "it did not come about in time"
        time.sleep(every)
    return value


def wait_for_ready(client: BlockingKernelClient, timeout: float = PATIENCE) -> None:
    """Wait until a kernel answers and what it publishes is heard, and leave nothing of that to be read.

    jupyter_client's own waits a fifth of a second longer for each, and takes one late heartbeat for a death.
    """
    deadline = time.monotonic() + timeout
    while True:
        assert time.monotonic() < deadline, "the kernel does not answer, or nothing that it publishes is heard"
        asked = client.kernel_info()
        if _is_answered(client, asked) and _is_heard(client, asked):
            return


def _is_answered(client: BlockingKernelClient, asked: str) -> bool:
    with contextlib.suppress(queue.Empty):  # as where it was sent to a kernel that was just being ended
        while client.get_shell_msg(timeout=2)["parent_header"].get("msg_id") != asked:
            pass  # what was asked before is answered before
        return True
    return False


def _is_heard(client: BlockingKernelClient, asked: str) -> bool:
    deadline = time.monotonic() + 0.2
    with contextlib.suppress(queue.Empty):
        while True:
            message = client.get_iopub_msg(timeout=max(0, deadline - time.monotonic()))
            idle = message["content"].get("execution_state") == "idle"
            if idle and message["parent_header"].get("msg_id") == asked:
                return True
    return False
