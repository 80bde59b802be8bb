"""The installed command, as tests run it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = str(Path(sys.executable).with_name("jupyter-gpuckpt"))


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


@dataclass
class Orphan:
    """A kernel that no server holds any more."""

    kernel_id: str
    connection_file: str
