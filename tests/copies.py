"""Forking kernels in tests: clients of copies, and what is done to all of them at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from notebooks import PATIENCE, Answer, Notebook, client_of

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.client import keepers
from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.errors import GpuckptError


class Copy(Notebook):
    """A client of a copy, and what the fork said of it as `told`."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__(None, client_of(told["connection_file"]))  # type: ignore[arg-type]
        self.told = told
        self._is_heard = False

    @property
    def folder(self) -> Path:
        return settings.kernels_dir() / str(self.told["id"])

    def run(self, code: str, timeout: float = PATIENCE, allow_error: bool = False) -> Answer:
        """Execute a cell as `Notebook.run`; before the first one, wait until what the copy says is heard."""
        if not self._is_heard:
            self.wait_for_ready()
            self._is_heard = True
        return super().run(code, timeout, allow_error)

    def close(self) -> None:
        """End the copy as `jupyter gpuckpt stop` does."""
        self.hang_up()
        with contextlib.suppress(GpuckptError), keepers.connect(KernelFolder(self.folder)) as keeper:
            keeper.request("close")


Fork = Callable[..., Sequence[Copy]]


@contextlib.contextmanager
def forking() -> Iterator[Fork]:
    """Give a function that forks a kernel and returns clients of the copies, which are ended at the end."""
    copies: list[Copy] = []

    def fork(notebook: Notebook, **request: Any) -> Sequence[Copy]:
        with notebook.keeper as keeper:
            result = keeper.request("fork", request, timeout=PATIENCE)
        made = [Copy(told) for told in result["kernels"]]
        copies.extend(made)
        fork.warnings = result["warnings"]  # type: ignore[attr-defined]
        return made

    try:
        yield fork
    finally:
        for copy in copies:
            copy.close()
