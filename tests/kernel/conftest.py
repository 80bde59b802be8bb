"""A driver for tests where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import made_up
import pytest


@pytest.fixture(scope="session")
def made_up_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of `made_up_driver.c`."""
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    made_up.build(library)
    return library
