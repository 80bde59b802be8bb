"""A criu, and keepers, that do as tests tell them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from keeper_faults import Criu


@pytest.fixture(scope="module")
def criu_of_the_file(tmp_path_factory: pytest.TempPathFactory) -> Criu:
    """One criu for a file's tests, as a kernel that they share has one."""
    return Criu(tmp_path_factory.mktemp("told") / "criu")


@pytest.fixture
def criu(criu_of_the_file: Criu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Criu]:
    """The criu of kernels that are started after this: ask for it before `notebook`."""
    monkeypatch.setenv("GPUCKPT_CRIU", str(criu_of_the_file.program))
    yield criu_of_the_file
    criu_of_the_file.honest()


@pytest.fixture(autouse=True)
def criu_of_a_shared_kernel(request: pytest.FixtureRequest) -> None:
    """A kernel that tests share has it whoever of them comes first."""
    if request.node.get_closest_marker("shared_kernel"):
        request.getfixturevalue("criu")


@pytest.fixture
def keepers_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have every keeper that starts run some Python first, before anything of the package is imported."""

    def keepers_first(code: str) -> None:
        folder = tmp_path / "first"
        folder.mkdir()
        condition = 'if sys.orig_argv[1:3] == ["-m", "jupyter_gpuckpt.keeper"]:'
        (folder / "sitecustomize.py").write_text(f"import os, sys, time\n{condition}\n    {code}\n")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))

    return keepers_first


# For as long as a file is there, nothing that is stored gets onto the disk.
_SLOW_DISK = """
def stands_still(fd):
        while "/packs/" in os.readlink(f"/proc/self/fd/{{fd}}") and os.path.exists({slow!r}): time.sleep(0.01)
        sync(fd)
    sync, os.fsync = os.fsync, stands_still
"""


@pytest.fixture
def slow_disk(keepers_first: Callable[[str], None], tmp_path: Path) -> Path:
    """The file that keepers which start after this wait for: while it is there, they get no snapshot onto the disk."""
    slow = tmp_path / "slow"
    keepers_first(_SLOW_DISK.format(slow=str(slow)).strip())
    return slow
