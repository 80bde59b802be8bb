"""This project's way: the kernel as Jupyter starts it, saved and restored by ``%gpuckpt`` in a cell."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from jupyter_client import KernelManager

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.client import keepers
from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.errors import NoSuchSnapshot
from jupyter_gpuckpt.store import Store

from .cells import run


class OurKernel:
    """One kernel held by a keeper; `environment` is added to its own."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._manager = KernelManager(kernel_name="python3-gpuckpt")
        self._manager.start_kernel(env={**os.environ, **(environment or {})})
        self.client = self._manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(60)
        self.paused = 0.0

    @property
    def _folder(self) -> Path:
        return Path(settings.kernels_dir() / self._manager.provisioner.kernel_id)

    def timings(self) -> list[str]:
        """Return what the keeper has logged of the steps of restores."""
        return [line for line in (self._folder / "keeper.log").read_text().splitlines() if ", in seconds: " in line]

    def pid(self) -> int:
        """Return the kernel's pid, as it is outside of its namespace."""
        with keepers.connect(KernelFolder(self._folder)) as keeper:
            return int(keeper.request("status")["pid"])

    def save(self, name: str = "benchmark") -> tuple[float, float, int]:
        """Save; return for how long the kernel was paused, how long the cell took (seconds), and the bytes stored.

        Where it uses a GPU, it counts as paused while it could not, as in the plain way; `paused` is for how long no
        thread of it ran. The snapshot of this name is removed first: the disk need not hold it twice.
        """
        self.remove(name)
        began = time.perf_counter()
        figures = "[r.frozen_seconds, r.gpu_seconds or r.frozen_seconds, int(r.restored)]"
        said = self.run(f"r = %gpuckpt save --wait {name}\nprint('RESULT', {figures})")
        seconds = time.perf_counter() - began
        self.paused, frozen, restored = json.loads(said.partition("RESULT ")[2])
        assert not restored
        return frozen, seconds, Store(settings.store_dir()).get(name).stored

    def remove(self, name: str) -> None:
        """Remove a snapshot, where there is one, and what only it needs."""
        with contextlib.suppress(NoSuchSnapshot):
            Store(settings.store_dir()).remove(name)

    def restore(self) -> float:
        """Restore; return the time until the cell after it is answered, in seconds."""
        began = time.perf_counter()
        self.run("%gpuckpt restore benchmark")
        self.run("pass")
        return time.perf_counter() - began

    def restore_lazily(self, touch: str) -> tuple[float, float]:
        """Restore with ``--lazy``; return the time until the cell after it is answered, and one that needs the GPU."""
        began = time.perf_counter()
        self.run("%gpuckpt restore benchmark --lazy")
        self.run("pass")
        first = time.perf_counter() - began
        self.run(touch)
        return first, time.perf_counter() - began

    def run(self, code: str) -> str:
        """Execute a cell and return what it printed."""
        return run(self.client, code)

    def look(self, expression: str) -> str:
        """Return the representation of a value, without a cell of the user's."""
        asked = self.client.execute("", silent=True, user_expressions={"said": expression})
        while (reply := self.client.get_shell_msg(timeout=600))["parent_header"]["msg_id"] != asked:
            pass
        return str(reply["content"]["user_expressions"]["said"]["data"]["text/plain"])

    def close(self) -> None:
        """End it."""
        self.client.stop_channels()
        self._manager.shutdown_kernel(now=True)
