"""The broker as a service of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from people import UIDS, Machine, Person

from jupyter_gpuckpt.broker import install
from jupyter_gpuckpt.freeze.criu_program import CriuProgram

CRIU = CriuProgram(("/usr/sbin/criu",), (4, 2, 1), "/usr/sbin/criu", "system")


def test_systemd_finds_nothing_amiss_in_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    for name, text in install.units("users", CRIU).items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.iterdir())],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) not in done.stderr, done.stderr


def test_the_units_keep_the_broker_in_the_machines_own_namespaces_with_few_rights() -> None:
    """In namespaces of its own it would refuse everybody; killed with its kernels it would end them."""
    units = install.units("users", CRIU)
    service = units["gpuckpt-broker.service"]
    settings = {line.partition("=")[0] for line in service.splitlines() if not line.startswith("#")}
    assert not settings & {"PrivateTmp", "ProtectSystem", "ProtectHome", "PrivateDevices", "SystemCallFilter"}
    assert "KillMode=process" in service
    assert "Environment=GPUCKPT_CRIU=/usr/sbin/criu" in service
    granted = next(line for line in service.splitlines() if line.startswith("CapabilityBoundingSet="))
    assert not {"CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_CHOWN", "CAP_FOWNER"} & set(granted.split())
    assert "SocketMode=0660" in units["gpuckpt-broker.socket"]
    assert "SocketGroup=users" in units["gpuckpt-broker.socket"]


def test_only_root_installs_it(alice: Person) -> None:
    for act in ("install.install('users', print)", "install.uninstall()"):
        with pytest.raises(AssertionError, match=rf"Unavailable: The broker was not .*\n?.*user {UIDS['alice']}"):
            alice.does("from jupyter_gpuckpt.broker import install", act)


_WITHOUT_SYSTEMD = """
mount -t tmpfs none /etc && mount -t tmpfs none /run && mkdir -p "$0" && shift && exec "$@"
"""

_UNINSTALL = """
import sys
from jupyter_gpuckpt.broker import install
from jupyter_gpuckpt.freeze.criu_program import CriuProgram
criu = CriuProgram(("/usr/sbin/criu",), (4, 2, 1), "/usr/sbin/criu", "system")
for name, text in install.units("users", criu).items():
    (install.UNITS / name).write_text(text)
print(install.uninstall())
print(sorted(install.UNITS.iterdir()))
print(install.uninstall())
"""


def test_uninstall_removes_the_units_and_says_so_where_there_are_none() -> None:
    """On a machine with an /etc and a /run of its own, so that the real one keeps its services."""
    if os.geteuid() != 0:
        pytest.skip("it takes root")
    inside = ["sh", "-ec", _WITHOUT_SYSTEMD, str(install.UNITS), "sh", sys.executable, "-c", _UNINSTALL]
    entering = ["unshare", "--mount", "--propagation", "private", *inside]
    done = subprocess.run(entering, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    removed, left, none = done.stdout.splitlines()
    assert "broker was removed" in removed
    assert left == "[]"
    assert "No broker" in none


_ROOT_S_OWN_ETC = """
mount -t tmpfs none /etc && mount -t tmpfs none /run && cp /usr/lib/os-release /etc/ && exec "$@"
"""

_COMMAND = [sys.executable, "-c", "import sys; from jupyter_gpuckpt.cli import main; sys.exit(main())"]

_PLANT = """
import os, pathlib, platform
from jupyter_gpuckpt.freeze import criu_program
def plant(trace):
    home = pathlib.Path.home()
    prefix = home / ".local/share/jupyter/gpuckpt/criu"
    programs = [home / "bin" / name for name in ("criu", "groupadd", "systemctl", "apt-get", "apt-config", "dpkg-deb")]
    programs += [prefix / "usr/sbin/criu", prefix / "usr/lib" / criu_program._LOADERS[platform.machine()]]
    for path in programs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\\necho "$(id -u) $0 $@" >>{trace}\\necho Version: 4.2.1\\n')
        path.chmod(0o755)
"""


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GPUCKPT_CRIU", "bin/criu"),
        ("GPUCKPT_CRIU_PREFIX", ".local/share/jupyter/gpuckpt/criu"),
        ("HOME", ""),
        ("PATH", "bin"),
    ],
)
def test_root_runs_no_program_of_the_user_who_called_sudo(
    machine: Machine, bob: Person, variable: str, value: str
) -> None:
    """`sudo -E` lets the environment through; criu was asked for its version before anybody looked whose it is."""
    trace = bob.home / f"ran-by-{variable}"
    bob.does(_PLANT, f"plant({str(trace)!r})")
    environment = {**machine.environment, "GPUCKPT_CRIU_PREFIX": str(machine.folder / "none"), "HOME": "/root"}
    environment.pop("GPUCKPT_CRIU", None)
    if variable == "HOME":
        del environment["GPUCKPT_CRIU_PREFIX"]  # it is looked for there
    environment[variable] = ":".join([str(bob.home / value), *([environment["PATH"]] if variable == "PATH" else [])])
    commands = [["broker", "run"], ["doctor", "--quick"], ["setup"]]
    if variable != "HOME":
        commands.append(["broker", "install"])  # which does not look there
    for words in commands:
        if variable == "PATH" and "install" in words:  # it has its criu, and goes on to other programs
            environment["GPUCKPT_CRIU_PREFIX"] = machine.environment["GPUCKPT_CRIU_PREFIX"]
        inside = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", _ROOT_S_OWN_ETC, "sh"]
        done = machine.as_root(*inside, *_COMMAND, *words, environment=environment)
        assert "CRIU" in done.stdout + done.stderr or "groupadd" in done.stderr, (words, done)
        if variable != "PATH":
            assert f"{bob.home} can be changed by users other than root" in " ".join(
                (done.stdout + done.stderr).split()
            )
    assert not trace.exists(), trace.read_text()
