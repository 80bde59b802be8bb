"""A criu, and keepers, that do as tests tell them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from keeper_faults import Criu


@pytest.fixture
def criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Criu:
    """The criu of kernels that are started after this: ask for it before `notebook`."""
    criu = Criu(tmp_path / "criu")
    monkeypatch.setenv("GPUCKPT_CRIU", str(criu.program))
    return criu


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
