"""A machine with many processors, as far as programs are told."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library by which there are eight processors."""
    library = tmp_path_factory.mktemp("many") / "many.so"
    source = Path(__file__).with_name("many_processors.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return library
