"""Servers that are units of a systemd that runs, as SystemdSpawner and The Littlest JupyterHub have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from booted import BootedMachine
from hub import Hub
from networks import in_network_of
from notebooks import wait_until
from people import GROUP, UIDS

from jupyter_gpuckpt import settings

_CONFIG = """
c.JupyterHub.spawner_class = "systemdspawner.SystemdSpawner"
# As The Littlest JupyterHub has it.
c.SystemdSpawner.default_shell = "/bin/bash"
c.SystemdSpawner.unit_name_template = "jupyter-{USERNAME}"
"""
_BEGIN = "import os; secret = os.urandom(4).hex(); print(secret, os.getuid())"


@dataclass
class _Place:
    folder: Path
    entering: list[str]
    environment: dict[str, str]


@pytest.fixture(scope="module")
def booted() -> Iterator[BootedMachine]:
    """A machine with the broker as a service, which alice may use."""
    machine = BootedMachine.boot_or_skip()
    try:
        done = machine.gpuckpt("broker", "install", "--group", GROUP)
        assert done.returncode == 0, done.stderr
        assert machine.as_root("usermod", "-aG", GROUP, "alice").returncode == 0
        yield machine
    finally:
        machine.close()


def test_a_unit_that_is_stopped_leaves_its_kernels_to_the_next(booted: BootedMachine) -> None:
    environment = {"GPUCKPT_CRIU_PREFIX": str(settings.criu_prefix())}
    place = _Place(booted.folder, booted.entering, environment)
    with in_network_of(booted.first):
        hub = Hub(place, config=_CONFIG)
        try:
            alice = hub.start("alice")
            assert booted.systemctl("is-active", "jupyter-alice").stdout == "active\n"
            said = alice.run(_BEGIN)
            assert said.endswith(f" {UIDS['alice']}")
            assert "NoNewPrivs:\t1" in alice.run("print(open('/proc/self/status').read())")
            for _ in range(2):
                hub.stop("alice")
                wait_until(lambda: not _processes_of_alice(booted), what="processes are left")
                alice = hub.start("alice")
                assert alice.run("print(secret, os.getuid())") == said
                assert "resumed from" in alice.run("%gpuckpt status")
        finally:
            hub.close()


def _processes_of_alice(booted: BootedMachine) -> str:
    return booted.as_root("ps", "-u", str(UIDS["alice"]), "-o", "args=").stdout
