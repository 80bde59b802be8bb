"""Checks of what an engine does to the servers and jobs that it starts here, and for how long it waits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from .checks import Check, judge
from .place_checks import hibernation_check, locks_check, run_folder_check, volume_check
from .slurm_checks import slurm_checks

__all__ = ["ENGINES", "container_checks", "first_process_check", "hub_checks", "kubernetes_checks"]

_SHELLS = ("sh", "bash", "dash", "ash", "zsh")
_POD = "KUBERNETES_SERVICE_HOST"
"""Set in all containers of a pod."""
_MARKS = ("/run/.containerenv", "/.dockerenv")
"""Files that podman and Docker put into their containers."""


def hub_checks(environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Return the checks of a hub's server, by the environment that its spawner has given it."""
    inside = "JUPYTERHUB_SERVICE_PREFIX" in environment
    checks = [
        judge(
            "JupyterHub",
            inside,
            f"a server of {environment.get('JUPYTERHUB_USER', 'a user')}" if inside else "not a server of a hub",
            "The checks below are about this process and its environment, not about the hub's users.",
            "Run it in a terminal of a server that the hub has started.",
            required=False,
        ),
        hibernation_check(),
    ]
    if "SLURM_JOB_ID" in environment:
        return [*checks, *slurm_checks()]
    checks += [run_folder_check(), *locks_check()]
    if _POD in environment:
        return [*checks, _KUBESPAWNER, volume_check()]
    return [*checks, _LOCAL_SPAWNERS]


_KUBESPAWNER = judge(
    "spawner's time",
    False,
    "KubeSpawner; its grace period cannot be seen from here",
    "As it is installed, it gives a pod one second to stop, which is too short to save a kernel.",
    "Set c.KubeSpawner.delete_grace_period = 120 in the hub's configuration.",
    required=False,
)
_LOCAL_SPAWNERS = judge(
    "spawner's time",
    False,
    "a process on the hub's machine; its time-outs cannot be seen from here",
    "LocalProcessSpawner of JupyterHub 6 sends SIGINT, after 30 s SIGTERM, and kills the server after another 30 s.",
    "Set c.LocalProcessSpawner.interrupt_timeout = 120 in the hub's configuration.",
    required=False,
)


def container_checks(environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Return the checks of a container of podman's or Docker's."""
    inside = "container" in environment or any(map(os.path.exists, _MARKS)) or _POD in environment
    return [_place("container", inside, "podman exec"), *_in_container(), _STOP_TIME]


def _in_container() -> list[Check]:
    return [volume_check(), *locks_check(), run_folder_check(), first_process_check(), hibernation_check()]


def _place(what: str, inside: bool, enter: str) -> Check:
    return judge(
        what,
        inside,
        f"this is in a {what}" if inside else f"not in a {what}, as far as can be seen",
        f"The checks below are about where this process runs, not about a {what}.",
        f"Run it in the {what} that Jupyter runs in, such as by `{enter}`.",
        required=False,
    )


_STOP_TIME = judge(
    "time to save",
    False,
    "cannot be seen from inside the container",
    "podman and Docker kill a container 10 s after the stop signal, unless it says otherwise.",
    "Start it with `--stop-timeout 120`, or stop it with `podman stop --time 120`.",
    required=False,
)


def kubernetes_checks(environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Return the checks of a pod."""
    return [_place("pod", _POD in environment, "kubectl exec"), *_in_container(), _GRACE_PERIOD]


_GRACE_PERIOD = judge(
    "time to save",
    False,
    "cannot be seen from inside the pod",
    "Kubernetes kills a pod's containers terminationGracePeriodSeconds after the stop signal: 30 s unless the pod says "
    "otherwise.",
    "Look: `kubectl get pod NAME -o jsonpath={.spec.terminationGracePeriodSeconds}`. Set it to 120 in the pod's spec.",
    required=False,
)


def first_process_check(process: Path = Path("/proc/1")) -> Check:
    """Return whether a container's stop signal reaches a program that does something about it."""
    words: list[str] = []
    with contextlib.suppress(OSError):  # a /proc that hides other users' processes
        line = process.joinpath("cmdline").read_bytes()
        words = [word.decode(errors="replace") for word in line.split(b"\0") if word]
    shell = bool(words) and Path(words[0]).name in _SHELLS
    return judge(
        "stop signal",
        not shell,
        f"goes to {' '.join(words[:2]) if words else 'an unknown process'}",
        "A shell as the container's first process does not pass the stop signal on: nothing is saved.",
        "Write `exec` before the last command of the script, or name the command itself as the container's command.",
        required=False,
    )


ENGINES: Mapping[str, Callable[[], list[Check]]] = {
    "slurm": slurm_checks,
    "jupyterhub": hub_checks,
    "container": container_checks,
    "kubernetes": kubernetes_checks,
}
"""What `doctor --for` checks besides, by the engine's name."""
