"""Driver calls with a time limit each, made in a worker process that can be killed.

This side imports no CUDA package: the keeper stays small, and a driver that hangs hangs the worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, Literal, get_args

from .. import settings
from ..errors import DriverError
from .gpu_processes import stopped

__all__ = ["CudaWorker", "Gpu", "State", "Usage"]

State = Literal["none", "running", "locked", "checkpointed", "failed"]
"""The CUDA state of a process; ``none``: it has no CUDA state at all."""

_QUERY_TIMEOUT = 30.0
"""Seconds that a call may take which only asks."""
_LOCK_GRACE = 5.0
"""Seconds that `lock` may outlast its own time limit."""
_DEATH_TIMEOUT = 5.0
"""Seconds to wait for a killed worker; one that sits in the kernel's driver is left to itself."""


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine, as NVML knows it."""

    index: int
    uuid: str
    """As `nvidia-smi -L` prints it: ``GPU-`` and 32 hexadecimal digits."""
    name: str
    total: int
    """Bytes of memory."""
    free: int
    """Bytes of memory that nobody holds."""
    mig: bool
    """Whether the GPU is split into MIG instances."""
    driver: str
    """The version of the machine's NVIDIA driver, such as ``580.159.04``."""


@dataclass(frozen=True)
class Usage:
    """What one process holds on one GPU."""

    gpu: str
    """The GPU's UUID."""
    pid: int
    bytes: int | None
    """None where the driver does not say."""
    mps: bool
    """Whether the process reaches the GPU through MPS."""


