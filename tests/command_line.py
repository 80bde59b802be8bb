"""The installed command, as tests run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notebooks import PATIENCE

PROGRAM = str(Path(sys.executable).with_name("jupyter-gpuckpt"))
COMMAND = [PROGRAM]
"""The command's first words: where the package lies in a folder of PYTHONPATH there is no program of it."""
if not Path(PROGRAM).exists():
    COMMAND = [sys.executable, "-c", "import sys; from jupyter_gpuckpt.cli import main; sys.exit(main())"]


@dataclass
class Ran:
    """What came of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


Cli = Callable[..., Ran]


def run(*words: str, **environment: str) -> Ran:
    """Run `jupyter gpuckpt` with these words."""
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, **environment}
    )
    assert "Traceback" not in done.stderr
    return Ran(done.returncode, done.stdout, done.stderr)


@dataclass
class Orphan:
    """A kernel that no server holds any more."""

    kernel_id: str
    connection_file: str
