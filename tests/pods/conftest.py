"""One podman for all tests, with the image built, and no container when a test begins and ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "hub"))

from podman import ROOT, MachinesBroker, Podman


@pytest.fixture(scope="session")
def built() -> Iterator[Podman]:
    """Podman, with the image."""
    assert (ROOT / ".venv" / "pods" / "ready").exists(), "there is no podman: `make test-pods` fetches it"
    assert os.geteuid() == 0, "podman with the machine's user namespace takes root"
    podman = Podman(ROOT / ".pods")
    try:
        podman.build()
        yield podman
    finally:
        podman.close()


@pytest.fixture
def podman(built: Podman) -> Iterator[Podman]:
    """Podman, for one test."""
    built.remove_all()
    yield built
    built.remove_all()


@pytest.fixture
def machines_broker(podman: Podman) -> Iterator[MachinesBroker]:
    """A broker for the containers of one test."""
    broker = MachinesBroker(podman)
    yield broker
    broker.close()
