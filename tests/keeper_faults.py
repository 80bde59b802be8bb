"""What the fault tests share: a criu that does as it is told, cells that are asked and not waited for, what is left."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from notebooks import PATIENCE, Notebook, run_folders, wait_until

from jupyter_gpuckpt.freeze.criu_program import find_criu
from jupyter_gpuckpt.kernel.interrupts import ONE
from jupyter_gpuckpt.linux import processes
from jupyter_gpuckpt.linux.readiness import readable
from jupyter_gpuckpt.operations.results import Progress
from jupyter_gpuckpt.store import Store


class Criu:
    """The real criu, started by a script that tests can have do something first: ``GPUCKPT_CRIU`` names it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        found = find_criu()
        real = found.argv[: found.argv.index(found.path) + 1]
        self.program = folder / "criu"
        self._write(
            self.program,
            'case " $* " in *" dump "*) command=dump ;; *" restore "*) command=restore ;; *) command=none ;; esac\n'
            f'[ -f "{folder}/first-$command" ] && . "{folder}/first-$command"\n'
            f'echo $$ > "{folder}/pid"\nexec {" ".join(real)} "$@"',
        )

    def _write(self, path: Path, script: str) -> None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)

    def first(self, command: str, script: str) -> None:
        """Before the next runs of ``criu dump`` or ``criu restore``, run this shell script."""
        (self.folder / f"first-{command}").write_text(script)

    def at(self, command: str, stage: str, script: str, fault: int | None = None) -> None:
        """Run this shell script at a stage of criu's, and have that `fault` happen as well."""
        action = self.folder / f"action-{command}"
        self._write(action, f'[ "$CRTOOLS_SCRIPT_ACTION" = {stage} ] || exit 0\n{script}')
        self.first(command, f'{f"export CRIU_FAULT={fault}" if fault else ""}\nset -- "$@" --action-script "{action}"')

    def kill_at(self, command: str, stage: str) -> None:
        """Have criu be killed at a stage."""
        self.at(command, stage, f'kill -9 $(cat "{self.folder}/pid")')

    def fault(self, command: str, number: int) -> None:
        """Have criu fail at one of its own fault points (criu/include/fault-injection.h)."""
        self.first(command, f"export CRIU_FAULT={number}")

    @contextlib.contextmanager
    def held_at(self, command: str, stage: str) -> Iterator[Callable[[], None]]:
        """Hold criu at a stage; what this gives waits until it is there.

        At its "start" it has not done anything, and does afterwards what else it was told.
        """
        reached, go = self.folder / "reached", self.folder / "go"
        for path in (reached, go):
            path.unlink(missing_ok=True)
        gate = f'touch "{reached}"\nwhile [ ! -e "{go}" ]; do sleep 0.01; done'
        if stage == "start":
            told = self.folder / f"first-{command}"
            self.first(command, f"{gate}\n{told.read_text() if told.exists() else ''}")
        else:
            self.at(command, stage, gate)
        try:
            yield lambda: wait_until(reached.exists, what=f"criu {command} never came to {stage}")
        finally:
            self.honest()
            go.touch()

    def hang_in_mid_dump(self) -> None:
        """Have the next dumps hang (criu is stopped) when criu talks with its own code in a process of the tree."""
        # By a socket of this name, which is no listening one. Another criu of the machine may have one, too. Who stops
        # or kills criu before, while it puts that code there, can kill the process with it.
        script = self.folder / "hang.py"
        script.write_text(
            "import contextlib, os, signal, sys, time\n"
            "from pathlib import Path\n"
            # It talks for a few milliseconds: what looks for that must not wait for a processor.
            "with contextlib.suppress(OSError): os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))\n"
            f"open({str(self.folder / 'watching')!r}, 'w').close()\n"
            "criu, kernel = sys.argv[1], sys.argv[sys.argv.index('-t') + 1]\n"
            "def is_held(): return f'TracerPid:\\t{criu}\\n' in open(f'/proc/{kernel}/status').read()\n"
            "def own():\n"
            "    for fd in Path(f'/proc/{criu}/fd').iterdir():\n"
            "        try: yield os.readlink(fd)\n"
            "        except FileNotFoundError: pass\n"
            "def talks():\n"
            "    rows = [row.split() for row in open('/proc/net/unix', errors='replace') if '/gpuckpt-criu/' in row]\n"
            "    talking = {f'socket:[{row[6]}]' for row in rows if row[3] != '00010000'}\n"
            "    return bool(talking & set(own())) if talking else False\n"
            "while not (is_held() and talks()): time.sleep(0.0002)\n"
            "os.kill(int(criu), signal.SIGSTOP)\n"
        )
        watching = self.folder / "watching"
        watching.unlink(missing_ok=True)
        self.first("dump", f'"{sys.executable}" "{script}" $$ "$@" &\nwhile [ ! -e "{watching}" ]; do sleep 0.01; done')

    def hangs(self, kernel: int) -> bool:
        """Tell whether a criu that `hang_in_mid_dump` stops has come to that, and holds this process."""
        tracer = processes.tracer(kernel)
        return bool(tracer) and bool(processes.stopped([tracer]))

    def honest(self) -> None:
        """From now on, only be the real one."""
        for path in self.folder.glob("first-*"):
            path.unlink()


