"""Every byte of trees that fork and change their memory at random is back, in the processes that had it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import run
from job_programs import Job, folder_of
from notebooks import Notebook, wait_until

pytestmark = [pytest.mark.criu, pytest.mark.shared_kernel(False)]

_PROGRAM = Path(__file__).with_name("random_tree.py")
_SEEDS = [int(seed) for seed in os.environ.get("RANDOM_TREES", "0 1 2").split()]


class Tree:
    """What the processes of a tree have said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asked = 0
        for name in ("forked", "there", "gone"):
            (folder / name).mkdir()

    def wait(self) -> None:
        """Wait until all processes are there."""
        wait_until(self._is_complete, what="the tree is not complete")

    def _is_complete(self) -> bool:
        forked, there, gone = ({p.name for p in (self.folder / n).iterdir()} for n in ("forked", "there", "gone"))
        return bool(there) and len(there | gone) == len(forked) + 1

    def told(self) -> dict[str, str]:
        """Return what each process has, as a hash, by its id."""
        answers = self.folder / str(self._asked)
        self._asked += 1
        answers.mkdir()
        expected = {path.name for path in (self.folder / "there").iterdir()}
        wait_until(lambda: {p.name for p in answers.iterdir()} == expected, what="not all have answered")
        return {path.name: path.read_text() for path in answers.iterdir()}


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    found = Tree(tmp_path)
    yield found
    (tmp_path / "end").touch()


def went_straight(log: Path) -> bool:
    return "bytes of memory went straight into" in log.read_text()


@pytest.mark.parametrize("seed", _SEEDS)
def test_beside_the_running_kernel(tree: Tree, notebook: Notebook, seed: int) -> None:
    command = [sys.executable, str(_PROGRAM), str(seed), str(tree.folder)]
    notebook.run(f"import subprocess; tree = subprocess.Popen({command!r})")
    tree.wait()
    before = tree.told()
    notebook.run("%gpuckpt save here")
    notebook.run("%gpuckpt restore here --discard")
    assert tree.told() == before
    assert went_straight(notebook.folder / "keeper.log") == (os.geteuid() == 0)


@pytest.mark.parametrize("seed", _SEEDS)
def test_as_a_job_that_comes_up_alone(tree: Tree, folders: None, seed: int) -> None:
    job = Job("tree")
    job.start(sys.executable, str(_PROGRAM), str(seed), str(tree.folder))
    tree.wait()
    before = tree.told()
    job.save("here")
    job.kill()
    job.restore("here")
    assert tree.told() == before
    assert went_straight(folder_of("tree") / "keeper.log") == (os.geteuid() == 0)
    run("stop", "tree", "--force")
