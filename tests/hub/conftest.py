"""A machine with a broker, its people, and a hub."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hub import Hub
from people import Machine


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    machine = Machine.or_skip()
    yield machine
    machine.close()


@pytest.fixture
def hub(machine: Machine) -> Iterator[Hub]:
    hub = Hub(machine)
    yield hub
    hub.close()