class Asked:
    """A cell that was sent, and is answered while the test does something else."""

    def __init__(self, notebook: Notebook, code: str) -> None:
        self._notebook, self._client = notebook, notebook.client
        self._content: dict[str, Any] | None = None
        self.id = notebook.client.execute(code)

    def is_answered(self) -> bool:
        """Tell whether the cell's reply has come."""
        while self._content is None and self._client.shell_channel.msg_ready():
            self._take(1)
        return self._content is not None

    def _take(self, timeout: float) -> None:
        message = self._notebook.reply(timeout)
        if message["parent_header"].get("msg_id") == self.id:
            self._content = message["content"]

    def answer(self, timeout: float = PATIENCE) -> dict[str, Any]:
        """Return the content of the cell's reply, which must come in time."""
        deadline = time.monotonic() + timeout
        while self._content is None:
            self._take(max(0.01, deadline - time.monotonic()))
        self._notebook.look_at_outputs()
        return self._content


class Requested(threading.Thread):
    """A request to the keeper from outside; `on_stage` is called when the keeper enters a stage."""

    def __init__(
        self, notebook: Notebook, op: str, args: dict[str, Any], on_stage: Callable[[str], None] = lambda _: None
    ) -> None:
        super().__init__(daemon=True)
        self._keeper, self._op, self._args, self._on_stage = notebook.keeper, op, args, on_stage
        self._last = ""
        self.result: Any = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._keeper.request(self._op, self._args, timeout=PATIENCE, progress=self._take)
        except Exception as e:
            self.error = e
        finally:
            self._keeper.close()

    def _take(self, progress: Progress) -> None:
        if progress.stage != self._last:
            self._last = progress.stage
            self._on_stage(self._last)

    def outcome(self, timeout: float = PATIENCE) -> Any:
        """Wait for the answer; return the result or the error."""
        self.join(timeout)
        assert not self.is_alive(), "the keeper gave no answer"
        return self.error or self.result


def state(notebook: Notebook) -> dict[str, Any]:
    """Return what the keeper wrote down about its kernel."""
    found: dict[str, Any] = json.loads((notebook.folder / "state.json").read_text())
    return found


def status(notebook: Notebook) -> dict[str, Any]:
    """Return what the keeper tells of its kernel."""
    with notebook.keeper as keeper:
        found: dict[str, Any] = keeper.request("status")
    return found


def is_asleep(notebook: Notebook) -> bool:
    return bool(status(notebook)["state"] == "sleeping")


