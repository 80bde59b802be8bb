"""Driver calls with a time limit each, made in a worker process that can be killed.

This side imports no CUDA package: the keeper stays small, and a driver that hangs hangs the worker.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar, get_args

from .. import settings
from ..checked import Odd, from_json
from ..errors import DriverError
from .cuda_messages import (
    Answer,
    Call,
    Checkpoint,
    Gpu,
    Gpus,
    Lock,
    NotDone,
    ProcessState,
    Restore,
    Unlock,
    Usage,
    Usages,
    Version,
    Work,
    Worked,
    answer_in,
    line,
)
from .gpu_processes import stopped
from .line_program import LineProgram

__all__ = ["CudaWorker", "Gpu", "State", "Usage"]

T = TypeVar("T")

State = Literal["none", "running", "locked", "checkpointed", "failed"]
"""The CUDA state of a process; ``none``: it has no CUDA state at all."""

_QUERY_TIMEOUT = 30.0
"""Seconds that a call may take which only asks."""
_LOCK_GRACE = 5.0
"""Seconds that `lock` may outlast its own time limit."""
_MOST = 8
"""Workers at most: each imports CUDA."""


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
        self._program: LineProgram | None = None
        self._turn, self._starting = threading.Lock(), threading.Lock()
        self._others: list[CudaWorker] = []

    def have(self, count: int) -> None:
        """Start so many workers, this one among them, up to `_MOST`, for calls at the same time."""
        with self._starting:
            others = [CudaWorker() for _ in range(min(count, _MOST) - len(self.all))]
            first: list[Callable[[], object]] = [other.version for other in others]
            if self.pid is None:
                first.append(self.gpus)  # which takes longest the first time, and is asked before all else
            if first:
                with ThreadPoolExecutor(len(first)) as together:
                    list(together.map(lambda call: call(), first))
            self._others += others

    @property
    def all(self) -> list[CudaWorker]:
        """This one, and those beside it."""
        return [self, *self._others]

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while none is running."""
        program = self._program
        return None if program is None else program.pid

    def version(self) -> int:
        """Return the newest CUDA that the driver knows: 1000 * major + 10 * minor."""
        return self._value(int, Version())

    def gpus(self) -> list[Gpu]:
        """Return the GPUs of this machine; none without an NVIDIA driver."""
        return self._value(list[Gpu], Gpus())

    def usage(self) -> list[Usage]:
        """Return what processes hold on the GPUs, as far as the driver tells."""
        return self._value(list[Usage], Usages())

    def at_work(self, since: float) -> set[int | None]:
        """Return the pids of the processes that have been at work on a GPU since a time (seconds since the epoch).

        None is among them where a GPU is at work, or may be, and the driver does not tell for whom.
        """
        return {one.pid for one in self._value(list[Worked], Work(since))}

    def state(self, pid: int) -> State:
        """Return the CUDA state of a process.

        While another process's call on it is still under way, this waits for that one's end.
        """
        name = self._ask(ProcessState(pid), settings.driver_timeout())
        for state in get_args(State):
            if name == state:
                return state  # type: ignore[no-any-return]
        raise _error("state", pid, None, str(name), "unknown state")

    def lock(self, pid: int, timeout_s: float) -> None:
        """Hold back CUDA calls of a running process, once its GPU work is done.

        The driver gives up after `timeout_s` seconds (CUDA_ERROR_NOT_READY: still at work).
        """
        limit = timeout_s + _LOCK_GRACE
        self._ask(Lock(pid, max(1, round(timeout_s * 1000))), limit)
        self._expect("lock", pid, "locked")

    def checkpoint(self, pid: int) -> None:
        """Move the GPU state of a locked process into its host memory; its GPU memory is free."""
        self._ask(Checkpoint(pid), settings.driver_timeout())
        self._expect("checkpoint", pid, "checkpointed")

    def restore(self, pid: int, gpu_map: Mapping[str, str] | None = None) -> None:
        """Move the GPU state of a checkpointed process back; it is locked then.

        `gpu_map` goes from each GPU's UUID at the checkpoint to the one to use now, and must name
        every GPU; None leaves the choice to the driver: the same ones.
        """
        pairs = dict(gpu_map) if gpu_map else None
        self._ask(Restore(pid, pairs), settings.driver_timeout())
        self._expect("restore", pid, "locked")

    def unlock(self, pid: int) -> None:
        """Let a locked process make CUDA calls again."""
        self._ask(Unlock(pid), settings.driver_timeout())
        self._expect("unlock", pid, "running")

    def close(self) -> None:
        """End the worker, and those beside it, and close the pipes; the next call would start another one."""
        for other in self._others:
            other.close()
        self._others.clear()
        self.kill()
        with self._turn:
            self._discard()

    def kill(self) -> None:
        """Kill the worker, and those beside it, at once, also from another thread: a call under way fails."""
        for other in list(self._others):
            other.kill()
        program = self._program
        if program is not None:
            program.kill()

    def __enter__(self) -> CudaWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _expect(self, call: str, pid: int, expected: State) -> None:
        found = self.state(pid)
        if found != expected:
            why = f"the driver reported success, but the process is {found}, not {expected}"
            raise _error(call, pid, None, "UNEXPECTED_STATE", why)

    def _value(self, kind: type[T], call: Call) -> T:
        """Make a call that only asks; return its value, which is of this kind."""
        value = self._ask(call, _QUERY_TIMEOUT)
        try:
            return from_json(kind, value)
        except Odd as e:
            raise _odd_answer(call, e) from e

    def _ask(self, call: Call, limit: float) -> object:
        if call.pid is not None and stopped(call.pid):
            raise _error(call.call, call.pid, None, "STOPPED", "the process is stopped and cannot answer")
        with self._turn:
            program = self._running(call)
            program.tell(line(call).encode())
            answer = self._answer(program, call, limit)
        if isinstance(answer, NotDone):
            raise _error(call.call, call.pid, answer.error.number, answer.error.name, answer.error.text)
        return answer.value

    def _running(self, call: Call) -> LineProgram:
        if self._program is not None and self._program.pid is not None:
            return self._program
        self._discard()
        self._program = LineProgram("jupyter_gpuckpt.freeze.cuda_worker", environment=_every_gpu(os.environ))
        self._answer(self._program, call, settings.driver_timeout())
        return self._program

    def _answer(self, program: LineProgram, call: Call, limit: float) -> Answer:
        try:
            heard = program.hear(limit)
        except TimeoutError:
            self._discard()
            why = f"it did not return within {limit:g} s; the process that made it was killed"
            raise _error(call.call, call.pid, None, "TIMEOUT", why, timeout_s=limit) from None
        except BaseException:  # interrupted: its answer must not be taken for that of another call
            self._discard()
            raise
        if not heard:
            program.kill()
            why = f"the process that made it ended: {program.last_words()}"
            self._discard()
            raise _error(call.call, call.pid, None, "WORKER_DIED", why)
        try:
            return answer_in(heard)
        except ValueError as e:
            self._discard()
            raise _odd_answer(call, e) from e

    def _discard(self) -> None:
        program, self._program = self._program, None
        if program is not None:
            program.kill()
            program.close()


def _every_gpu(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that hide GPUs: a map names every one of them."""
    return {k: v for k, v in environment.items() if k != "CUDA_VISIBLE_DEVICES"}


def _odd_answer(call: Call, why: ValueError) -> DriverError:
    return _error(call.call, call.pid, None, "WORKER", f"the process that made it gave an invalid answer: {why}")


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
        yield "install an NVIDIA driver of 570 or newer, and make sure that libcuda.so.1 can be found"
    elif name == "NO_SUCH_CALL":
        yield "install an NVIDIA driver of 570 or newer, and cuda-bindings of 12.8 or newer"
    elif name == "STOPPED":
        yield "continue it (`kill -CONT`, or detach the debugger)"
    elif name == "TIMEOUT":
        yield "look for a hung GPU with `nvidia-smi` and in the system log"
        yield "GPUCKPT_DRIVER_TIMEOUT sets the seconds that a call may take"
    else:
        yield "`gpuckpt doctor` checks the driver"
