"""What every kernel does before a save and after.

Garbage, cached GPU memory, workers of torch.compile, peer access, IPython's history.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .. import settings
from ..errors import DriverError, SaveFailed
from . import devices, parking
from .background import in_background

_AS_BEFORE = "The kernel was not saved; it keeps running."

_OURS = b"gpuckpt"
"""What handles of shared memory have in them that the library makes (`driver/sharing.c`)."""
_TO_END = 1.0
"""For how long a process of torch's that is only being started may take to end by itself, in seconds."""
_PENDING = ("pending_futures", "pending_jobs", "_pending_work_items")
_LATELY = 1  # the generation of objects that garbage is looked for in, with younger ones (gc)


class Housekeeping:
    """The built-in counterpart of the user's hooks, for one kernel; `shell` is IPython's."""

    def __init__(self, shell: Any) -> None:
        self._history: Any = getattr(shell, "history_manager", None)
        self._history_closed = False
        self._peers: list[dict[str, Any]] = []

    def before_save(self, *, busy: bool, automatic: bool = False) -> dict[str, Any]:
        """Make the kernel small and savable.

        `busy` says whether a cell runs that does not wait for the save. For an `automatic` one, old garbage is not
        looked for: that takes a tenth of a second in which no other thread runs.

        Returns what `_have_no_access` does.

        Raises
        ------
        SaveFailed : it cannot be made savable; nothing was changed.
        DriverError : the driver did not turn peer access off.
        """
        _refuse_shared_vram()
        if busy and devices.uses_several_gpus() and not parking.has_gate():
            raise SaveFailed(
                _AS_BEFORE,
                "A cell is running in a kernel with several GPUs: their access to each other must be switched off "
                "briefly, and a copy between them at that moment would crash the kernel.",
                "Save from a cell (`%gpuckpt save NAME`), or when no cell is running.",
            )
        # A look at all objects writes to all of them: memory that the next save would take for changed.
        gc.collect() if devices.are_used() and not automatic else gc.collect(_LATELY)
        _give_cached_vram_back()
        _end_compile_workers()
        # Other kernels write to the same file: a saved connection to it would not fit the file at a restore.
        with contextlib.suppress(Exception):
            self._close_history()
        parking.watch_gate(True)
        return self._have_no_access()

    def _have_no_access(self) -> dict[str, Any]:
        """Switch the access of the kernel's GPUs to each other's memory off, until `after`; or leave it to the library.

        That does so when nothing can use the access any more: who copies from one GPU to another without it would lose
        its context. Where there is none, this is the last thing before a freeze.

        Returns ``peers``: None where it is left to the library, empty where no GPU had access to another's memory, and
        otherwise how much GPU memory the kernel was found to have (`_gpu_memory`).

        Raises
        ------
        DriverError : the driver did not turn it off.
        """
        if devices.uses_several_gpus() and parking.has_gate():
            return {"peers": None}
        self._peers = devices.disable_peer_access()
        return {"peers": _gpu_memory() if self._peers else {}}

    def before_sleep(self) -> dict[str, Any]:
        """Make the kernel's GPU state small and movable, and return what `before_save` does.

        Raises
        ------
        SaveFailed : it cannot be moved; nothing was changed.
        DriverError : the driver did not turn peer access off.
        """
        _refuse_shared_vram()
        gc.collect()
        _give_cached_vram_back()
        _end_compile_workers()
        parking.watch_gate(True)
        return self._have_no_access()

    def before_save_asleep(self) -> dict[str, Any]:
        """Make a kernel savable that sleeps: without a touch of the GPU, which `before_sleep` has seen to."""
        with contextlib.suppress(Exception):
            self._close_history()
        return {}

    def after_save_asleep(self, *, restored: bool) -> list[str]:
        """Undo of `before_save` what can be while the kernel sleeps: `after` follows when it is awake."""
        with contextlib.suppress(Exception):
            self._open_history(new_session=restored)
        return []

    def after(self, *, restored: bool) -> list[str]:
        """Undo what `before_save` or `before_sleep` did; return what could not be undone, in words.

        A restored kernel writes a history session of its own.
        """
        faults = []
        parking.watch_gate(False)
        try:
            devices.enable_peer_access(self._peers)
        except DriverError as e:
            faults.append(f"{e} Until then, copying tensors between GPUs can break all GPU work in this kernel.")
        self._peers = []
        with contextlib.suppress(Exception):
            self._open_history(new_session=restored)
        return faults

    def _close_history(self) -> None:
        history = self._history
        if history is None or not history.enabled or history.hist_file == ":memory:":
            return
        history.writeout_cache()
        thread = getattr(history, "save_thread", None)
        if thread is not None:
            thread.stop()
            history.save_thread = None
        history.db.close()
        finalizer = getattr(history, "_finalizer", None)
        if finalizer is not None:
            finalizer.detach()  # IPython's own: it would keep every closed connection for as long as the kernel lives
        self._history_closed = True

    def _open_history(self, *, new_session: bool) -> None:
        if not self._history_closed:
            return
        self._history_closed = False
        from IPython.core.history import HistorySavingThread

        history = self._history
        try:
            # As IPython does at its start; a machine that the snapshot was not saved on may have no such folder.
            Path(history.hist_file).parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            history.enabled = False
            return
        history.init_db()
        if new_session:
            history.new_session()
        if (begun := getattr(history, "save_thread", None)) is not None:  # by a cell that began meanwhile
            begun.stop()
        history.save_thread = HistorySavingThread(history)
        history.save_thread.start()


