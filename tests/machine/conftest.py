"""What the tests of the machine room share: a CRIU that works."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.errors import Unavailable
from jupyter_gpuckpt.freeze.criu_program import find_criu, program_in_prefix
from jupyter_gpuckpt.machine.criu_install import install_criu


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a CRIU in it: the one of `make setup`, else one that is installed for this test run."""
    with contextlib.suppress(Unavailable):
        program_in_prefix(settings.criu_prefix())
        return settings.criu_prefix()
    if shutil.which("apt-get") is None:
        pytest.skip("a system without apt")
    return Path(install_criu(tmp_path_factory.mktemp("setup") / "criu", lambda _: None).path).parents[2]


@pytest.fixture
def with_criu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a CRIU found: the machine's own, else one that was installed for this test run."""
    try:
        find_criu()
    except Unavailable:
        monkeypatch.setenv("GPUCKPT_CRIU_PREFIX", str(request.getfixturevalue("prefix")))


@pytest.fixture
def without_criu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have no CRIU found in any place that a user can choose."""
    monkeypatch.setenv("GPUCKPT_CRIU", str(tmp_path / "no-criu"))
