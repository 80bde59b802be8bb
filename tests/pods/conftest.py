"""One podman for all tests, with the image built, and no container when a test begins and ends."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "hub"))

from podman import ROOT, MachinesBroker, Podman

PROGRAMS = ("podman", "crun", "debootstrap")


@pytest.fixture(scope="session")
def built() -> Iterator[Podman]:
    """Podman, with the image."""
    missing = [name for name in PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]
    assert not missing, f"{', '.join(missing)}: not installed; `make test-pods` installs them"
    assert os.geteuid() == 0, "podman with the machine's user namespace takes root"
    podman = Podman(Path(os.environ.get("GPUCKPT_PODS", ROOT / ".pods")))
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
