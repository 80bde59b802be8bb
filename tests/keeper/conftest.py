"""A criu that does as tests tell it."""

from __future__ import annotations

from pathlib import Path

import pytest
from keeper_faults import Criu


@pytest.fixture
def criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Criu:
    """The criu of kernels that are started after this: ask for it before `notebook`."""
    criu = Criu(tmp_path / "criu")
    monkeypatch.setenv("GPUCKPT_CRIU", str(criu.program))
    return criu
