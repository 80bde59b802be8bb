"""The broker as a service of a systemd that runs: installed by root, used by others, and taken away again."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import BootedMachine
from notebooks import wait_until
from people import GROUP, Person

from jupyter_gpuckpt.broker.rights import NEEDED

pytestmark = pytest.mark.criu

_ASKING = """
def answers(method, path, body=None):
    try:
        found = requests.request(
            method, f"http://127.0.0.1:8888/{path}", json=body, headers={"Authorization": "token of-bob"}, timeout=60
        )
    except requests.ConnectionError:
        return None
    assert found.ok, found.text
    return found.json()
"""
_LISTING = "subprocess.run(['jupyter', 'gpuckpt', 'list', '--json'], capture_output=True, check=True).stdout.decode()"

SERVICE, SOCKET = "gpuckpt-broker.service", "gpuckpt-broker.socket"


@pytest.fixture(scope="module")
def machine() -> Iterator[BootedMachine]:
    with _installed() as machine:
        yield machine


@contextlib.contextmanager
def _installed(layout: str = "") -> Iterator[BootedMachine]:
    machine = BootedMachine.boot_or_skip(layout)
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


def test_it_does_where_there_are_control_groups_of_version_2_alone() -> None:
    with _installed("unified") as machine:
        alice = machine.person("alice")
        alice.starts_kernel()
        test_a_member_of_the_group_saves_and_restores_and_others_do_not(machine, alice)
        mounted = machine.as_root("grep", "-c", " cgroup .* rw", "/proc/mounts").stdout
        assert mounted == "0\n"


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


def test_a_service_of_the_recipe_hibernates_its_kernels_when_it_is_stopped(machine: BootedMachine) -> None:
    """`jupyter gpuckpt recipe jupyter@.service`, with nothing changed but its paths."""
    bob = machine.person("bob")
    assert machine.as_root("usermod", "-aG", GROUP, "bob").returncode == 0
    units, unit = Path("/etc/systemd/system"), "jupyter@bob.service"
    written = machine.gpuckpt("recipe", "jupyter@.service").stdout
    written = written.replace("/opt/jupyter/bin/jupyter", str(Path(sys.executable).with_name("jupyter")))
    machine.as_root("sh", "-c", 'printf %s "$1" > "$2"', "sh", written, str(units / "jupyter@.service"))
    variables = "".join(f'Environment="{name}={value}"\\n' for name, value in bob.environment.items())
    own = f"[Service]\\n{variables}Environment=JUPYTER_TOKEN=of-bob\\n"
    machine.as_root("sh", "-c", f"mkdir {units}/{unit}.d && printf '{own}' > {units}/{unit}.d/own.conf")
    assert machine.systemctl("daemon-reload").returncode == 0
    try:
        assert machine.systemctl("start", unit).returncode == 0
        bob.does(
            "import os, requests",
            "from jupyter_client import BlockingKernelClient",
            "from notebooks import Notebook, wait_for_ready, wait_until",
            _ASKING,
            "wait_until(lambda: answers('GET', 'api/status'))",
            "kernel = answers('POST', 'api/kernels', {'name': 'python3-gpuckpt'})['id']",
            "client = BlockingKernelClient()",
            "client.load_connection_file(f'{os.environ[\"JUPYTER_RUNTIME_DIR\"]}/kernel-{kernel}.json')",
            "client.start_channels()",
            "notebook = Notebook(None, client)",
            "wait_for_ready(client)",
        )
        bob.runs("x = 41")
        assert machine.systemctl("stop", unit).returncode == 0
        assert state(machine, unit, "Result") == "success"
        (saved,) = json.loads(bob.does("import subprocess", _LISTING))["snapshots"]
        assert saved["name"].startswith("hibernated-")
        assert machine.systemctl("start", unit).returncode == 0
        bob.does(
            "wait_until(lambda: answers('GET', 'api/status'))",
            f"begun = answers('POST', 'api/gpuckpt/hibernated/{saved['name']}/resume', {{}})",
            "look = lambda: answers('GET', f'api/gpuckpt/operations/{begun[\"id\"]}')",
            "ended = wait_until(lambda: (now := look())['ended'] and now)",
            "client.stop_channels()",
            "client = BlockingKernelClient()",
            'client.load_connection_file(f\'{os.environ["JUPYTER_RUNTIME_DIR"]}/kernel-{begun["kernel_id"]}.json\')',
            "client.start_channels()",
            "notebook = Notebook(None, client)",
            "wait_for_ready(client)",
        )
        assert bob.runs("print(x)") == "41"
    finally:
        machine.systemctl("stop", unit)
    assert state(machine, unit, "TasksCurrent") in ("[not set]", "0")


_IN_SERVICE = """
jupyter gpuckpt exec counting -- python -u -c "
import time
with open('/tmp/here', 'w') as file:
    file.write('of this service')
for n in range(10**6):
    print(n, open('/tmp/here').read(), flush=True)
    time.sleep(0.01)"
jupyter gpuckpt save counting s
jupyter gpuckpt stop counting --force
jupyter gpuckpt restore counting s
jupyter gpuckpt hibernate counting
jupyter gpuckpt logs counting | tail -n 1
readlink /proc/self/ns/mnt
"""


def test_a_service_with_temporary_files_of_its_own_is_served(machine: BootedMachine, alice: Person) -> None:
    folder = "/var/lib/alice"
    machine.as_root("install", "-d", "-o", str(alice.uid), "-g", str(alice.uid), folder)
    named = {"JUPYTER_RUNTIME_DIR": "runtime", "GPUCKPT_STORE": "store", "GPUCKPT_KEYS": "keys", "GPUCKPT_LOGS": "logs"}
    variables = {**alice.environment, "HOME": folder, **{name: f"{folder}/{what}" for name, what in named.items()}}
    lines = [
        "[Service]",
        *("Type=oneshot", f"User={alice.uid}", f"Group={alice.uid}", f"SupplementaryGroups={GROUP}"),
        *("PrivateTmp=yes", "ProtectSystem=full"),
        *(f'Environment="{name}={value}"' for name, value in variables.items()),
        *(f"StandardOutput=file:{folder}/out", f"StandardError=file:{folder}/errors"),
        f"ExecStart=/bin/sh -e {folder}/script",
    ]
    write = 'printf %s "$1" > "$2"'
    machine.as_root("sh", "-c", write, "sh", "\n".join(lines), "/etc/systemd/system/private.service")
    machine.as_root("sh", "-c", write, "sh", _IN_SERVICE, f"{folder}/script")
    assert machine.systemctl("daemon-reload").returncode == 0
    done = machine.systemctl("start", "private.service")
    assert done.returncode == 0, machine.as_root("cat", f"{folder}/errors").stdout
    *_, last, namespace = machine.as_root("cat", f"{folder}/out").stdout.splitlines()
    assert last.endswith(" of this service")
    assert namespace != machine.as_root("readlink", "/proc/1/ns/mnt").stdout.strip()
    assert machine.as_root("test", "-e", "/tmp/here").returncode == 1


def test_uninstall_leaves_the_kernels_and_nothing_of_root_s(machine: BootedMachine, alice: Person) -> None:
    done = machine.gpuckpt("broker", "uninstall")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not roots_processes(machine), what="processes of root's are left")
    assert state(machine, SERVICE, "LoadState") == "not-found"
    assert alice.runs("print(x)") == "41"
    assert "does not answer" in alice.fails("%gpuckpt save never")
    assert "No broker" in machine.gpuckpt("broker", "uninstall").stdout
