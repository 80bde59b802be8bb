"""Run demo.ipynb on a kernel of our own, and tell what comes of it: ``make demo``.

The executed notebook is written to ``build/demo.ipynb``; snapshots and kernel files go to a folder that is removed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOK = Path(__file__).resolve().with_name("demo.ipynb")
EXECUTED = NOTEBOOK.parent.parent / "build" / "demo.ipynb"
KERNEL = "python3-gpuckpt"
CELL_TIMEOUT = 300  # seconds


class Account:
    """Tells of every cell under the heading before it: what it showed, and how long it took."""

    def __init__(self) -> None:
        self._began = 0.0

    def before(self, cell: Any, cell_index: int) -> None:
        """Show a heading, or start the clock (called by nbclient for every cell, text or code)."""
        if cell.cell_type == "markdown":
            first = cell.source.splitlines()[0]
            if first.startswith("#"):
                print(f"\n{first.lstrip('# ')}", flush=True)
        self._began = time.monotonic()

    def after(self, cell: Any, cell_index: int, execute_reply: Any) -> None:
        """Show what a cell showed (called by nbclient when a cell is done)."""
        seconds = time.monotonic() - self._began
        shown = [line for output in cell.outputs for line in _text(output).splitlines()]
        for line in shown:
            print(f"    {line}")
        if cell.source.startswith("%gpuckpt") and shown:
            print(f"    (the cell took {seconds:.2f} s)", flush=True)


def _text(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    return str(output.get("data", {}).get("text/plain", ""))


def main() -> int:
    """Execute the notebook; return the exit status."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    account = Account()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpuckpt-demo-") as folder:
        os.environ["GPUCKPT_STORE"] = f"{folder}/store"
        os.environ["JUPYTER_RUNTIME_DIR"] = f"{folder}/runtime"
        os.environ["TMPDIR"] = folder
        client = NotebookClient(
            notebook,
            kernel_name=KERNEL,
            timeout=CELL_TIMEOUT,
            resources={"metadata": {"path": str(NOTEBOOK.parent)}},
            on_cell_start=account.before,
            on_cell_executed=account.after,
        )
        try:
            client.execute()
        except CellExecutionError as error:
            print(f"\nThe demo failed in this cell:\n\n{error}", file=sys.stderr)
            return 1
        finally:
            EXECUTED.parent.mkdir(exist_ok=True)
            nbformat.write(notebook, EXECUTED)  # type: ignore[no-untyped-call]
    print(f"\nAll of it in {time.monotonic() - began:.1f} s. The executed notebook: {EXECUTED}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
