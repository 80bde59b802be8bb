from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from jupyter_gpuckpt.store import Store

# The same examples each time, however slow the machine is: to find what they do not, there is the fuzzer.
settings.register_profile("store", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("store")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")