@contextlib.contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[None]:
    """Mount a file system of its own at a path."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0700", "none", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def keeper_pid(notebook: Notebook) -> int:
    return int(state(notebook)["keeper"][0])


def kill_keeper(notebook: Notebook) -> None:
    """Kill the keeper and wait for its end."""
    fd = os.pidfd_open(keeper_pid(notebook))
    signal.pidfd_send_signal(fd, signal.SIGKILL)
    assert readable(fd, seconds=PATIENCE)
    os.close(fd)


def _unread(notebook: Notebook) -> str:
    """Return what the kernel has said to its keeper, which is stopped and has not read it; it stays unread (tee(2))."""
    (fifo,) = notebook.folder.glob("run-*/from-kernel")
    said, (copy, into) = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), os.pipe2(os.O_NONBLOCK)
    try:
        ctypes.CDLL(None).tee(said, into, 1 << 16, 2)  # SPLICE_F_NONBLOCK
        with contextlib.suppress(BlockingIOError):
            return os.read(copy, 1 << 16).decode()
        return ""
    finally:
        for fd in (said, copy, into):
            os.close(fd)


def interrupt_twice(notebook: Notebook, kernel: int, op: str) -> None:
    """Interrupt a cell that waits for a stopped keeper to do this: first it asks that to cancel, then it gives up."""
    for asked in (op, "cancel"):
        wait_until(lambda asked=asked: f'"op": "{asked}"' in _unread(notebook), what=f"it never asked for {asked}")
        time.sleep(ONE)  # within that they are one
        os.kill(kernel, signal.SIGINT)  # a manager would send it by the keeper


def until_stage(notebook: Notebook, stage: str, cell: Asked) -> None:
    """Wait until the keeper is at this stage of what a cell asked for; or has done it, if it was quicker than we."""
    with notebook.keeper as keeper:
        wait_until(lambda: keeper.request("status")["stage"] == stage or cell.is_answered(), what=f"never {stage}")


def store() -> Path:
    return Path(os.environ["GPUCKPT_STORE"])


def names() -> set[str]:
    """Return the names of the snapshots that exist."""
    return {path.stem for path in (store() / "snapshots").glob("*.json")}


def assert_no_litter() -> None:
    """The store holds what its manifests name, and nothing else."""
    found = Store(store())
    assert found.check().faults == []
    found.collect()
    manifests = found.list()
    ids = {manifest.id for manifest in manifests}
    for folder in ("contents", "index"):
        assert {path.name for path in (store() / folder).iterdir()} == ids
    assert {path.name for path in (store() / "snapshots").iterdir()} == {m.name + ".json" for m in manifests}
    assert list((store() / "saving").iterdir()) == []
    assert {path.name for path in (store() / "locks").iterdir()} <= {"collect"}


def assert_works(notebook: Notebook) -> None:
    """The kernel can be saved and restored as if nothing had happened, and no litter is left by what did."""
    notebook.run("check = 1")
    notebook.run("%gpuckpt save afterwards --replace")
    assert_no_litter()
    notebook.run("check = 2")
    notebook.run("%gpuckpt restore afterwards")
    assert notebook.value("check") == "1"
    # One sleeper with its run folder, and no working copies; a restore is done before the last kernel's are gone.
    wait_until(lambda: len(list(notebook.folder.glob("run-*.sock"))) == 1, what="another kernel's socket stays")
    wait_until(lambda: len(run_folders(notebook.folder)) == 1, what="another kernel's run folder stays")
    wait_until(lambda: not (notebook.folder / "restore").exists())


def processes_of(folder: Path) -> set[int]:
    """Return the living processes of this test: those that name its folder on their command line or environment."""
    found = set()
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and int(path.name) != os.getpid():
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
                if os.fsencode(folder) in words:
                    found.add(int(path.name))
    return found


def assert_nothing_left(folder: Path) -> None:
    """No process of this test lives, and the runtime folder holds no kernel."""
    wait_until(lambda: not processes_of(folder), what="processes are left")
    kernels = Path(os.environ["JUPYTER_RUNTIME_DIR"], "gpuckpt")
    wait_until(lambda: not list(kernels.glob("[!.]*")), what="a kernel's folder is left")
