"""What is cancelled in its first moment, or while a thread is at work for it, is ended and undone all the same."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest
from notebooks import wait_until

from jupyter_gpuckpt.keeper.namespace import Namespace
from jupyter_gpuckpt.keeper.operations.fresh_sleeper import to_its_end
from jupyter_gpuckpt.linux import processes

pytestmark = pytest.mark.criu  # sleepers take root


def test_a_program_that_is_cancelled_while_it_is_started_is_ended(tmp_path: Path) -> None:
    """As criu is: one that nobody knows of would dump the kernel later on, and leave it stopped."""

    async def check() -> None:
        run_dir = tmp_path / "run"
        run_dir.mkdir(mode=0o700)
        space = await Namespace.start(tmp_path, run_dir)
        try:
            await space.set_last_pid(100)
            os.kill(space.pid, signal.SIGSTOP)  # it starts nothing for now
            running = asyncio.create_task(space.run(["/bin/sleep", "1000"], env={}, stdout="/dev/null", timeout=60))
            while space._answers == {}:
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.sleep(0)
            os.kill(space.pid, signal.SIGCONT)
            with contextlib.suppress(asyncio.CancelledError):
                await running
            assert running.cancelled()
            # The sleeper has answered what came behind it, too.
            await space.set_last_pid(100)
            wait_until(lambda: processes.descendants(space.pid) == [], what="it runs on")
        finally:
            await space.kill()

    asyncio.run(check())


def test_what_a_thread_makes_is_known_when_its_cancellation_is_told() -> None:
    async def check() -> None:
        begun, go, made = threading.Event(), threading.Event(), []

        def make() -> None:
            begun.set()
            go.wait()
            made.append("a file")

        making = asyncio.create_task(to_its_end(make))
        await asyncio.to_thread(begun.wait)
        making.cancel()
        asyncio.get_running_loop().call_later(0.05, go.set)
        with contextlib.suppress(asyncio.CancelledError):
            await making
        assert making.cancelled()
        assert made == ["a file"]

    asyncio.run(check())
