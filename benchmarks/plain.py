"""The plain way: an ipykernel in a namespace, saved and restored by criu and the driver's API by hand.

No keeper, no agent, no store: criu writes its images into a folder, and nothing is verified, hashed or synced.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from jupyter_client import BlockingKernelClient
from jupyter_client.connect import write_connection_file

from jupyter_gpuckpt.freeze import cuda, images
from jupyter_gpuckpt.freeze.criu_program import find_criu
from jupyter_gpuckpt.linux import processes

from .cells import run

_FLAGS = ("--tcp-close", "--ext-unix-sk", "--file-locks", "--shell-job", "-v2")
_SLEEP = (
    "import os, time\nprint('up', flush=True)\n"
    "while True:\n    try: os.wait()\n    except ChildProcessError: time.sleep(0.05)\n"
)


class PlainKernel:
    """One kernel without any of this project's parts; `folder` is its own."""

    def __init__(self, folder: Path) -> None:
        self._criu = find_criu()
        self._images, self._file = folder / "images", folder / "kernel.json"
        self._log = folder / "out"
        self._worker = cuda.CudaWorker()
        write_connection_file(str(self._file), ip="127.0.0.1", key=b"benchmark")
        self._namespace = self._fresh_namespace()
        self._inside("sh", "-c", "echo 10000 > /proc/sys/kernel/ns_last_pid")
        launch = f'exec "$0" -m ipykernel_launcher -f {self._file} </dev/null >{self._log} 2>&1'
        subprocess.Popen([*self._enter(), "setsid", "sh", "-c", launch, sys.executable], stdin=subprocess.DEVNULL)
        self.client = BlockingKernelClient(connection_file=str(self._file))
        self.client.load_connection_file()
        self.client.start_channels()
        try:
            self._wait_for_ready()
        except BaseException:
            print(self._log.read_text(), file=sys.stderr)
            self.close()
            raise

    def _wait_for_ready(self) -> None:
        try:
            self.client.wait_for_ready(60)
        except RuntimeError:  # a kernel counts as dead when one heartbeat comes late, as it can while it starts
            self.client.wait_for_ready(60)

    def _fresh_namespace(self) -> subprocess.Popen[str]:
        inner = f'mount -t proc proc /proc && exec {sys.executable} -c "$0"'
        unshare = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--propagation", "private"]
        process = subprocess.Popen(
            [*unshare, "sh", "-c", inner, _SLEEP],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    def _enter(self) -> list[str]:
        init = processes.descendants(self._namespace.pid)[0]
        return ["nsenter", "-t", str(init), "-p", "-m", "--"]

    def _inside(self, *command: str) -> None:
        subprocess.run([*self._enter(), *command], check=True, stdin=subprocess.DEVNULL, capture_output=True)

    def pid(self) -> int:
        """Return the kernel's pid, as it is outside of its namespace."""
        init = processes.descendants(self._namespace.pid)[0]
        here = Path(f"/proc/{init}/ns/pid").readlink()
        everyone = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]
        return next(pid for pid in everyone if b"ipykernel" in _command(pid) and _namespace(pid) == here)

    def save(self) -> tuple[float, int]:
        """Dump the kernel, which keeps running; return for how long it was paused (seconds), and the bytes on disk."""
        shutil.rmtree(self._images, ignore_errors=True)
        self._images.mkdir(mode=0o700)
        pid = self.pid()
        on_gpu = cuda.freezable(self._worker, [pid]) if cuda.cuda_pids([pid]) else []
        began = time.perf_counter()
        if on_gpu:
            cuda.freeze(self._worker, on_gpu)
        inner = str(processes.inner_pid(pid))
        self._run_criu("dump", "-t", inner, "-D", str(self._images), "-o", "dump.log", "--leave-running")
        if on_gpu:
            cuda.thaw(self._worker, on_gpu)
        seconds = time.perf_counter() - began if on_gpu else images.frozen_seconds(self._images)
        return seconds, sum(f.stat().st_size for f in self._images.iterdir())

    def restore(self) -> float:
        """Kill the kernel and restore it; return the time until it answers a cell, in seconds."""
        began = time.perf_counter()
        self._kill()
        self._namespace = self._fresh_namespace()
        self._run_criu("restore", "-D", str(self._images), "-o", "restore.log", "-d")
        if on_gpu := cuda.cuda_pids([self.pid()]):
            cuda.thaw(self._worker, on_gpu)
        self.run("pass")
        return time.perf_counter() - began

    def forget(self) -> None:
        """Remove the images: the disk need not hold them beside our snapshot."""
        shutil.rmtree(self._images)

    def _run_criu(self, *arguments: str) -> None:
        try:
            self._inside("env", "-i", *self._criu.argv, *arguments, *_FLAGS)
        except subprocess.CalledProcessError as e:
            log = (self._images / f"{arguments[0]}.log").read_text(errors="replace")
            errors = [line for line in log.splitlines() if "Error" in line]
            raise RuntimeError(f"criu {arguments[0]} failed: {'; '.join(errors[:4]) or e.stderr}") from e

    def run(self, code: str) -> str:
        """Execute a cell and return what it printed; it is asked again until the restored kernel hears it."""
        while True:
            try:
                return run(self.client, code, 0.25 if code == "pass" else 600)
            except TimeoutError:
                continue

    def _kill(self) -> None:
        os.kill(processes.descendants(self._namespace.pid)[0], signal.SIGKILL)
        self._namespace.wait()

    def close(self) -> None:
        """End it and remove what it left."""
        self.client.stop_channels()
        self._worker.close()
        self._kill()


def _namespace(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/ns/pid").readlink()
    except OSError:
        return None


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
