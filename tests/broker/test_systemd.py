"""The broker as a service of a systemd that runs: installed by root, used by others, and taken away again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import BootedMachine
from notebooks import wait_until
from people import GROUP, Person

from jupyter_gpuckpt.broker.rights import NEEDED

pytestmark = pytest.mark.criu

SERVICE, SOCKET = "gpuckpt-broker.service", "gpuckpt-broker.socket"


@pytest.fixture(scope="module")
def machine() -> Iterator[BootedMachine]:
    machine = BootedMachine.boot_or_skip()
    try:
        done = machine.gpuckpt("broker", "install", "--group", GROUP)
        if "can be changed by users other than root" in done.stderr:
            pytest.skip(f"no broker starts from here: {done.stderr}")
        assert done.returncode == 0, done.stderr
        assert machine.as_root("usermod", "-aG", GROUP, "alice").returncode == 0
        yield machine
    finally:
        machine.close()


@pytest.fixture(scope="module")
def alice(machine: BootedMachine) -> Person:
    alice = machine.person("alice")
    alice.starts_kernel()
    return alice


def state(machine: BootedMachine, unit: str, name: str) -> str:
    return machine.systemctl("show", "--value", f"--property={name}", unit).stdout.strip()


def roots_processes(machine: BootedMachine) -> list[str]:
    """Return what runs as root and is ours."""
    processes = machine.as_root("ps", "-eo", "user:20,args").stdout.splitlines()
    return [line for line in processes if line.startswith("root ") and "jupyter_gpuckpt" in line]


def test_it_starts_with_few_rights_and_a_socket_for_its_group(machine: BootedMachine) -> None:
    assert state(machine, SERVICE, "ActiveState") == "active"
    assert state(machine, SOCKET, "UnitFileState") == "enabled"
    assert machine.as_root("stat", "-c", "%a %U %G", "/run/gpuckpt/broker.sock").stdout == f"660 root {GROUP}\n"
    rights = machine.as_root("sh", "-c", f"grep CapBnd /proc/{state(machine, SERVICE, 'MainPID')}/status").stdout
    granted = machine.as_root("capsh", f"--decode={rights.split()[1]}").stdout.strip().partition("=")[2].split(",")
    assert "cap_checkpoint_restore" in granted
    assert {name.upper() for name in granted} <= set(NEEDED)


def test_a_member_of_the_group_saves_and_restores_and_others_do_not(machine: BootedMachine, alice: Person) -> None:
    alice.runs("x = 41")
    before = alice.runs("print(open('/proc/self/cgroup').read())")
    assert f"user-{alice.uid}.slice" in before
    assert "Saved here" in alice.runs("%gpuckpt save here")
    alice.runs("x = 1")
    alice.runs("%gpuckpt restore here")
    assert alice.runs("print(x)") == "41"
    assert alice.runs("print(open('/proc/self/cgroup').read())") == before
    said = machine.person("bob").does(
        "from jupyter_gpuckpt.machine.capability import why_unavailable", "str(why_unavailable())"
    )
    assert "Permission denied" in said


def test_kernels_outlive_a_restart_and_are_saved_by_what_was_started_anew(
    machine: BootedMachine, alice: Person
) -> None:
    old = state(machine, SERVICE, "MainPID")
    assert machine.systemctl("restart", SERVICE).returncode == 0
    wait_until(lambda: len(roots_processes(machine)) == 1, what="an old deputy is left")
    assert state(machine, SERVICE, "MainPID") != old
    assert "Saved anew" in alice.runs("%gpuckpt save anew")
    alice.runs("%gpuckpt restore anew")
    assert alice.runs("print(x)") == "41"


def test_all_of_it_can_be_killed_and_no_kernel_with_it(machine: BootedMachine, alice: Person) -> None:
    assert machine.systemctl("kill", "--signal=KILL", SERVICE).returncode == 0
    assert alice.runs("print(x)") == "41"
    assert "Saved again" in alice.runs("%gpuckpt save again")


def test_a_broker_that_was_stopped_is_started_by_who_asks(machine: BootedMachine, alice: Person) -> None:
    assert machine.systemctl("stop", SERVICE).returncode == 0
    assert state(machine, SERVICE, "ActiveState") == "inactive"
    assert "Saved woken" in alice.runs("%gpuckpt save woken")
    assert state(machine, SERVICE, "ActiveState") == "active"


def test_an_installation_that_does_not_start_is_no_success(machine: BootedMachine) -> None:
    obstacle = Path("/etc/systemd/system", f"{SERVICE}.d", "obstacle.conf")
    machine.as_root("sh", "-c", f"printf '[Service]\\nExecStartPre=/bin/false\\n' > {obstacle}")
    done = machine.gpuckpt("broker", "install", "--group", GROUP)
    assert done.returncode == 1
    assert "`systemctl restart gpuckpt-broker.service` failed" in done.stderr
    machine.as_root("rm", str(obstacle))
    assert machine.gpuckpt("broker", "install", "--group", GROUP).returncode == 0


def test_uninstall_leaves_the_kernels_and_nothing_of_root_s(machine: BootedMachine, alice: Person) -> None:
    done = machine.gpuckpt("broker", "uninstall")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not roots_processes(machine), what="processes of root's are left")
    assert state(machine, SERVICE, "LoadState") == "not-found"
    assert alice.runs("print(x)") == "41"
    assert "does not answer" in alice.fails("%gpuckpt save never")
    assert "No broker" in machine.gpuckpt("broker", "uninstall").stdout
