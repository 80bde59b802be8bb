"""The only process that calls the CUDA driver: a line of JSON in, a line of JSON out.

A driver call can hang (`lock` on a stopped process does), so it belongs into a process that can be
killed. `jupyter_gpuckpt.freeze.cuda.CudaWorker` starts this one, waits for its answers, kills it.
It ends by itself when its input ends, after the call under way: a save never loses its driver call
half way because the keeper died.

A line in is a `Call`, a line out an `Answer` (`cuda_messages`). The first line out has the worker's
pid as its value: it stands.

It calls `cuda.bindings.driver`, below `cuda.core.checkpoint`, because that class turns several
results into one `RuntimeError` without a number, and what to do next hangs on the number.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from typing import Any

from .cuda_messages import (
    Answer,
    Call,
    Checkpoint,
    Fault,
    Gpus,
    Lock,
    NotDone,
    ProcessState,
    Restore,
    Unlock,
    Usages,
    Value,
    Version,
    Work,
    call_in,
    line,
)
from .nvml import Nvml, NvmlError

__all__ = ["DriverCallError", "answer", "main"]

_NO_CUDA_STATE = frozenset({"CUDA_ERROR_NOT_INITIALIZED"})
"""What the driver answers for a process without CUDA state, a zombie among them (580.159). For one
that does not exist it answers CUDA_ERROR_OPERATING_SYSTEM, for one that only uses NVML RUNNING."""
_NO_GPU = frozenset({"CUDA_ERROR_NO_DEVICE", "NO_DRIVER"})


class DriverCallError(Exception):
    """A driver call failed: its `CUresult` as number (None: no such result) and name."""

    def __init__(self, number: int | None, name: str, text: str) -> None:
        super().__init__(text)
        self.number, self.name = number, name

    def fault(self) -> NotDone:
        """Return the error as it travels."""
        return NotDone(Fault(self.number, self.name, str(self)))


class Driver:
    """The calls that can be asked for; CUDA and NVML are loaded at the first that needs them."""

    def __init__(self) -> None:
        self._cuda: Any = None
        self._nvml: Nvml | None = None

    def do(self, call: Call) -> object:
        """Make a call; return what it gave, as the call says.

        Raises
        ------
        DriverCallError, NvmlError : it failed.
        """
        match call:
            case Version():
                return self.version()
            case Gpus():
                return self._loaded_nvml().gpus()
            case Usages():
                return self._loaded_nvml().usage()
            case Work():
                return self._loaded_nvml().work(call.since)
            case ProcessState():
                return self.state(call.pid)
            case Lock():
                self.lock(call.pid, call.timeout_ms)
            case Checkpoint():
                self.checkpoint(call.pid)
            case Restore():
                self.restore(call.pid, call.gpu_map)
            case Unlock():
                self.unlock(call.pid)
        return None

    def version(self) -> int:
        """Return the newest CUDA that the driver knows: 1000 * major + 10 * minor."""
        return int(self._run("cuDriverGetVersion"))

    def state(self, pid: int) -> str:
        """Return the CUDA state of a process, ``none`` where it has none."""
        try:
            state = self._run("cuCheckpointProcessGetState", pid)
        except DriverCallError as error:
            if error.name in _NO_CUDA_STATE | _NO_GPU:
                return "none"
            raise
        return str(state.name).removeprefix("CU_PROCESS_STATE_").lower()

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Hold back new CUDA calls of a process and wait until its GPU work is done."""
        arguments = self._loaded_cuda().CUcheckpointLockArgs()
        arguments.timeoutMs = timeout_ms
        self._run("cuCheckpointProcessLock", pid, arguments)

    def checkpoint(self, pid: int) -> None:
        """Move a locked process's GPU state into its host memory."""
        self._run("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int, gpu_map: Mapping[str, str] | None) -> None:
        """Move a checkpointed process's GPU state back, to other GPUs where a map names them."""
        if not gpu_map:
            self._run("cuCheckpointProcessRestore", pid, None)
            return
        cuda = self._loaded_cuda()
        pairs, buffers = [], []
        for old, new in gpu_map.items():
            pair = cuda.CUcheckpointGpuPair()
            olds, news = _uuid_bytes(old), _uuid_bytes(new)
            pair.oldUuid = cuda.CUuuid(ctypes.addressof(olds))
            pair.newUuid = cuda.CUuuid(ctypes.addressof(news))
            pairs.append(pair)
            buffers += [olds, news]  # the bindings keep no reference to them
        arguments = cuda.CUcheckpointRestoreArgs()
        arguments.gpuPairs, arguments.gpuPairsCount = pairs, len(pairs)
        self._run("cuCheckpointProcessRestore", pid, arguments)

    def unlock(self, pid: int) -> None:
        """Let a locked process make CUDA calls again."""
        self._run("cuCheckpointProcessUnlock", pid, None)

    def _loaded_nvml(self) -> Nvml:
        if self._nvml is None:
            self._nvml = Nvml()
        return self._nvml

    def _loaded_cuda(self) -> Any:
        if self._cuda is None:
            from cuda.bindings import driver  # late: a machine without a GPU never needs it

            # Restore wants cuInit (or persistence mode) first, says the driver's reference.
            # It makes no context.
            self._cuda = driver
            try:
                self._run("cuInit", 0)
            except DriverCallError:
                self._cuda = None
                raise
        return self._cuda

    def _run(self, name: str, *arguments: Any) -> Any:
        cuda = self._loaded_cuda()
        try:
            result, *values = getattr(cuda, name)(*arguments)
        except (AttributeError, RuntimeError) as error:  # bindings or driver without the function
            kind = "NO_DRIVER" if name == "cuInit" else "NO_SUCH_CALL"
            raise DriverCallError(None, kind, f"{name}: {error}") from error
        if int(result):
            raise DriverCallError(int(result), str(result.name), f"{name} gave {result.name}")
        return values[0] if values else None


def _uuid_bytes(uuid: str) -> ctypes.Array[ctypes.c_char]:
    raw = bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))
    if len(raw) != 16:
        raise ValueError(f"not a GPU UUID: {uuid!r}")
    return ctypes.create_string_buffer(raw, 16)


def answer(driver: Driver, asked: str) -> Answer:
    """Return the answer to one line; never raises, whatever the line holds."""
    try:
        return Value(driver.do(call_in(asked)))
    except DriverCallError as error:
        return error.fault()
    except NvmlError as error:
        return DriverCallError(error.number, "NVML", str(error)).fault()
    except Exception as error:  # noqa: BLE001 - it travels to the caller, which raises it
        return DriverCallError(None, "WORKER", f"{type(error).__name__}: {error}").fault()


def main() -> None:
    """Answer requests from standard input until it ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not get between the answers
    print(line(Value(os.getpid())), file=out)
    driver = Driver()
    for asked in sys.stdin:
        print(line(answer(driver, asked)), file=out)


if __name__ == "__main__":
    main()
