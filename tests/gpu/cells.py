"""A process that runs cells: in its own process group, with a time limit on every answer."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Cells:
    """One process under test; a hang raises `TimeoutError`: it is a failure, never a skip."""

    def __init__(self, *wrapper: str, environment: Mapping[str, str] | None = None) -> None:
        root = Path(__file__).parents[2]
        paths = [str(root), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, str(Path(__file__).with_name("cell_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, source: str) -> None:
        assert self.process.stdin
        cell = json.dumps({"cell": textwrap.dedent(source)})
        self.process.stdin.write(cell.encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, limit: float = 60) -> Any:
        assert self.process.stdout
        deadline, line = time.monotonic() + limit, b""
        pipe = self.process.stdout.fileno()
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise TimeoutError(f"no answer within {limit} s")
            read = os.read(pipe, 65536)
            assert read, f"the process ended: {self.process.wait(5)}"
            line += read
        reply = json.loads(line)
        assert "error" not in reply, reply["error"]
        return reply["answer"]

    def run(self, source: str, limit: float = 60) -> Any:
        self.send(source)
        return self.answer(limit)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
