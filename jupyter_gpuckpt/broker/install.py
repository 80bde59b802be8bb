"""Making the broker a service of the machine, with systemd, and taking it away again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import settings
from ..errors import GpuckptError, Unavailable
from ..freeze.criu_program import CriuProgram, find_criu, refuse_open_sockets
from ..linux.root_only import SYSTEM_PATH, environment
from ..machine.criu_install import install_criu
from .changeable import refuse_changeable, refuse_changeable_folder
from .lent_criu import has_own_libraries, refuse_without_own_libraries
from .rights import NEEDED
from .service import CONTAINERS

__all__ = ["CRIU_PREFIX", "UNITS", "install", "uninstall", "units"]

UNITS = Path("/etc/systemd/system")
CRIU_PREFIX = Path("/usr/local/lib/gpuckpt/criu")
"""Where a criu for the broker is installed, where the machine has none that works."""
_NAME = "gpuckpt-broker"

_SOCKET = """\
[Unit]
Description=Socket of the broker that saves and restores Jupyter kernels

[Socket]
ListenSequentialPacket={socket}
SocketUser=root
SocketGroup={group}
SocketMode=0660
DirectoryMode=0755
RemoveOnStop=yes

[Install]
WantedBy=sockets.target
"""

_SERVICE = """\
[Unit]
Description=Broker that saves and restores Jupyter kernels for users without root
Requires={name}.socket

[Service]
Type=notify
ExecStart={python} -I -m jupyter_gpuckpt.broker {group}{options}
{environment}
CapabilityBoundingSet={capabilities}
LimitNOFILE=1048576
# Its deputies finish what they do; the kernels that it has started are not in its control group, and live on.
KillMode=process
Restart=on-failure
# Nothing here may give it namespaces of its own (PrivateTmp, ProtectSystem and their like): it starts kernels in those
# of its users, and refuses whoever is in others.
"""


def install(group: str, note: Callable[[str], None], with_containers: bool = False) -> str:
    """Make the broker a service for the members of a group, and start it; return what there is to say.

    With containers, it serves those of them who live in a container, too.

    Raises
    ------
    Unavailable : this process is not root, there is no criu and none can be installed, or others could change the
        programs, or reach criu's sockets.
    GpuckptError : a step failed.
    """
    _refuse_without_root("installed")
    os.umask(0o022)
    refuse_changeable_folder(settings.broker_socket().parent)
    program = _criu(note, with_containers)
    refuse_open_sockets(program)
    refuse_changeable(program)
    if with_containers:
        refuse_without_own_libraries(program)
    if shutil.which("groupadd", path=SYSTEM_PATH):
        _run("groupadd", "--system", "--force", group)
    if not _has_systemd():
        return (
            f"CRIU is ready: {program.path}\nThis machine has no systemd. Start the broker as it starts its services:\n"
            f"    {' '.join([*_variables(program), sys.executable, '-I', '-m', 'jupyter_gpuckpt.broker', group])}"
            f"{_options(with_containers)}"
        )
    for name, text in units(group, program, with_containers).items():
        (UNITS / name).write_text(text)
    _run("systemctl", "daemon-reload")
    _run("systemctl", "enable", "--now", f"{_NAME}.socket")
    _run("systemctl", "restart", f"{_NAME}.service")  # which says whether it does start
    return f"The broker serves the members of the group {group}. Add a user: usermod -aG {group} USER"


def uninstall() -> str:
    """Stop the broker, and remove it from the machine's services; kernels that it has started live on.

    Raises
    ------
    Unavailable : this process is not root.
    GpuckptError : a step failed.
    """
    _refuse_without_root("removed")
    present = [path for path in (UNITS / f"{_NAME}.socket", UNITS / f"{_NAME}.service") if path.exists()]
    if not present:
        return "No broker is installed."
    if _has_systemd():
        _run("systemctl", "disable", "--now", *(path.name for path in present))
    for path in present:
        path.unlink()
    if _has_systemd():
        _run("systemctl", "daemon-reload")
    return "The broker was removed. Kernels that it started keep running, but cannot be saved."


def units(group: str, program: CriuProgram, with_containers: bool = False) -> dict[str, str]:
    """Return the texts of systemd's units, by their names."""
    service = _SERVICE.format(
        name=_NAME,
        python=sys.executable,
        group=group,
        options=_options(with_containers),
        environment="\n".join(f"Environment={variable}" for variable in _variables(program)),
        capabilities=" ".join(NEEDED),
    )
    return {
        f"{_NAME}.socket": _SOCKET.format(socket=settings.broker_socket(), group=group),
        f"{_NAME}.service": service,
    }


def _options(with_containers: bool) -> str:
    return f" {CONTAINERS}" if with_containers else ""


def _variables(program: CriuProgram) -> list[str]:
    """Return what says where the broker's criu is, as assignments."""
    if program.origin == "prefix":
        return [f"GPUCKPT_CRIU_PREFIX={settings.criu_prefix()}"]
    return [f"GPUCKPT_CRIU={program.path}"]


def _criu(note: Callable[[str], None], with_containers: bool) -> CriuProgram:
    os.environ.setdefault("GPUCKPT_CRIU_PREFIX", str(CRIU_PREFIX))
    try:
        found = find_criu()
        if settings.named_criu() or not with_containers or has_own_libraries(found):
            return found
    except Unavailable:
        if settings.named_criu():
            raise
    install_criu(settings.criu_prefix(), note)
    return find_criu()


def _refuse_without_root(what: str) -> None:
    if os.geteuid() != 0:
        raise Unavailable(f"The broker was not {what}.", f"This is user {os.geteuid()}.", "Use sudo.")


def _has_systemd() -> bool:
    return Path("/run/systemd/system").is_dir()  # sd_booted(3)


def _run(*argv: str) -> None:
    try:
        subprocess.run(argv, env=environment(), check=True, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as e:
        said: Sequence[str] = (getattr(e, "stderr", "") or str(e)).strip().splitlines()
        raise GpuckptError(
            f"`{' '.join(argv)}` failed.", said[-1] if said else str(e), "Correct the cause, and try again."
        ) from e
