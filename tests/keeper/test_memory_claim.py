"""What saves and restores stage in memory: several at once take no more together than there is plenty of."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cgroups import Cgroup, memory_cgroup
from keeper_faults import Criu
from notebooks import Notebook, StartKernel

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.keeper import memory_claim
from jupyter_gpuckpt.keeper.memory_claim import MemoryClaim, claimed

MB = 1 << 20

_STAGES = """
import os, sys
from pathlib import Path
from jupyter_gpuckpt import settings
from jupyter_gpuckpt.keeper.staging import claim_memory

class Space:
    kernel_dir = settings.kernels_dir() / sys.argv[1]
    def path(self, inside):
        return Path("/dev/shm", sys.argv[2], "staging")

Space.kernel_dir.mkdir(parents=True, mode=0o700)
print("ready", flush=True)
sys.stdin.readline()
claim = claim_memory(Space(), 100 << 20)
if claim is not None:
    with Path("/dev/shm", sys.argv[2], sys.argv[1]).open("wb") as file:
        for _ in range(100):
            file.write(os.urandom(1 << 20))
print("memory" if claim else "disk", flush=True)
sys.stdin.readline()
"""


def test_several_at_once_do_not_count_on_the_same_memory(tmp_path: Path) -> None:
    shared = Path("/dev/shm", f"gpuckpt-{tmp_path.name}")
    shared.mkdir()
    try:
        with memory_cgroup(1050 * MB) as group:
            with _stagers(12, shared, group) as told:
                # Each by itself has room; all of them would take what there is.
                assert group.killed() == 0
                assert "disk\n" in told
                assert claimed() >= told.count("memory\n") * 100 * MB
            assert claimed() == 0
            for file in shared.iterdir():
                file.unlink()
            with _stagers(1, shared, group) as told:
                assert told == ["memory\n"]
    finally:
        shutil.rmtree(shared)


@contextlib.contextmanager
def _stagers(count: int, shared: Path, group: Cgroup) -> Iterator[list[str]]:
    """Have so many processes of a cgroup stage 100 MiB each at once; give where each has done so, until their end."""
    with contextlib.ExitStack() as ending:
        several = []
        for n in range(count):
            one = subprocess.Popen(
                [sys.executable, "-c", _STAGES, f"kernel-{count}-{n}", shared.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=group.join,
            )
            ending.callback(one.communicate)
            ending.callback(one.kill)
            several.append((one.stdin, one.stdout))
        for _, out in several:
            assert out is not None
            assert out.readline() == "ready\n"
        for asked, _ in several:
            print(file=asked, flush=True)
        yield [out.readline() for _, out in several if out is not None]


@pytest.mark.criu
def test_a_save_and_a_restore_claim_what_they_stage_and_it_goes_with_them(criu: Criu, start: StartKernel) -> None:
    notebook = start()
    notebook.run("data = bytearray(30 << 20)")
    for command, stage, line in (("dump", "post-dump", "save one"), ("restore", "pre-restore", "restore one")):
        with criu.held_at(command, stage) as reached:
            notebook.client.execute(f"%gpuckpt {line}")
            reached()
            assert claimed() > 30 * MB
        assert notebook.reply()["content"]["status"] == "ok"
        assert _left(notebook) == []
        assert claimed() == 0
    with criu.held_at("dump", "post-dump") as reached:
        notebook.client.execute("%gpuckpt save two")
        reached()
        notebook.kill_keeper()
        assert claimed() == 0
    notebook.reply()
    assert notebook.value("len(data)") == str(30 << 20)
    assert _left(notebook) == []


def test_keepers_that_only_live_hold_up_no_claim(start: StartKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_claim, "_LONGEST_WAIT", 60.0)
    notebook = start()
    began = time.monotonic()
    claim = MemoryClaim.where(lambda others: True, notebook.folder, MB)
    assert time.monotonic() - began < 30
    assert claim is not None
    claim.release()


def test_a_claim_waits_for_one_that_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_claim, "_LONGEST_WAIT", 60.0)
    folder = settings.kernels_dir() / "kernel"
    folder.mkdir(parents=True, mode=0o700)
    order: list[str] = []
    second = threading.Thread(target=MemoryClaim.where, args=(lambda others: not order.append("second"), folder, MB))

    def first(others: int) -> bool:
        second.start()
        second.join(0.2)  # it would have claimed by then
        order.append("first")
        return False

    MemoryClaim.where(first, folder, MB)
    second.join()
    assert order == ["first", "second"]


def _left(notebook: Notebook) -> list[Path]:
    return list(notebook.folder.glob("claim-*"))
