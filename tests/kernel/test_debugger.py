"""The notebook's debugger: the Debug Adapter Protocol through the control channel, before a restore and after."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from notebooks import PATIENCE, Notebook, StartKernel

from jupyter_gpuckpt.errors import SaveFailed

_CODE = "a = 1\nb = a + 1\nc = b + 1\n"


class Debugger:
    """What JupyterLab sends when somebody debugs a cell."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook, self._client = notebook, notebook.client
        self._numbers = itertools.count(1)

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        content = {"type": "request", "seq": next(self._numbers), "command": command, "arguments": arguments}
        request = self._client.session.msg("debug_request", content)
        self._client.control_channel.send(request)
        while True:
            reply = self._client.get_control_msg(timeout=PATIENCE)
            if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
                answer: dict[str, Any] = reply["content"]
                assert answer["success"], answer
                return answer.get("body") or {}

    def start(self) -> None:
        assert self.ask("debugInfo")["isStarted"] is False
        self.ask("initialize", clientID="test", adapterID="", pathFormat="path", linesStartAt1=True)
        self.ask("attach")

    def run_until_stopped(self) -> str:
        """Run a cell that stops at its second line; return the request."""
        path = self.ask("dumpCell", code=_CODE)["sourcePath"]
        self.folder = Path(path).parent
        self.ask("setBreakpoints", source={"path": path}, breakpoints=[{"line": 2}], sourceModified=False)
        self.ask("configurationDone")
        request: str = self._client.execute(_CODE)
        while True:
            message = self._client.get_iopub_msg(timeout=PATIENCE)
            if message["msg_type"] == "debug_event" and message["content"]["event"] == "stopped":
                break
        self._stopped = message["content"]["body"]["threadId"]
        assert self.ask("stackTrace", threadId=self._stopped)["stackFrames"][0]["line"] == 2
        return request

    def go_on(self, request: str) -> None:
        self.ask("continue", threadId=self._stopped)
        # Where the kernel was slow to start, it was asked about itself more than once, and that is answered first.
        while (reply := self._client.get_shell_msg(timeout=PATIENCE))["parent_header"]["msg_id"] != request:
            assert reply["msg_type"] == "kernel_info_reply"
        assert reply["content"]["status"] == "ok"

    def end(self) -> None:
        self.ask("disconnect", restart=False, terminateDebuggee=False)

    def debug_a_cell(self) -> None:
        """From the beginning to the end; the debugger stays on."""
        self.go_on(self.run_until_stopped())
        assert self._notebook.value("c") == "3"


@pytest.fixture(autouse=True)
def _cells_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is killed leaves the folder of what was debugged, as ipykernel does."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.mark.parametrize("how", ["fresh", "restored", "restored in another kernel"])
def test_a_cell_is_debugged(start: StartKernel, how: str) -> None:
    notebook = start()
    if how != "fresh":
        notebook.run("%gpuckpt save here")
        if how == "restored in another kernel":
            notebook = start()
        notebook.run("%gpuckpt restore here")
    for _ in range(2):
        debugger = Debugger(notebook)
        debugger.start()
        debugger.debug_a_cell()
        debugger.end()
    # All kernels have one pid in their namespaces: by that alone, anybody could have made the folder beforehand.
    pid = notebook.value("__import__('os').getpid()")
    assert debugger.folder.name != f"ipykernel_{pid}"
    assert debugger.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("ended", [True, False])
def test_a_debugger_that_was_on_is_off_in_the_restored_kernel_and_can_be_started_again(
    start: StartKernel, ended: bool
) -> None:
    notebook = start()
    debugger = Debugger(notebook)
    debugger.start()
    debugger.debug_a_cell()
    if ended:
        debugger.end()
    notebook.run("%gpuckpt save here")
    if not ended:
        # In the kernel that was saved, it goes on.
        debugger.debug_a_cell()
    copy = start()
    for restored in (notebook, copy):
        restored.run("%gpuckpt restore here")
        # debugpy starts Python children under the debugger: without it, as this one has been lost, they must start too.
        restored.run("import subprocess, sys; child = [sys.executable, '-c', 'print(5)']")
        assert restored.value(f"subprocess.run(child, capture_output=True, timeout={PATIENCE}).stdout") == r"b'5\n'"
        again = Debugger(restored)
        again.start()
        again.debug_a_cell()
        again.end()


def test_a_kernel_that_is_stopped_at_a_breakpoint_is_not_saved(notebook: Notebook) -> None:
    debugger = Debugger(notebook)
    debugger.start()
    request = debugger.run_until_stopped()
    with notebook.keeper as keeper:
        with pytest.raises(SaveFailed, match="stopped it at a breakpoint"):
            keeper.request("save", {"name": "never"}, timeout=PATIENCE)
        debugger.go_on(request)
        keeper.request("save", {"name": "here"}, timeout=PATIENCE)
    assert notebook.value("c") == "3"