def _refuse_shared_vram() -> None:
    """Refuse a kernel that shares GPU memory with other processes through torch.

    A process that has opened another's GPU memory (CUDA IPC) checkpoints well and is then lost at the restore, and
    neither /proc nor the driver shows it beforehand; torch's own table of shared storages does. What is shared by the
    library that memory is parked by is known better: each process says how much of others' it has open.
    """
    reductions = sys.modules.get("torch.multiprocessing.reductions")
    for key, storage in list(getattr(reductions, "shared_cache", {}).items()):
        handle = key[0] if isinstance(key, tuple) else key  # CPU memory is known by a file's numbers
        if isinstance(handle, bytes) and _OURS not in handle and not storage.expired():
            raise SaveFailed(
                _AS_BEFORE,
                "It shares GPU memory with other processes (torch.multiprocessing): the driver could not restore it.",
                "Delete the shared tensors in all processes, or pass copies on the CPU, and try again.",
            )


def _gpu_memory() -> dict[str, int]:
    """Return the bytes of GPU memory that this process is found to have in ``total``, and in its ``largest`` piece."""
    sizes = devices.allocations().values()
    return {"total": sum(sizes), "largest": max(sizes, default=0)}


def _give_cached_vram_back() -> None:
    """Have torch and CuPy return GPU memory that they hold but do not use: it would be saved as if it were used.

    The driver takes memory back when its GPU has done what it was given. That may need a call that only comes later, so
    a thread of its own waits, and is left there where it takes too long.

    Raises
    ------
    SaveFailed : a GPU is still at work.
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")

    def give_back() -> None:
        with contextlib.suppress(Exception):
            if torch is not None and torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        with contextlib.suppress(Exception):
            if cupy is not None:
                cupy.get_default_memory_pool().free_all_blocks()

    if torch is None and cupy is None:
        return
    limit = settings.lock_timeout()
    giving = in_background(give_back, "gpuckpt-cache")
    giving.join(limit)
    if giving.is_alive():
        raise SaveFailed(
            _AS_BEFORE,
            f"Work on the GPU did not pause within {limit:g} s.",
            "Wait until the GPU work is done and try again, or raise GPUCKPT_LOCK_TIMEOUT (seconds).",
        )


def bytes_on_gpus() -> int:
    """Return how much GPU memory torch's and CuPy's arrays take, in bytes, as these say at once; 0 where they do not.

    What they hold beside that they would give back before a save. JAX does not say what it holds.
    """
    held = 0
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):
        if torch is not None and torch.cuda.is_initialized():
            held += sum(torch.cuda.memory_allocated(gpu) for gpu in range(torch.cuda.device_count()))
    cupy = sys.modules.get("cupy")
    with contextlib.suppress(Exception):
        if cupy is not None:
            held += cupy.get_default_memory_pool().used_bytes()
    return int(held)


def _end_compile_workers() -> None:
    """End the processes that torch.compile keeps for what it compiles next, unless they compile something now.

    They are as many as the machine has processors, up to 32, each with all of torch imported, and would be saved with
    the kernel. torch starts new ones when it needs them (torch 2.11, `torch._inductor.async_compile`).

    The one that starts the others imports torch for some seconds first, and asks the GPU for what it is: so it is not
    left to come to that in the middle of the save.
    """
    compiling = sys.modules.get("torch._inductor.async_compile")
    if compiling is None:
        return
    with contextlib.suppress(Exception):
        # Nothing is given to a pool before it has said that it is ready.
        getting_ready = compiling.AsyncCompile._ready_future
        pools = list(compiling._pool_set)
        if all(_is_idle(pool, getting_ready) for pool in pools):
            starting = [pool.process for pool in pools if _has_pending(pool)]
            late = threading.Timer(_TO_END, lambda: [process.kill() for process in starting])
            late.start()
            try:
                compiling.shutdown_compile_workers()
            finally:
                late.cancel()


def _is_idle(pool: object, getting_ready: object) -> bool:
    """Tell whether a pool of torch's is known to have nothing to do; its table has other names in other versions."""
    tables = [vars(pool)[name] for name in _PENDING if name in vars(pool)]
    return bool(tables) and all(one is getting_ready for table in tables for one in _values(table))


def _has_pending(pool: object) -> bool:
    return any(vars(pool).get(name) for name in _PENDING)


def _values(table: Any) -> Iterable[object]:
    return table.values() if isinstance(table, dict) else table