class CudaWorker:
    """The CUDA driver, reached through a worker process.

    The worker starts at the first call and is kept: starting CUDA takes up to seconds. A call that
    does not return in time kills it, and the next call starts another one. Calls from several
    threads take turns.

    Every method raises `DriverError` when the driver refuses or the time is over, with
    ``call``, ``pid``, ``number`` and ``name`` (of the `CUresult`; the number is None where there is
    none, as after a time-out: name ``TIMEOUT``) in its data.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._turn = threading.Lock()
        self._stderr: IO[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while none is running."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def version(self) -> int:
        """Return the newest CUDA that the driver knows: 1000 * major + 10 * minor."""
        return int(self._ask("version", None, _QUERY_TIMEOUT))

    def gpus(self) -> list[Gpu]:
        """Return the GPUs of this machine; none without an NVIDIA driver."""
        return [Gpu(**gpu) for gpu in self._ask("gpus", None, _QUERY_TIMEOUT)]

    def usage(self) -> list[Usage]:
        """Return what processes hold on the GPUs, as far as the driver tells."""
        return [Usage(**usage) for usage in self._ask("usage", None, _QUERY_TIMEOUT)]

    def state(self, pid: int) -> State:
        """Return the CUDA state of a process.

        While another process's call on it is still under way, this waits for that one's end.
        """
        name = self._ask("state", pid, settings.driver_timeout())
        for state in get_args(State):
            if name == state:
                return state  # type: ignore[no-any-return]
        raise _error("state", pid, None, str(name), "this state is not known here")

    def lock(self, pid: int, timeout_s: float) -> None:
        """Hold back CUDA calls of a running process, once its GPU work is done.

        The driver gives up after `timeout_s` seconds (CUDA_ERROR_NOT_READY: still at work).
        """
        limit = timeout_s + _LOCK_GRACE
        self._ask("lock", pid, limit, timeout_ms=max(1, round(timeout_s * 1000)))
        self._expect("lock", pid, "locked")

    def checkpoint(self, pid: int) -> None:
        """Move the GPU state of a locked process into its host memory; its GPU memory is free."""
        self._ask("checkpoint", pid, settings.driver_timeout())
        self._expect("checkpoint", pid, "checkpointed")

    def restore(self, pid: int, gpu_map: Mapping[str, str] | None = None) -> None:
        """Move the GPU state of a checkpointed process back; it is locked then.

        `gpu_map` goes from each GPU's UUID at the checkpoint to the one to use now, and must name
        every GPU; None leaves the choice to the driver: the same ones.
        """
        pairs = dict(gpu_map) if gpu_map else None
        self._ask("restore", pid, settings.driver_timeout(), gpu_map=pairs)
        self._expect("restore", pid, "locked")

    def unlock(self, pid: int) -> None:
        """Let a locked process make CUDA calls again."""
        self._ask("unlock", pid, settings.driver_timeout())
        self._expect("unlock", pid, "running")

    def close(self) -> None:
        """End the worker and close its pipes; the next call would start another one."""
        self.kill()
        with self._turn:
            self._discard()

    def kill(self) -> None:
        """Kill the worker at once, also from another thread: a call under way fails."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_DEATH_TIMEOUT)

    def __enter__(self) -> CudaWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _expect(self, call: str, pid: int, expected: State) -> None:
        found = self.state(pid)
        if found != expected:
            why = f"the driver reported success, but the process is {found}, not {expected}"
            raise _error(call, pid, None, "UNEXPECTED_STATE", why)

    def _ask(self, call: str, pid: int | None, limit: float, **arguments: Any) -> Any:
        if pid is not None and stopped(pid):
            raise _error(call, pid, None, "STOPPED", "the process is stopped and cannot answer")
        with self._turn:
            process = self._running(call, pid)
            if pid is not None:
                arguments["pid"] = pid
            request = json.dumps({"call": call, **arguments}).encode() + b"\n"
            answer = self._exchange(process, request, call, pid, limit)
        if "error" in answer:
            error = answer["error"]
            raise _error(call, pid, error["number"], error["name"], error["text"])
        return answer["value"]

    def _running(self, call: str, pid: int | None) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._discard()
        self._pending = b""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - _discard closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_gpuckpt.freeze.cuda_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=_every_gpu(os.environ),
            start_new_session=True,  # neither a terminal's Ctrl-C nor the kernel's group reaches it
        )
        self._exchange(self._process, b"", call, pid, settings.driver_timeout())
        return self._process

    def _exchange(
        self,
        process: subprocess.Popen[bytes],
        request: bytes,
        call: str,
        pid: int | None,
        limit: float,
    ) -> dict[str, Any]:
        """Send a request (a few hundred bytes: it fits a pipe) and return its answer."""
        assert process.stdin is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = self._line(process, time.monotonic() + limit)
        except BrokenPipeError:
            line = b""
        except TimeoutError:
            self.kill()
            self._discard()
            why = f"it did not return within {limit:g} s; the process that made it was killed"
            raise _error(call, pid, None, "TIMEOUT", why, timeout_s=limit) from None
        except BaseException:  # interrupted: its answer must not be taken for that of another call
            self.kill()
            self._discard()
            raise
        if not line:
            self.kill()
            why = f"the process that made it ended: {self._last_words()}"
            self._discard()
            raise _error(call, pid, None, "WORKER_DIED", why)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes:
        """Return one line of the worker's, or nothing when it has ended."""
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise TimeoutError
            read = os.read(pipe, 65536)
            if not read:
                return b""
            self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _discard(self) -> None:
        process, self._process = self._process, None
        stderr, self._stderr = self._stderr, None
        pipes = () if process is None else (process.stdin, process.stdout)
        for pipe in (*pipes, stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _last_words(self) -> str:
        assert self._stderr is not None
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "no word of why")


def _every_gpu(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that hide GPUs: a map names every one of them."""
    return {k: v for k, v in environment.items() if k != "CUDA_VISIBLE_DEVICES"}


def _error(call: str, pid: int | None, number: int | None, name: str, why: str, **data: Any) -> DriverError:
    of = "" if pid is None else f" of process {pid}"
    return DriverError(
        f"The CUDA driver's {call}{of} failed.",
        why if number is None else f"{why} (CUresult {number})",
        "; ".join(_next(name)),
        call=call,
        pid=pid,
        number=number,
        name=name,
        **data,
    )


def _next(name: str) -> Iterator[str]:
    if name == "NO_DRIVER":
        yield "install an NVIDIA driver of 570 or newer, and see that libcuda.so.1 can be found"
    elif name == "NO_SUCH_CALL":
        yield "install an NVIDIA driver of 570 or newer, and cuda-bindings of 12.8 or newer"
    elif name == "STOPPED":
        yield "let it go on (`kill -CONT`, or detach the debugger)"
    elif name == "TIMEOUT":
        yield "see `nvidia-smi` and the system log for a hung GPU"
        yield "GPUCKPT_DRIVER_TIMEOUT sets the seconds that a call may take"
    else:
        yield "`jupyter gpuckpt doctor` checks the driver"
